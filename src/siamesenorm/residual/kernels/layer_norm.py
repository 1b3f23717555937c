"""LayerNorm by PyTorch's own kernel, float32 inside whatever the input is; composed where its derivatives are wrong.

PyTorch takes mean and variance for constants when its derivative is differentiated again in forward mode or under
`vmap` (pytorch/pytorch issue 196700): `torch.func.hessian` would be off without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from siamesenorm.residual.kernels.eager import transformed
from siamesenorm.residual.kernels.rms_norm import LOW_PRECISION


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, in x's dtype."""
    values = x.float() if x.dtype in LOW_PRECISION else x
    weight, bias = (None if p is None else p.to(values.dtype) for p in (weight, bias))
    if not transformed():
        return F.layer_norm(values, list(shape), weight, bias, eps).to(x.dtype)
    centred = values - values.mean(-1, keepdim=True)
    out = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)
