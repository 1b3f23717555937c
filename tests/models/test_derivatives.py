"""First and second derivatives of every model, by every transform of torch: they agree with finite differences.

The reference is float64, where no operator of ours runs; the transforms run in float32, where they may.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from residual.transforms import TRANSFORMS, along_directions, assert_agree, by_autograd, by_differences

from .families import FAMILIES
from .small import ALL

every_family = pytest.mark.parametrize("family", FAMILIES)


def steps(family, topology, dtype):
    """A model's loss as a function of steps along two directions of all its parameters."""
    model = FAMILIES[family].model(topology, dtype)
    return along_directions(model, lambda: FAMILIES[family].loss(model, dtype))


def reference(family, topology):
    exact, t = steps(family, topology, torch.float64), torch.zeros(2, dtype=torch.float64)
    expected = by_autograd(exact, t)
    assert_agree("finite differences", by_differences(exact, t), expected, 1e-5)
    return expected


def assert_transforms_agree(family, topology, names=TRANSFORMS):
    with sdpa_kernel(SDPBackend.MATH):  # torch's faster attention has first derivatives in reverse only
        expected, f = reference(family, topology), steps(family, topology, torch.float32)
        for name in names:
            assert_agree(name, TRANSFORMS[name](f, torch.zeros(2)), expected, 1e-3)


@every_family
@pytest.mark.parametrize("topology", ["siamese", "siamese:form=hybrid_pre"])
def test_transforms_agree_with_finite_differences(family, topology):
    assert_transforms_agree(family, topology)


@pytest.mark.parametrize("topology", [name for name in ALL if name not in ("siamese", "siamese:form=hybrid_pre")])
def test_language_models_of_every_topology(topology):
    assert_transforms_agree("lm", topology, ["autograd twice"])


@every_family
def test_with_torchs_own_choice_of_attention_they_agree_or_raise(family):
    with sdpa_kernel(SDPBackend.MATH):
        expected = reference(family, "siamese")
    f, raised = steps(family, "siamese", torch.float32), []
    for name, derive in TRANSFORMS.items():
        try:
            got = derive(f, torch.zeros(2))
        except (RuntimeError, NotImplementedError) as error:
            raised.append((name, str(error)))
        else:
            assert_agree(name, got, expected, 1e-3)
    assert "vmap" not in dict(raised)
    assert all("scaled_dot_product" in message for _, message in raised)
