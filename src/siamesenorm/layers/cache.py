"""Keys and values of the tokens so far, in memory that is taken once."""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.layers.rotary import CosSin, Rotary


class KeyValueCache:
    """Room for `max_length` tokens of every layer; all rows of the batch grow together.

    Rows of unequal length are padded on the left; `padding` (batch,) says by how many tokens.
    A model's forward fills it and calls `advance` once at its end.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        max_length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (batch, kv_heads, max_length, head_dim)
        self.keys = [torch.empty(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.values = [torch.empty(shape, device=device, dtype=dtype) for _ in range(layers)]
        self.length, self.max_length = 0, max_length
        self.padding: Tensor | None = None
        self.cos_sin_tables: dict[Rotary, CosSin] = {}

    def check_room(self, rows: int, tokens: int) -> None:
        """Raise where so many more tokens of so many rows do not fit."""
        if rows != (made := self.keys[0].shape[0]):
            raise ValueError(f"cache: it was made for {made} rows, {rows} are given")
        if self.length + tokens > self.max_length:
            raise ValueError(f"cache: {self.length + tokens} tokens do not fit into max_length = {self.max_length}")

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values of a layer behind the old ones; views of all of them."""
        new = key.shape[2]
        end = self.length + new
        keys, values = self.keys[layer], self.values[layer]
        keys.narrow(2, self.length, new).copy_(key)
        values.narrow(2, self.length, new).copy_(value)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def cos_sin(self, positions: Tensor | slice, rotary: Rotary) -> CosSin:
        """Rotary angles of these positions, from a table that is made once."""
        if rotary not in self.cos_sin_tables:
            table = torch.arange(self.max_length, device=self.keys[0].device)
            self.cos_sin_tables[rotary] = rotary.cos_sin(table, self.keys[0].shape[-1])
        cos, sin = self.cos_sin_tables[rotary]
        return cos[positions], sin[positions]

    def advance(self, tokens: int) -> None:
        """Count the tokens that all layers have now stored."""
        self.length += tokens
