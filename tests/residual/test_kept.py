"""What the fused siamese step keeps for backward, makes again there, and leaves to hooks that stand outside."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .stacks import MLP, PAIR, D, L, make, make_sublayers
from .test_fused import Several, assert_same, both_gradients, every_form, model_case


class Saved:
    """What autograd keeps, by storage."""

    def __init__(self):
        self.bytes, self.tensors = {}, []

    def pack(self, t):
        self.tensors.append(t)
        self.bytes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    def total(self, without):
        known = {p.untyped_storage().data_ptr() for p in without}
        return sum(size for pointer, size in self.bytes.items() if pointer not in known)

    def hooks(self):
        return saved_tensors_hooks(self.pack, lambda t: t)


@every_form
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_less_is_kept(text, norm):
    blocks, rows, width = 4, 6, 8
    sublayers = nn.ModuleList(MLP(width) for _ in range(2 * blocks))
    totals = {}
    for fused in (True, False):
        topology = make(text, blocks, width, torch.float32, norm=norm, fused=fused)
        x = torch.randn(rows, width, requires_grad=True)
        saved = Saved()
        with saved.hooks():
            out = topology(x, sublayers)
        totals[fused] = saved.total([*topology.parameters(), *sublayers.parameters()])
        del out
    stream, hidden = rows * width * 4, rows * 2 * width * 4
    steps = 2 * blocks - 1
    assert totals[True] < 0.85 * totals[False]
    # X1 and Y' a step and the sublayer's own hidden values; the rest is the first read, the end and row statistics
    assert totals[True] <= steps * 2 * stream + 2 * blocks * hidden + 8 * stream + steps * 6 * rows * 4


@every_form
def test_what_the_sublayer_sees_is_not_kept(text):
    topology, _, x = model_case(text)
    sublayers, seen, saved = [MLP(D).double() for _ in range(2 * L)], [], Saved()
    with saved.hooks():
        out = topology(x, [lambda h, F=F: (seen.append(h), F(h))[1] for F in sublayers])
    kept = {t.data_ptr() for t in saved.tensors}
    assert [h.data_ptr() in kept for h in seen] == [True] + [False] * (2 * L - 1)  # the first read is no fused step
    assert out.requires_grad


@every_form
def test_what_the_sublayer_saw_is_made_once_a_backward_and_let_go(text, monkeypatch):
    """Once for all of its projections; a second backward makes it again, so the first has not held on to it."""
    import siamesenorm.residual.fused.siamese as module

    made, real = [], module._make_h
    monkeypatch.setattr(module, "_make_h", lambda *args: made.append(1) or real(*args))
    topology, sublayers, x = model_case(text, sublayers=nn.ModuleList(Several(D) for _ in range(2 * L)).double())
    out = topology(x, sublayers).sum()
    out.backward(retain_graph=True)
    assert len(made) == 2 * L - 1
    out.backward()
    assert len(made) == 2 * (2 * L - 1)


@every_form
def test_offloaded_to_the_cpu(text):
    def offloaded(topology, x, sublayers):
        with save_on_cpu():
            return topology(x, sublayers)

    assert_same(both_gradients(text, make_sublayers([PAIR] * L), offloaded))


@every_form
def test_hooks_outside_and_inside_the_sublayer_each_do_their_part(text):
    def scaled_and_back(topology, x, sublayers):
        with saved_tensors_hooks(lambda t: ("outer", t * 2), lambda pair: pair[1] / 2):
            return topology(x, sublayers)

    def hooked(F):
        def call(h):
            with saved_tensors_hooks(lambda t: (t.clone(), "inner"), lambda pair: pair[0]):
                return F(h)

        return call

    sublayers = make_sublayers([PAIR] * L)
    assert_same(both_gradients(text, sublayers, scaled_and_back))
    assert_same(both_gradients(text, sublayers, lambda topology, x, fs: topology(x, [hooked(F) for F in fs])))


@every_form
def test_whole_stack_under_checkpoint(text):
    def remade(topology, x, sublayers):
        return checkpoint(lambda x: topology(x, sublayers), x, use_reentrant=False)

    assert_same(both_gradients(text, nn.ModuleList(Several(D) for _ in range(2 * L)).double(), remade))


@every_form
def test_a_parameter_changed_before_backward_is_noticed(text):
    """Recomputing with other values would give wrong gradients in silence."""
    topology, sublayers, x = model_case(text)
    out = topology(x, sublayers)
    with torch.no_grad():
        topology.links[2].y.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
