"""Batches of nothing: right shapes, and gradients of zero for every parameter."""

import pytest
import torch

from .families import FAMILIES, WORDS, callable_form
from .small import ALL

LENGTHS = {"no rows": (0, 5), "no tokens": (2, 0), "neither": (0, 0)}


def assert_zero(model):
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize(
    ("family", "length", "topology"),
    [("lm", length, name) for length in LENGTHS for name in ALL]
    + [("lm with experts", list(LENGTHS)[n % len(LENGTHS)], name) for n, name in enumerate(ALL)],
)
def test_language_models(family, length, topology):
    """Every topology with every shape, and with experts one shape after the other."""
    shape = LENGTHS[length]
    model, ids = FAMILIES[family].model(topology, torch.float32), torch.zeros(shape, dtype=torch.long)
    out = model(ids, labels=ids, logits_to_keep=shape[1])
    assert out.loss == 0
    assert out.logits.shape == (*shape, WORDS)
    out.loss.backward()
    assert model.head.weight.grad is not None
    assert_zero(model)
    with torch.no_grad():
        assert model(ids).logits.shape == (*shape, WORDS)


@pytest.mark.parametrize("family", ["vit", "dit"])
@pytest.mark.parametrize("topology", ALL)
def test_image_models(family, topology):
    model = FAMILIES[family].model(topology, torch.float32)
    out = callable_form(model)(*FAMILIES[family].inputs(0))
    assert out.shape == (0, *model(*FAMILIES[family].inputs(2)).shape[1:])
    out.sum().backward()
    assert_zero(model)
