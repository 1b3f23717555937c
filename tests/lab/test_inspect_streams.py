"""Streams that come into being, collapse of streams, attention logits, and spikes of a run."""

import io
import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from siamesenorm.lab import inspect
from siamesenorm.lab.inspection import find_spikes, spikes_of_run, terminal
from siamesenorm.lab.inspection.collapse import largest_share, mean_cosine
from siamesenorm.lab.inspection.figures import LINES, plots
from siamesenorm.lab.inspection.logits import QUERIES, largest_logit
from siamesenorm.residual import Flow

from .stacks import Stack, ids, tiny_lm

# Gradients of streams that stay as they are ------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["attnres:blocks=0", "attnres:blocks=1", "x0", "dense", "widen:rate=2", "siamese:y=x0"]
)
def test_the_gradient_at_a_depth_counts_the_readers_behind_it(spec):
    torch.manual_seed(0)
    stack, x = Stack(spec, 8, [torch.sin, torch.cos] * 2).double(), torch.randn(3, 8, dtype=torch.float64)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    found = inspect(stack, x, loss=lambda model, batch: model(batch).sin().mean()).gradients
    for depth in range(5):
        flow = stack.residual.start(x)
        for sublayer in stack.sublayers[:depth]:
            flow.through(sublayer)
        streams = stack.residual.map_streams(flow.streams, lambda s: s.detach().requires_grad_())
        named = stack.residual.named_streams(streams)
        rest = Flow(stack.residual, streams=streams, at=depth)
        for sublayer in stack.sublayers[depth:]:
            rest.through(sublayer)
        grads = torch.autograd.grad(rest.close().sin().mean(), list(named.values()), allow_unused=True)
        for name, grad in zip(named, grads, strict=True):
            expected = 0.0 if grad is None else (grad * 3).square().sum(-1).mean().sqrt().item()
            assert found[name][depth] == pytest.approx(expected, rel=1e-9)
        assert [name for name in found if found[name][depth] is not None] == list(named)


def test_many_streams_are_shown_in_part_and_kept_in_full():
    found = inspect(tiny_lm("attnres:blocks=0", blocks=8), ids(1, 6))
    assert found.streams == tuple(f"v{j}" for j in range(17))
    for plot in plots(found):
        json.dumps(plot.figure, allow_nan=False)
        assert len(plot.figure["data"]) <= 2 * LINES + 1
    console = Console(width=80, record=True, file=io.StringIO())
    terminal.show(console, found)
    shown = console.export_text()
    assert shown.count("\n") < 70
    assert "17, of which 6 are shown" in shown
    for part in ("cosine of streams", "embedding's share", "largest attention logit", "writers of the output"):
        assert part in shown


def test_maps_have_readers_as_rows():
    found = inspect(tiny_lm("attnres:blocks=0"), ids(1, 6))
    drawn = {plot.name: plot.figure["data"][0] for plot in plots(found)}
    assert [[cell for cell in row if cell is not None] for row in drawn["writers"]["z"]] == [
        list(row) for row in found.writers.shares
    ]
    assert drawn["weights"]["z"][2] == [*found.reads[2].gains.values(), None, None]


# Collapse ------------------------------------------------------------------------------------------------


def test_equal_streams_have_collapsed_and_orthogonal_ones_have_not():
    x = torch.randn(6, 8)
    assert mean_cosine([x, 2 * x, 3 * x]) == pytest.approx(1)
    assert largest_share([x, 2 * x, 3 * x]) == pytest.approx(9 / 14)
    left, right = torch.zeros(6, 8), torch.zeros(6, 8)
    left[:, :4], right[:, 4:] = x[:, :4], x[:, 4:]
    assert mean_cosine([left, right]) == pytest.approx(0)
    assert mean_cosine([x, -x]) == pytest.approx(-1)
    pairs = [F.cosine_similarity(a.double(), b.double(), dim=-1).mean() for a, b in ((x, left), (x, right))]
    assert mean_cosine([x, left, right]) == pytest.approx(float(sum(pairs)) / 3)


def test_collapse_is_told_by_depth_where_there_are_several_streams():
    found = inspect(Stack("widen:rate=2", 8, [torch.sin, torch.cos]), torch.randn(3, 8)).collapse
    assert found.largest[0] == pytest.approx(0.5)
    assert found.cosine[0] == pytest.approx(1)
    assert found.cosine[1] < 1
    growing = inspect(Stack("attnres", 8, [torch.sin] * 2), torch.randn(3, 8)).collapse
    assert growing.cosine[0] is None
    assert growing.cosine[1] is not None
    assert inspect(Stack("pre", 8, [torch.sin] * 2), torch.randn(3, 8)).collapse is None


# Attention logits ------------------------------------------------------------------------------------------


def test_the_largest_logit_is_that_of_the_heads_as_they_attend():
    model, batch = tiny_lm("pre", kv_heads=2).eval(), ids()
    context = model.context(batch[:, :-1])
    attention = model.blocks[0].attention
    h = model.residual.links[0].norm(model.embedding(batch[:, :-1]))
    q, k, _ = (heads.transpose(1, 2) for heads in attention.project_and_rotate(h, context.cos_sin))
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 2  # heads of width 4
    expected = logits.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf).max().item()
    found = inspect(model, batch, removal=False).attention_logits
    assert found[0] == pytest.approx(expected, rel=1e-5)
    assert [value is None for value in found] == [False, True, False, True]
    assert inspect(Stack("pre", 8, [torch.sin] * 2), torch.randn(3, 8)).attention_logits is None


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "shared", "added"])
def test_hidden_pairs_have_no_logit(mask):
    tokens = QUERIES + 5
    q, k = torch.randn(2, 3, tokens, 4), torch.randn(2, 3, tokens, 4)
    given = {
        "none": None,
        "causal": torch.ones(tokens, tokens).tril().bool(),
        "bool": torch.rand(2, 1, tokens, tokens) > 0.9,
        "shared": torch.rand(2, 1, 1, tokens) > 0.9,
        "added": torch.zeros(tokens, tokens).masked_fill(torch.rand(tokens, tokens) > 0.1, -math.inf),
    }[mask]
    logits = q @ k.transpose(-1, -2) / 2
    if given is not None:
        logits = logits.masked_fill(~given if given.dtype == torch.bool else given == -math.inf, -math.inf)
    causal = {"is_causal": True} if mask == "causal" else {"attn_mask": given}
    assert largest_logit(q, k, k, **causal) == pytest.approx(logits.max().item(), rel=1e-5)


# Spikes -----------------------------------------------------------------------------------------------------


def test_planted_spikes_are_found_on_a_falling_noisy_loss():
    steps = np.arange(10_000)
    losses = 3 * np.exp(-steps / 4000) + 0.02 * np.sin(steps)
    losses[[0, 500, 501, 9_999]] += [0.5, 0.2, 0.2, 0.15]
    losses[700] += 0.07  # below the mark
    found = find_spikes(losses.tolist())
    assert found.steps == (1, 501, 502, 10_000)
    assert (found.count, found.counted, found.per_10k) == (4, 10_000, 4.0)


def test_the_median_is_of_the_201_steps_around():
    losses = np.random.default_rng(0).random(450)
    medians = [np.median(losses[max(0, at - 100) : at + 101]) for at in range(450)]
    assert find_spikes(losses.tolist()).steps == tuple(1 + np.flatnonzero(losses > np.array(medians) + 0.1))


def test_a_loss_that_is_no_number_is_a_spike_and_no_losses_are_none():
    assert find_spikes([1.0, None, math.nan, math.inf, 1.0]).steps == (2, 3, 4)
    assert find_spikes([]).per_10k is None
    assert find_spikes([None] * 3).count == 3


def test_spikes_of_a_run_are_read_from_its_steps(tmp_path):
    assert spikes_of_run(tmp_path) is None
    lines = [{"step": step, "loss": 1.0 + (step == 7)} for step in range(5, 300)]
    lines.insert(9, {"step": 12, "evaluation": {"loss": 9.0}})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken")
    found = spikes_of_run(tmp_path)
    assert (found.steps, found.counted) == ((7,), 295)
