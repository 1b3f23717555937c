"""Inspection against straight-line passes and closed forms: sizes, gradients, updates, peaks; nothing is changed."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from siamesenorm.lab import Inspection, inspect
from siamesenorm.lab.inspection import InspectionError
from siamesenorm.residual import Residual
from siamesenorm.train.activations import checkpoint_activations

from .stacks import SINGLE, SPECS, Stack, ids, tiny_lm


def rms(x):
    return x.double().square().mean().sqrt().item()


# Against straight-line passes ------------------------------------------------------------------------


def straight_pre(model, batch):
    """Streams at every depth and the loss, from the equation x = x + F(N x)."""
    inputs, labels = batch[:, :-1], batch[:, 1:]
    context = model.context(inputs)
    x = model.embedding(inputs).detach().requires_grad_()
    streams = [x]
    for index, link in enumerate(model.residual.links):
        block = model.blocks[index // 2]
        h = link.norm(x)
        x = x + (block.ffn(h) if index % 2 else block.attention(h, context))
        streams.append(x)
    logits = F.linear(model.residual.final_norm(x), model.head_weight)
    return streams, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def straight_siamese(model, batch):
    """(X, Y) at every depth and the loss, from the equations of the official code."""
    inputs, labels = batch[:, :-1], batch[:, 1:]
    context, residual = model.context(inputs), model.residual
    embedding = model.embedding(inputs).detach()
    X, Y = embedding.clone().requires_grad_(), embedding.clone().requires_grad_()
    streams = [(X, Y)]
    for index, link in enumerate(residual.links):
        block = model.blocks[index // 2]
        X = link.x.norm(X)
        h = link.input_norm(X + link.y.norm(Y))
        output = block.ffn(h) if index % 2 else block.attention(h, context)
        X, Y = X + output / (2 * (index // 2 + 1)) ** 0.5, Y + output
        streams.append((X, Y))
    hidden = residual.final_norm(residual.x.final_norm(X) + residual.y.final_norm(Y))
    return streams, F.cross_entropy(F.linear(hidden, model.head_weight).flatten(0, 1), labels.flatten())


def test_pre_norm_streams_and_gradients_are_those_of_a_straight_line_pass():
    model, batch = tiny_lm("pre").eval(), ids()
    streams, loss = straight_pre(model, batch)
    grads = torch.autograd.grad(loss, streams)
    found = inspect(model, batch)
    assert found.loss == pytest.approx(loss.item(), rel=1e-6)
    assert found.rms["x"] == pytest.approx([rms(x) for x in streams], rel=1e-6)
    tokens = batch[:, 1:].numel()
    expected = [(g.double() * tokens).square().sum(-1).mean().sqrt().item() for g in grads]
    assert found.gradients["x"] == pytest.approx(expected, rel=1e-4)
    # an update reaches one stream unscaled, so output and stream behind it have the same gradient
    assert found.output_gradients == pytest.approx(expected[1:], rel=1e-4)


def test_siamese_streams_and_gradients_are_those_of_a_straight_line_pass_each_stream_by_itself():
    model, batch = tiny_lm("siamese").eval(), ids()
    streams, loss = straight_siamese(model, batch)
    found = inspect(model, batch)
    tokens = batch[:, 1:].numel()
    for which, name in enumerate(("x", "y")):
        mine = [pair[which] for pair in streams]
        grads = torch.autograd.grad(loss, mine, retain_graph=True)
        expected = [(g.double() * tokens).square().sum(-1).mean().sqrt().item() for g in grads]
        assert found.rms[name] == pytest.approx([rms(x) for x in mine], rel=1e-6)
        assert found.gradients[name] == pytest.approx(expected, rel=1e-4)


def test_gradient_of_a_block_input_counts_all_its_ways():
    """SpanNorm's block input is read by attention and added behind the FFN: one tensor, one gradient."""
    model, batch = tiny_lm("span").eval(), ids()
    x = model.embedding(batch[:, :-1]).detach().requires_grad_()
    context = model.context(batch[:, :-1])
    sublayers = [s for b in model.blocks for s in (lambda h, b=b: b.attention(h, context), b.ffn)]
    hidden = model.residual(x, sublayers)
    loss = F.cross_entropy(F.linear(hidden, model.head_weight).flatten(0, 1), batch[:, 1:].flatten())
    (grad,) = torch.autograd.grad(loss, [x])
    expected = (grad.double() * batch[:, 1:].numel()).square().sum(-1).mean().sqrt().item()
    assert inspect(model, batch).gradients["x"][0] == pytest.approx(expected, rel=1e-4)


# Closed forms ----------------------------------------------------------------------------------------


def test_update_ratio_of_a_pre_norm_sublayer_that_scales_its_input():
    """O = c N(x) has rms c, so the ratio is c / rms(x)."""
    x = 5 * torch.randn(4, 6, 32, dtype=torch.float64)
    found = inspect(Stack("pre", 32, [lambda h: 0.5 * h, lambda h: 2.0 * h]).double(), x)
    assert found.updates["x"] == pytest.approx([0.5 / found.rms["x"][0], 2.0 / found.rms["x"][1]])


def test_update_ratios_of_siamese_streams():
    """X is normalised when it receives O / c_l, Y receives O as it is."""
    x = 5 * torch.randn(4, 6, 32, dtype=torch.float64)
    found = inspect(Stack("siamese", 32, [lambda h: 0.5 * h] * 4).double(), x)
    assert found.updates["x"] == pytest.approx([0.5 / c**0.5 for c in (2, 2, 4, 4)])
    assert found.updates["y"] == pytest.approx([0.5 / size for size in found.rms["y"][:-1]])


def test_update_ratio_behind_a_norm_sees_the_normalised_stream():
    """deepnorm with F(x) = x: N(a x + x) = N(a x), the stream does not change."""
    found = inspect(Stack("deepnorm", 32, [lambda h: h] * 2).double(), torch.randn(4, 32, dtype=torch.float64))
    assert found.updates["x"] == pytest.approx([0, 0], abs=1e-10)


def test_update_ratio_of_hyper_connections_counts_each_rows_weight():
    stack = Stack("hyper:dynamic=false", 32, [lambda h: 0.5 * h] * 2).double()
    with torch.no_grad():
        stack.residual.links[0].B.copy_(torch.tensor([1.0, 3.0]))
    x = torch.randn(4, 32, dtype=torch.float64)
    found = inspect(stack, x)
    assert found.updates["h0"][0] == pytest.approx(0.5 / rms(x))
    assert found.updates["h1"][0] == pytest.approx(1.5 / rms(x))


def test_a_planted_activation_is_found_with_its_feature_and_token():
    x = torch.randn(2, 5, 16).clamp(-2, 2)
    x[1, 3, 7] = -50_000.0
    found = inspect(Stack("pre", 16, [torch.zeros_like] * 2), x)
    for peak in found.peaks["x"]:
        assert (peak.largest, peak.massive, peak.dims[0], peak.tokens[0]) == (50_000.0, 1, 7, (1, 3))
        assert peak.median == x.abs().median().item()
        assert peak.ratio == pytest.approx(50_000 / peak.median)


# Which tokens count ----------------------------------------------------------------------------------


def test_rows_without_labels_do_not_count():
    model, batch = tiny_lm().eval(), ids(4)
    inputs, labels = batch[:, :-1], batch[:, 1:].clone()
    labels[3] = -100
    whole = inspect(model, {"input_ids": inputs, "labels": labels})
    part = inspect(model, {"input_ids": inputs[:3], "labels": labels[:3]})
    assert whole.tokens == part.tokens == 3 * labels.shape[1]
    assert whole.loss == pytest.approx(part.loss, rel=1e-5)
    for name in whole.streams:
        assert whole.rms[name] == pytest.approx(part.rms[name], rel=1e-5)
        assert whole.gradients[name] == pytest.approx(part.gradients[name], rel=1e-3)
        assert whole.lens.alone[name] == part.lens.alone[name]


# Every topology --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_every_topology_can_be_inspected(spec):
    found = inspect(tiny_lm(spec), ids())
    streams, sublayers = found.streams, len(found.sublayers)
    for by_depth in (found.rms, found.gradients, found.peaks, found.lens.alone):
        assert {name: len(values) for name, values in by_depth.items()} == dict.fromkeys(streams, sublayers + 1)
    assert {name: len(values) for name, values in found.updates.items()} == dict.fromkeys(streams, sublayers)
    for name, sizes in found.rms.items():
        there = [size is not None for size in sizes]
        assert sorted(there) == there  # a stream that has come into being stays
        for by_depth in (found.gradients, found.peaks, found.lens.alone):
            assert [value is not None for value in by_depth[name]] == there
        updates = found.updates[name][there.index(True) :]  # the first one of these found no stream there
        assert None not in updates
    numbers = [found.loss, *found.removal.sublayers, *found.removal.blocks, *found.similarity.effective_depth.values()]
    assert None not in numbers
    assert len(found.removal.sublayers) == sublayers == 2 * len(found.removal.blocks)
    for mixture in (*found.reads, found.fusion):
        assert sum(mixture.gain_shares.values()) == pytest.approx(1)
        assert sum(mixture.contributions.values()) == pytest.approx(1)
    assert found.lens.together[-1] == 1.0
    assert found.loss == pytest.approx(found.removal.loss, rel=1e-6)
    assert Inspection.from_json(found.to_json()) == found


@pytest.mark.parametrize("spec", SPECS)
def test_parts_add_up_to_what_is_read_and_to_the_end(spec):
    model = tiny_lm(spec)
    residual = model.residual
    streams, previous = residual.open(torch.randn(2, 5, 16)), None
    for link in residual.links:
        found, names = link.summands(streams, previous), residual.named_streams(streams)
        streams, h = link.read(streams)
        assert len(found.parts) == len(found.gains) == len(names)
        torch.testing.assert_close(found.finish(sum(found.parts)), h)
        torch.testing.assert_close(sum(found.finished().parts), h)
        streams, previous = link.write(streams, torch.randn_like(h)), link
    end = residual.summands_at_end(streams, previous)
    assert len(end.parts) == len(end.gains) == len(residual.named_streams(streams))
    torch.testing.assert_close(end.finish(sum(end.parts)), residual.close(streams))


def test_single_streams_have_one_name_and_all_shares():
    for name in SINGLE:
        found = inspect(tiny_lm(name, blocks=1), ids(1, 5), removal=False)
        assert found.streams == ("x",)
        assert all(read.gain_shares == {"x": 1.0} for read in found.reads)


# What is left behind ---------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was():
    model, batch = tiny_lm("siamese:form=hybrid_pre"), ids()
    model.train()
    model.blocks[0].eval()
    model.head.weight.requires_grad_(False)
    checkpoint_activations(model, "full")
    run_block_again = model.run
    model(batch[:, :-1], labels=batch[:, 1:]).loss.backward()
    before = copy.deepcopy(model.state_dict())
    grads = {name: p.grad for name, p in model.named_parameters()}
    values = {name: None if g is None else g.clone() for name, g in grads.items()}
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    chance = torch.get_rng_state()
    inspect(model, batch)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert parameter.grad is None or torch.equal(parameter.grad, values[name])
    assert wanted == {name: p.requires_grad for name, p in model.named_parameters()}
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert model.run is run_block_again
    assert torch.equal(chance, torch.get_rng_state())


def test_the_model_is_left_as_it_was_also_after_an_error():
    model = tiny_lm().train()
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}

    def fails(model, batch):
        model(batch["input_ids"])
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        inspect(model, ids(), loss=fails)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}


def test_the_same_twice_and_without_gradients_around_it():
    model, batch = tiny_lm(dropout=0.5).train(), ids()
    first = inspect(model, batch)
    with torch.no_grad():
        assert inspect(model, batch) == first
    assert inspect(torch.compile(model, backend="eager"), batch) == first


# Models of one's own, and wrong input ------------------------------------------------------------------


def test_a_model_of_ones_own_brings_loss_and_head():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack, self.head = Stack("siamese", 16, [nn.Linear(16, 16) for _ in range(4)]), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(self.stack(x))

    model, x, y = Classifier(), torch.randn(6, 16), torch.randint(0, 5, (6,))
    plain = inspect(model, x)
    assert (plain.loss, plain.gradients, plain.lens, plain.removal) == (None, None, None, None)
    found = inspect(model, (x, y), loss=lambda m, batch: F.cross_entropy(m(batch[0]), batch[1]), head=model.head)
    assert found.loss == pytest.approx(F.cross_entropy(model(x), y).item())
    assert found.lens.together[-1] == 1.0
    assert found.rms == plain.rms
    assert len(found.removal.blocks) == 2


def test_wrong_input_is_one_sentence():
    model = tiny_lm()
    wrong = {
        "no residual topology": lambda: inspect(nn.Linear(4, 4), torch.randn(2, 4)),
        "2 residual topologies": lambda: inspect(nn.ModuleList([tiny_lm("pre"), tiny_lm("post")]), ids()),
        "id 32 is not allowed": lambda: inspect(model, torch.tensor([[1, 32, 3]])),
        "id -1 is not allowed": lambda: inspect(model, torch.full((2, 4), -1)),
        "dictionary with input_ids and labels": lambda: inspect(model, {"input_ids": ids()}),
        "no label counts": lambda: inspect(model, {"input_ids": ids(), "labels": torch.full_like(ids(), -100)}),
        "ids are": lambda: inspect(model, ids()[0]),
        "more than once": lambda: inspect(Twice(), torch.randn(2, 16)),
        "0 of 2 sublayers": lambda: inspect(Never(), torch.randn(2, 16)),
    }
    for words, call in wrong.items():
        with pytest.raises(InspectionError, match=words):
            call()
    with pytest.raises(InspectionError, match="version"):
        Inspection.from_json(inspect(model, ids()).model_copy(update={"version": 9}).to_json())
    with pytest.raises(InspectionError, match="not allowed"):
        Inspection.from_json("{}")


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.residual = Residual("pre", 16, 1)

    def forward(self, x):
        return self.residual(self.residual(x, [torch.sin] * 2), [torch.sin] * 2)


class Never(Twice):
    def forward(self, x):
        return x
