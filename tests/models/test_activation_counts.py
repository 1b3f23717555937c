"""What autograd keeps for the backward pass is what was counted before a model was made, for every family."""

from contextlib import nullcontext

import pytest
import torch

from siamesenorm.models.dit import DiT, count_dit, dit_preset
from siamesenorm.models.lm import count_lm
from siamesenorm.models.vit import VisionTransformer, count_vit, vit_preset
from siamesenorm.residual.kernels import native

from .small import stirred

ROWS = 4
TOPOLOGIES = (
    *("pre", "siamese", "hyper", "mhc_lite", "gr", "dense", "attnres"),
    *("siamese:form=hybrid_pre", "subln", "reordered"),  # with norms inside of sublayers
)


def language(topology):
    """A model, inputs of so many rows, its counts, and the units of a row."""
    model = stirred(topology, dim=64, ffn_dim=192, heads=4, kv_heads=4, head_dim=16, blocks=4)
    return model, (torch.zeros(ROWS, 64, dtype=torch.long),), count_lm(model.config), 64


def vision(topology):
    model = VisionTransformer(vit_preset("vit-28", topology=topology))
    return model, (torch.zeros(ROWS, 1, 28, 28),), count_vit(model.config), 1


def diffusion(topology):
    model = DiT(dit_preset("dit-digits", topology=topology))
    inputs = torch.zeros(ROWS, 1, 8, 8), torch.zeros(ROWS), torch.zeros(ROWS, dtype=torch.long)
    return model, inputs, count_dit(model.config), 1


def kept_for_backward(model, *inputs):
    """Bytes that autograd keeps of a forward pass, the weights apart."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages, alive = {}, []

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)  # so that no storage is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive.append(model(*inputs))
    return sum(size for at, size in storages.items() if at not in weights)


@pytest.mark.parametrize("kernels", [nullcontext, native.disabled], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("family", [language, vision, diffusion])
def test_counted_is_kept(family, topology, kernels):
    with kernels():
        model, inputs, counts, units = family(topology)
        assert counts.activation_bytes == pytest.approx(kept_for_backward(model, *inputs) / ROWS / units, rel=0.02)
