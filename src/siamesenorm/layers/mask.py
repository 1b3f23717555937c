"""Which keys a query may see: causality, a sliding window, documents packed into one row, padding on the left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.jit._trace import is_tracing
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from siamesenorm.residual.kernels.eager import transformed


@dataclass(frozen=True)
class Visibility:
    """What limits attention: a boolean mask that broadcasts to (batch, heads, queries, keys), or less than that."""

    mask: Tensor | None = None
    """True where a query sees a key."""
    is_causal: bool = False
    """Without a mask: whether queries see only keys up to their own (queries and keys then count the same)."""
    last_keys: int | None = None
    """Only so many keys from the end matter (a window over a cache); None: all."""
    blocks: BlockMask | None = None
    """Instead of a mask: the blocks of 128 queries and keys that see each other at all, for FlexAttention."""


def visibility(
    queries: int,
    keys: int,
    *,
    window: int | None = None,
    document_ids: Tensor | None = None,
    padding: Tensor | None = None,
    device: torch.device | str | None = None,
    blocks: bool = False,
) -> Visibility:
    """What `queries` tokens see of `keys` tokens, where the queries are the last of the keys.

    window: a query sees itself and the ``window - 1`` tokens before it.
    document_ids: (batch, keys); tokens see their own document only.
    padding: (batch,) how many tokens at the left of each row are filling. A filling token sees itself, so that
    no row of the softmax is empty.
    blocks: whether packed documents are said in blocks (`takes_blocks`): a dense mask would cost SDPA its flash kernel.
    A mask is made only where SDPA's own causal form, or no mask, does not say the same (in a trace, which also serves
    other lengths: where it never does).
    """
    traced = is_tracing()
    if window is not None and not traced and window >= keys:
        window = None
    if document_ids is None and padding is None:
        if queries == keys and window is None:
            return Visibility(is_causal=True)
        if queries == 1 and not traced:
            return Visibility(last_keys=window)
    if blocks and document_ids is not None and padding is None and queries == keys:
        sees = _sees(document_ids, window)
        return Visibility(blocks=create_block_mask(sees, len(document_ids), None, keys, keys, device=str(device)))
    key = torch.arange(keys, device=device)
    query = key[keys - queries :, None]
    mask = query >= key
    if window is not None:
        mask = mask & (query - key < window)
    mask = mask[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, keys - queries :, None] == document_ids[:, None, None, :])
    if padding is not None:
        mask = (mask & (key >= padding[:, None, None, None])) | (query == key)
    return Visibility(mask)


def takes_blocks(device: torch.device, head_dim: int) -> bool:
    """Whether FlexAttention has forward and backward for such heads here, and nothing needs plain operators."""
    return device.type == "cuda" and head_dim >= 16 and not transformed()


def _sees(document_ids: Tensor, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Whether a query sees a key of its own document, as FlexAttention asks it."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query >= key if window is None else (query >= key) & (query - key < window)
        return near & (document_ids[row, query] == document_ids[row, key])

    return sees


def document_positions(document_ids: Tensor) -> Tensor:
    """Positions that start again at 0 with every document, for (batch, tokens) ids of packed rows."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values
