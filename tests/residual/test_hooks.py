"""Hooks on norms and links, and others put in their place, count in every topology, fused or not."""

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from siamesenorm.residual import Flow, Link, RMSNorm
from siamesenorm.residual.norms import Norm

from .stacks import PAIR, D, L, every_row, make, make_sublayers, randomise

CALLS = Counter()


class Louder(RMSNorm):
    """A user's norm: ours, with a forward of its own."""

    def forward(self, x):
        CALLS[id(self)] += 1
        return 2 * super().forward(x) + 0.5


def stack(row, norm="rms", fused=True, **how):
    topology = make(row, dtype=torch.float32, norm=norm, fused=fused, **how)
    torch.manual_seed(1)
    randomise(topology, 0.2)
    return topology, make_sublayers([PAIR] * L, dtype=torch.float32), torch.randn(2, 3, D)


def norms_of(topology):
    return {name: module for name, module in topology.named_modules() if isinstance(module, Norm)}


def same(row, change):
    """The output of a topology that was changed, fused and plain, and of a copy; the changes must count in all."""
    results = []
    for fused, copied in ((True, False), (False, False), (True, True)):
        topology, sublayers, x = stack(row, fused=fused)
        original, topology = topology, copy.deepcopy(topology) if copied else topology
        before = topology(x, sublayers)
        change(topology)
        results.append(topology(x, sublayers))
        assert not norms_of(topology) or (results[-1] - before).abs().max() > 1e-3
        assert not copied or torch.equal(original(x, sublayers), before)
    for result in results[1:]:
        assert_close(results[0], result, rtol=1e-4, atol=1e-4)


@every_row
def test_norms_with_a_forward_of_their_own_are_called(row):
    topology, sublayers, x = stack(row, Louder)
    CALLS.clear()
    topology(x, sublayers)
    assert {id(n): 1 for n in topology.modules() if type(n) is Louder} == CALLS


def replaced(topology, make_norm):
    for name, norm in norms_of(topology).items():
        parent, _, child = name.rpartition(".")
        setattr(topology.get_submodule(parent), child, make_norm(norm))


@every_row
def test_norms_that_change_their_class_are_called(row):
    """As libraries do that give every module of a kind another forward in its place."""
    topology, sublayers, x = stack(row)
    topology(x, sublayers)
    norms = [module for module in topology.modules() if type(module) is RMSNorm]
    for norm in norms:
        norm.__class__ = Louder
    CALLS.clear()
    topology(x, sublayers)
    assert {id(norm): 1 for norm in norms} == CALLS


@every_row
def test_a_norm_put_in_the_place_of_another_is_called(row):
    def louder(norm):
        other = Louder(norm.dim, norm.eps, affine=norm.weight is not None)
        other.load_state_dict(norm.state_dict())
        return other

    same(row, lambda topology: replaced(topology, louder))


@every_row
def test_a_forward_put_on_one_norm_is_called(row):
    def patch(topology):
        for norm in norms_of(topology).values():
            norm.forward = lambda x, norm=norm: 2 * type(norm).forward(norm, x) + 0.5

    same(row, patch)


@every_row
def test_a_read_or_write_put_on_a_link_is_called(row):
    """As looking inside does."""
    for method in ("read", "write"):
        topology, sublayers, x = stack(row)
        expected, calls = topology(x, sublayers), []
        for link in topology.links:
            real = getattr(link, method)
            setattr(link, method, lambda *args, real=real, calls=calls: calls.append(1) or real(*args))
        assert_close(topology(x, sublayers), expected, rtol=1e-4, atol=1e-4)
        assert len(calls) == 2 * L


@every_row
@pytest.mark.parametrize("run", ["forward", "flow"])
def test_links_and_drops_are_called(row, run):
    topology, sublayers, x = stack(row, drop_path=0.5)
    seen = Counter()
    for name, module in topology.named_modules():
        if isinstance(module, Link) or name.endswith(".drop"):
            module.register_forward_hook(lambda _, args, out, name=name: seen.update([name]))
    topology.train()
    if run == "forward":
        topology(x, sublayers)
    else:
        flow = Flow(topology, x)
        for sublayer in sublayers:
            flow.through(sublayer)
    links = {n for n, m in topology.named_modules() if isinstance(m, Link)}
    drops = {f"links.{k}.drop" for k in range(2 * L)}
    assert seen == dict.fromkeys(links | drops, 1)


@every_row
def test_a_hook_on_a_link_sees_and_changes_what_its_sublayer_sees(row):
    topology, sublayers, x = stack(row)
    seen = []
    topology.links[1].register_forward_hook(lambda _, args, out: (out[0], out[1] + 1))
    recording = [lambda h, F=F: seen.append(h) or F(h) for F in sublayers]
    topology(x, recording)
    changed = seen[1]
    assert isinstance(changed, Tensor)
    topology.links[1]._forward_hooks.clear()
    topology(x, recording)
    assert_close(changed, seen[-3] + 1, rtol=1e-4, atol=1e-4)


def test_weights_computed_by_a_parametrization_count():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    def parametrize(topology):
        for norm in norms_of(topology).values():
            nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())

    same("siamese:form=plain", parametrize)
