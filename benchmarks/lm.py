"""The language model against others: training steps, decoding and peak memory, as ratios of interleaved runs.

    python benchmarks/lm.py                                              # this package alone
    python benchmarks/lm.py --peer transformers=PYTHON --peer litgpt=PYTHON

PYTHON is the interpreter of an environment with that peer installed (``transformers`` also races
``x-transformers``). Every contestant lives in a process of its own, so that environments that exclude each other
can race; the parent gives them the word in turn, one step each, so all see the same machine. Ratios are medians over
the rounds of (contestant's speed / speed of ``siamesenorm:pre``), with quartiles: above 1 is faster than Pre-Norm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("lm_worker.py")
RESULT = Path(__file__).parent / "results" / "lm.json"
SHAPES = {  # width, blocks, heads, FFN width
    "d256x8": {"dim": 256, "blocks": 8, "heads": 4, "hidden": 704},
    "d512x12": {"dim": 512, "blocks": 12, "heads": 8, "hidden": 1376},
}
OURS = ["siamesenorm:pre", "siamesenorm:siamese", "siamesenorm:siamese:form=hybrid_pre"]
COMPILED = ["siamesenorm:pre+compiled", "siamesenorm:siamese+compiled"]
PEERS = {
    "transformers": ["transformers:llama", "transformers:olmo2"],
    "x-transformers": ["x-transformers"],
    "litgpt": ["litgpt"],
}


class Worker:
    """A contestant's process."""

    def __init__(self, python: str, contestant: str, shape: dict[str, int], *extra: str, exact: bool = False) -> None:
        self.python, self.contestant = python, contestant
        arguments = [f"--{name}={value}" for name, value in shape.items()]
        environment = dict(os.environ)
        if exact:  # freed blocks go back at once: the peak then follows live tensors, not malloc's habits
            environment |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        self.process = subprocess.Popen(
            [python, str(WORKER), contestant, *arguments, *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, command: str) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.contestant}: the worker ended with code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def race(workers: list[Worker], command: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Speeds relative to the first worker, one command a turn."""
    for worker in workers:
        worker.ask(command)  # warm-up, and compilation
    seconds: dict[str, list[float]] = {worker.contestant: [] for worker in workers}
    for index in range(rounds):
        turn = index % len(workers)
        for worker in workers[turn:] + workers[:turn]:
            seconds[worker.contestant].append(worker.ask(command)["seconds"])
    first = seconds[workers[0].contestant]
    table = {}
    for name, values in seconds.items():
        ratios = [base / value for base, value in zip(first, values, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table[name] = {"speed": middle, "quartiles": [low, high], "seconds": statistics.median(values)}
    return table


def show(title: str, table: dict[str, dict[str, Any]], tokens: int) -> None:
    print(f"\n{title}")
    for name, row in table.items():
        low, high = row["quartiles"]
        print(f"  {name:40s} {row['speed']:6.3f} ({low:.3f}..{high:.3f})  {tokens / row['seconds']:9.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(PEERS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--parts", nargs="+", default=["train", "compiled", "decode", "peak"])
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--decode", type=int, default=64, help="tokens to decode")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    peers = dict(item.split("=", 1) for item in args.peer)
    if set(peers) - set(PEERS):
        parser.error(f"--peer: {sorted(set(peers) - set(PEERS))[0]!r} is unknown; known peers: {', '.join(PEERS)}")

    report: dict[str, Any] = {
        "command": "python benchmarks/lm.py",
        "peers": sorted(peers),
        "python": platform.python_version(),
        "setting": {k: getattr(args, k) for k in ("sequence", "batch", "rounds", "decode", "threads")},
        "shapes": json.loads(args.out.read_text())["shapes"] if args.out.exists() else {},
    }
    for name in args.shapes:
        shape = {**SHAPES[name], "sequence": args.sequence, "batch": args.batch, "threads": args.threads}
        result: dict[str, Any] = {}
        workers = [Worker(sys.executable, contestant, shape) for contestant in OURS]
        workers += [Worker(python, c, shape) for peer, python in peers.items() for c in PEERS[peer]]
        result["parameters"] = {worker.contestant: worker.ask("parameters")["count"] for worker in workers}
        tokens = args.sequence * args.batch
        if "train" in args.parts:
            result["train"] = race(workers, "train", args.rounds)
            show(f"{name}: training step", result["train"], tokens)
        for worker in workers:
            worker.close()
        if "peak" in args.parts:
            peaks = {}
            for worker in (Worker(w.python, w.contestant, shape, exact=True) for w in workers):
                worker.ask("train")
                peaks[worker.contestant] = worker.ask("peak")["kib"]
                worker.close()
            base = peaks[OURS[0]]
            result["peak"] = {c: {"kib": kib, "ratio": kib / base} for c, kib in peaks.items()}
            print(f"\n{name}: peak growth of a step, relative to {OURS[0]}")
            for contestant, row in result["peak"].items():
                print(f"  {contestant:40s} {row['ratio']:6.3f}")
        if "compiled" in args.parts:
            workers = [Worker(sys.executable, contestant, shape) for contestant in COMPILED]
            result["compiled"] = race(workers, "train", args.rounds)
            show(f"{name}: training step, compiled", result["compiled"], tokens)
            for worker in workers:
                worker.close()
        if "decode" in args.parts and "transformers" in peers:
            with tempfile.TemporaryDirectory() as folder:
                weights = Path(folder) / "weights.pt"
                ours = Worker(sys.executable, OURS[0], shape, "--save-weights", str(weights))
                ours.ask("parameters")  # the weights are written before the first answer
                theirs = Worker(peers["transformers"], "transformers:llama", shape, "--load-weights", str(weights))
                command = f"decode {args.decode}"
                same = ours.ask(command)["tokens"] == theirs.ask(command)["tokens"]
                result["decode"] = {"same_tokens": same, **race([ours, theirs], command, args.rounds)}
                ours.close()
                theirs.close()
            rows = {k: v for k, v in result["decode"].items() if k != "same_tokens"}
            show(f"{name}: greedy decoding on the same weights, same tokens: {same}", rows, args.decode)
        report["shapes"].setdefault(name, {}).update(result)  # parts measured before stay
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
