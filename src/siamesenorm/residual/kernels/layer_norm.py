"""LayerNorm by PyTorch's own kernel, float32 inside whatever the input is; composed where its derivatives are wrong.

PyTorch takes mean and variance for constants when its derivative is differentiated again in forward mode or under
`vmap`: `torch.func.hessian` would be off without a word.

There is no operator of ours: PyTorch's is one pass forward on every device, and on a GPU keeps float32 statistics of
low-precision rows. The siamese step, which has norms inside, brings a LayerNorm of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from siamesenorm.residual.kernels.eager import transformed
from siamesenorm.residual.precision import LOW_PRECISION


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in x's dtype."""
    composed = transformed()
    # A GPU's kernel widens by itself, if all is of one dtype; a CPU's would round the statistics that backward takes.
    widens = x.is_cuda and not composed and all(p is None or p.dtype is x.dtype for p in (weight, bias))
    values = x.float() if x.dtype in LOW_PRECISION and not widens else x
    weight, bias = (None if p is None else p.to(values.dtype) for p in (weight, bias))
    if not composed:
        return F.layer_norm(values, list(shape), weight, bias, eps).to(x.dtype)
    centred = values - values.mean(-1, keepdim=True)
    out = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)
