"""First and second derivatives of every topology, by every transform of torch: all agree with finite differences.

The reference is float64, where no operator of ours runs; the transforms run in float32, where they may.
"""

import pytest
import torch
from torch import nn

from .stacks import GRAPHS, KINDS, PAIR, D, L, every_row, make, make_sublayers, randomise
from .transforms import TRANSFORMS, along_directions, assert_agree, by_autograd, by_differences


def stack(row, dtype, norm="rms"):
    """A smooth loss of a topology and its sublayers, as a function of steps along two directions of all parameters."""
    torch.manual_seed(0)
    held = nn.ModuleDict({"topology": make(row, norm=norm), "sublayers": make_sublayers([PAIR] * L)})
    randomise(held["topology"], 0.2)
    held.to(dtype)
    x, weights = torch.randn(2, 2, 3, D, dtype=torch.float64).to(dtype)
    return along_directions(held, lambda: (held["topology"](x, held["sublayers"]) * weights).sin().sum())


def assert_transforms_agree(row, norm="rms", names=TRANSFORMS):
    exact, f = stack(row, torch.float64, norm), stack(row, torch.float32, norm)
    t = torch.zeros(2, dtype=torch.float64)
    expected = by_autograd(exact, t)
    assert_agree("finite differences", by_differences(exact, t), expected, 1e-5)
    for name in names:
        assert_agree(name, TRANSFORMS[name](f, t.float()), expected, 1e-4)


@every_row
def test_transforms_agree_with_finite_differences(row):
    """All of them on each kind of streams, every third by turns on other topologies, and on all rows the first one,
    which runs our operators; options that only change numbers of a graph have no other."""
    first, *others = TRANSFORMS
    turn = others if row.text in KINDS else others[GRAPHS.index(row) % 3 :: 3] if row in GRAPHS else []
    assert_transforms_agree(row, names=[first, *turn])


@pytest.mark.parametrize("text", ["siamese", "siamese:form=plain", "siamese:form=hybrid_pre", "pre"])
def test_transforms_of_layer_norms(text):
    assert_transforms_agree(text, "layer")
