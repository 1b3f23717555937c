"""A model's weights in one safetensors file, whatever it was sharded in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from siamesenorm.data.atomic import whole_file
from siamesenorm.train.layout import row_orders, usual_rows, whole
from siamesenorm.train.training_state import model_tensors


@torch.no_grad()
def gather_weights(
    model: nn.Module, tensors: Mapping[str, Tensor] | None = None, *, keep: bool = True
) -> dict[str, Tensor]:
    """Whole weights on the CPU under their plain names, rows in the usual order; one matrix at a time.

    tensors: others under the same names, such as averaged weights, in place of the model's. Every process must
    call this where the model is sharded; those with ``keep=False`` help and get nothing.
    """
    orders = dict(row_orders(model))
    gathered = {}
    for name, tensor in model_tensors(model).items():
        full = whole((tensors or {}).get(name, tensor).detach())
        if keep:
            full = usual_rows(full, orders[name]) if name in orders else full
            gathered[name] = full.to("cpu", copy=True).contiguous()
    return gathered


def export_weights(
    model: nn.Module, file: Path | str, tensors: Mapping[str, Tensor] | None = None, *, is_main: bool = True
) -> None:
    """Write weights as safetensors, whole or not at all; every process calls it, the main one writes."""
    weights = gather_weights(model, tensors, keep=is_main)
    if is_main:
        from safetensors.torch import save

        with whole_file(Path(file)) as out:
            out.write(save(weights, metadata={"format": "pt"}))
