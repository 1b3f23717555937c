"""LayerNorm by PyTorch's own kernel, float32 inside whatever the input is.

There is no operator of ours: PyTorch's is one pass forward on every device, and on a GPU keeps float32 statistics of
low-precision rows. The siamese step, which has norms inside, brings a LayerNorm of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from siamesenorm.residual.kernels.rms_norm import LOW_PRECISION


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in x's dtype."""
    values = x
    if x.dtype in LOW_PRECISION and not (x.is_cuda and all(p is None or p.dtype is x.dtype for p in (weight, bias))):
        values = x.float()  # the CPU's kernel would round the statistics that backward takes; a GPU's takes no mixture
    weight, bias = (None if p is None else p.to(values.dtype) for p in (weight, bias))
    return F.layer_norm(values, list(shape), weight, bias, eps).to(x.dtype)
