"""``siamesenorm --version``: which code runs here, and on what: torch, the compiled kernels, threads, the CPU."""

from __future__ import annotations

from siamesenorm.loading import loading


def surroundings() -> list[str]:
    """What decides how fast this package is here and how it rounds, a line each."""
    with loading():
        import torch

        from siamesenorm.residual.kernels import native

    missing = native.absence()
    kernels = f"absent: {missing}; PyTorch's operators do their work" if missing else "compiled"
    return [
        f"torch {torch.__version__}",
        f"kernels {kernels}",
        f"threads {torch.get_num_threads()}",
        f"CPU capability {torch.backends.cpu.get_cpu_capability()}",
    ]
