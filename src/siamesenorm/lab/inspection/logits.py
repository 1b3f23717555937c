"""The largest attention logit of every sublayer: q·k / sqrt(head_dim) over all pairs of tokens that see each other.

Seen where attention runs by PyTorch's `scaled_dot_product_attention`, in models of any kind.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

QUERIES = 128
"""Queries whose logits are in memory at once."""


class AttentionLogits(TorchFunctionMode):
    """While it is entered, every attention that runs adds to the number of the sublayer that is running."""

    def __init__(self, sublayers: int) -> None:
        super().__init__()
        self.found: list[float | None] = [None] * sublayers
        self.running: int | None = None

    @property
    def numbers(self) -> tuple[float | None, ...] | None:
        """By sublayer; None where no attention was seen."""
        return None if all(number is None for number in self.found) else tuple(self.found)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Looks at attention alone."""
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and self.running is not None:
            with torch.no_grad():
                largest, before = largest_logit(*args, **kwargs), self.found[self.running]
            self.found[self.running] = largest if before is None else max(before, largest)
        return function(*args, **kwargs)


def largest_logit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> float:
    """Takes what `scaled_dot_product_attention` takes; a mask of numbers only hides, and is not added."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    hidden = None if attn_mask is None else ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    if is_causal:
        hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
    largest = []
    for start in range(0, query.shape[-2], QUERIES):
        some = slice(start, start + QUERIES)
        logits = (query[..., some, :].float() @ key.float().transpose(-1, -2)) * scale
        if hidden is not None:
            rows = hidden if hidden.shape[-2] == 1 else hidden[..., some, :]
            logits = logits.masked_fill(rows, -torch.inf)
        largest.append(logits.max())
    return float(torch.stack(largest).max())
