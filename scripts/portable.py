"""The tests whose numbers depend on rounding, as other machines would compute them: ``make test-portable``.

Which instructions a CPU has decides how PyTorch, MKL and oneDNN add up, and so the last digits; threads and the
compiled kernels do too. Every setting runs the same tests; ``--only avx2-1`` runs those of these instructions and
threads alone, and all else that follows the script's name is handed to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
INSTRUCTIONS = {
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
}
# Instructions, threads, compiled kernels: every two of them meet in every combination.
SETTINGS = (
    ("default", 1, False),
    ("default", 2, True),
    ("avx2", 1, True),
    ("avx2", 2, False),
    ("avx512", 1, False),
    ("avx512", 2, True),
)
SENSITIVE = (
    *("residual", "layers", "models", "tasks", "data/latents", "data/images/test_transforms.py"),
    *("interop/test_official.py", "interop/test_official_deit.py", "interop/test_official_dit.py"),
    *("interop/test_timm.py", "interop/test_timm_weights.py", "interop/test_diffusers.py"),
    *("interop/test_huggingface_model.py", "interop/test_huggingface_generate.py"),
    *("interop/test_huggingface_export.py", "interop/test_huggingface_peft.py"),
    *("interop/test_autoencoder.py", "interop/test_evaluate.py", "commands/test_predict.py"),
    *("interop/test_pretrained.py", "interop/test_gguf.py", "interop/test_stock.py", "commands/test_graft.py"),
    *("lab/test_inspect.py", "lab/test_inspect_meaning.py", "lab/test_coordinates.py", "lab/test_grafts.py"),
    *("train/test_engine.py", "train/test_optimizer.py", "train/test_muon.py", "train/test_live_graft.py"),
    *("train/test_distributed.py", "train/test_distributed_images.py"),
    "train/test_distributed_runs.py::test_an_agent_dies_and_no_worker_waits_for_its_workers",
)
LEFT_OUT = (
    *("residual/test_compile.py", "residual/test_errors.py", "residual/test_hooks.py", "residual/test_needs.py"),
    *("residual/test_options.py", "residual/test_registering.py", "residual/test_tracing.py"),
    *("residual/test_triton.py", "layers/test_sanitizer.py", "models/test_activation_counts.py"),
    *("models/test_dit_counts.py", "models/test_lm_counts.py", "models/test_vit_counts.py", "models/test_lm_config.py"),
    *("models/test_hooks.py", "models/test_tracing.py", "tasks/test_metrics.py"),
)
"""Of these folders: what is refused, counted, traced or called, and kernels that no setting changes."""


def supported(instructions: str) -> bool:
    """Whether this CPU has them: PyTorch takes the best unless told otherwise, and would run what does not exist."""
    known = list(INSTRUCTIONS)
    best = torch.backends.cpu.get_cpu_capability().lower()
    return known.index(instructions) <= (known.index(best) if best in known else 0)


def main() -> int:
    """Run every setting; 1 where a test failed in any of them."""
    if "ATEN_CPU_CAPABILITY" in os.environ:
        print("portable: unset ATEN_CPU_CAPABILITY first: it hides which instructions this CPU has", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=[f"{known}-{threads}" for known, threads, _ in SETTINGS], help="one setting")
    options, for_pytest = parser.parse_known_args()
    failed = []
    for instructions, threads, kernels in SETTINGS:
        if options.only not in (None, f"{instructions}-{threads}"):
            continue
        name = f"{instructions}, {threads} thread{'s' * (threads > 1)}, {'with' if kernels else 'without'} kernels"
        if not supported(instructions):
            print(f"== {name}: not on this CPU", flush=True)
            continue
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-n", "2", f"--threads={threads}"]
        command += ["--no-kernels"] * (not kernels) + [f"tests/{name}" for name in SENSITIVE]
        command += [f"--ignore=tests/{name}" for name in LEFT_OUT]
        environment = {**os.environ, **INSTRUCTIONS[instructions]}
        if subprocess.run([*command, *for_pytest], cwd=ROOT, env=environment).returncode:
            failed.append(name)
    for name in failed:
        print(f"failed: {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
