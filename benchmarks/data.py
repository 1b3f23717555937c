"""Data never the bottleneck: batches a second from shards, and tokenising beside the bare `tokenizers` library.

python benchmarks/data.py                 # writes benchmarks/results/data.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siamesenorm.data import BatchLoader, ByteTokenizer, Tokenizer, TrainingData, open_tokens, prepare, train_bpe
from siamesenorm.data.stdlib import python_code
from siamesenorm.data.workers import available_cores

RESULTS = Path(__file__).parent / "results" / "data.json"


def interleaved(
    works: dict[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and seconds of all cores of each piece of work, in turns so that all meet the same machine."""
    for work in works.values():
        work()
    times: dict[str, list[float]] = {name: [] for name in works}
    cores: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            start, used = time.perf_counter(), time.process_time()
            work()
            times[name].append(time.perf_counter() - start)
            cores[name].append(time.process_time() - used)
    return times, cores


def reading(folder: Path, rounds: int) -> dict[str, Any]:
    """Tokens a second through the loader, for shapes from a laptop's to a cluster's."""
    shards, each = 8, 1 << 23
    chance = np.random.default_rng(0)
    for number in range(shards):
        ids = chance.integers(1, 50_000, each, dtype=np.uint16)
        ids[::700] = 0
        ids.tofile(folder / f"{number}.npy")
    tokens = open_tokens(folder, eos_id=0)
    bare = np.memmap(folder / "0.npy", dtype=np.uint16, mode="r")
    works: dict[str, Callable[[], object]] = {"plain copy of the file": lambda: bare.astype(np.int64)}
    counts = {"plain copy of the file": each}
    for length, batch, masking, prefetch in (
        (2048, 32, False, 2),
        (2048, 32, False, 0),
        (2048, 32, True, 2),
        (512, 32, False, 2),
        (64, 16, False, 2),
    ):
        data = TrainingData(tokens, length, document_masking=masking)
        steps = max(20, (1 << 23) // (length * batch) if length > 64 else 500)
        name = f"sequence {length}, batch {batch}{', masked' if masking else ''}, prefetch {prefetch}"

        def run(data: TrainingData = data, batch: int = batch, prefetch: int = prefetch, steps: int = steps) -> None:
            with BatchLoader(data, batch, prefetch=prefetch) as loader:
                for _ in range(steps):
                    next(loader)

        works[name], counts[name] = run, steps * batch * length
    times, cores = interleaved(works, rounds)
    return {
        name: {
            "tokens_per_second_median": round(counts[name] / statistics.median(taken)),
            "tokens_per_second_best": round(counts[name] / min(taken)),
            "tokens_per_core_second_median": round(counts[name] / statistics.median(cores[name])),
        }
        for name, taken in times.items()
    }


def tokenising(folder: Path, rounds: int, megabytes: float) -> dict[str, Any]:
    """`prepare` in one process, from JSONL to shards on disk, beside encode_batch of the same texts in memory."""
    texts = [text[start : start + 4000] for _, text in python_code() for start in range(0, len(text), 4000)]
    texts = texts[: int(megabytes * 1e6 / 4000)]
    size = sum(len(text.encode()) for text in texts)
    source = folder / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    bpe = train_bpe(texts[::5], 16_384)
    inner = bpe._inner

    def prepared(tokenizer: Tokenizer) -> None:
        with tempfile.TemporaryDirectory() as out:
            prepare([source], Path(out) / "out", tokenizer=tokenizer, workers=1, shard_bytes=1 << 30)

    times, _ = interleaved(
        {
            "tokenizers encode_batch": lambda: inner.encode_batch(texts, add_special_tokens=False),
            "tokenizers encode_batch_fast": lambda: inner.encode_batch_fast(texts, add_special_tokens=False),
            "prepare with the same BPE": lambda: prepared(bpe),
            "prepare with bytes": lambda: prepared(ByteTokenizer()),
        },
        rounds,
    )

    def ratio(base: str) -> float:
        ours = times["prepare with the same BPE"]
        return round(statistics.median(b / o for b, o in zip(times[base], ours, strict=True)), 3)

    return {
        "megabytes": round(size / 1e6, 1),
        "megabytes_per_second_median": {
            name: round(size / 1e6 / statistics.median(taken), 2) for name, taken in times.items()
        },
        "prepare_to_encode_batch": ratio("tokenizers encode_batch"),
        "prepare_to_encode_batch_fast": ratio("tokenizers encode_batch_fast"),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--megabytes", type=float, default=8.0)
    options.add_argument("--out", type=Path, default=RESULTS)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        result = {
            "command": "python benchmarks/data.py",
            "machine": {
                "cores": available_cores(),
                "load": os.getloadavg()[0],
                "python": platform.python_version(),
                "torch": torch.__version__,
            },
            "rounds": given.rounds,
            "reading": reading(Path(first), given.rounds),
            "tokenising": tokenising(Path(second), given.rounds, given.megabytes),
        }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
