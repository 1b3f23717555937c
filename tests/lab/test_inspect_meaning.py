"""What an inspection says about streams and sublayers: shares, fusion, logit lens, removal, similarity."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from siamesenorm.lab import inspect
from siamesenorm.lab.inspection.similarity import centred_gram, cka, vendi_score

from .stacks import SINGLE, Stack, ids, set_gains, tiny_lm

# Gain shares -----------------------------------------------------------------------------------------


def test_without_gains_on_y_the_share_of_x_is_1():
    model = tiny_lm("siamese")
    for link in model.residual.links:
        set_gains(link.y.norm, 0.0)
    set_gains(model.residual.y.final_norm, 0.0)
    found = inspect(model, ids())
    for mixture in (*found.reads, found.fusion):
        assert mixture.gain_shares == {"x": 1.0, "y": 0.0}
        assert mixture.contributions == {"x": 1.0, "y": 0.0}


def test_gains_of_3_and_1_are_shares_of_three_quarters_and_one():
    """Both streams come out of a norm, so contributions are the gains' too."""
    stack = Stack("siamese", 32, [torch.sin] * 4).double()
    for link in stack.residual.links:
        set_gains(link.x.norm, 3.0)
        set_gains(link.y.norm, -1.0)
    set_gains(stack.residual.x.final_norm, 1.05)
    set_gains(stack.residual.y.final_norm, 0.42)
    found = inspect(stack, torch.randn(3, 32, dtype=torch.float64))
    for read in found.reads:
        assert read.gains == pytest.approx({"x": 3.0, "y": 1.0})
        assert read.gain_shares == pytest.approx({"x": 0.75, "y": 0.25})
        assert read.contributions == pytest.approx({"x": 0.75, "y": 0.25})
    assert found.fusion.gains == pytest.approx({"x": 1.05, "y": 0.42})
    assert found.fusion.contributions == pytest.approx({"x": 1.05 / 1.47, "y": 0.42 / 1.47})


def test_norms_at_the_end_of_a_sublayer_count_at_the_next_read():
    """plain: the first reading is the raw embedding, later ones come out of the last N_X."""
    stack = Stack("siamese:form=plain", 32, [torch.sin] * 4)
    for index, link in enumerate(stack.residual.links):
        set_gains(link.x.norm, 2.0 + index)
    found = inspect(stack, torch.randn(3, 32))
    assert [read.gains["x"] for read in found.reads] == [1.0, 2.0, 3.0, 4.0]
    assert found.fusion.gains == {"x": 5.0, "y": 1.0}


def test_attention_of_the_hybrid_form_reads_x_through_g():
    stack = Stack("siamese:form=hybrid_pre", 32, [torch.sin] * 2)
    with torch.no_grad():
        stack.residual.links[0].gain.fill_(-4.0)
        set_gains(stack.residual.links[1].x.norm, 3.0)
    found = inspect(stack, torch.randn(3, 32))
    assert [read.gains["x"] for read in found.reads] == [4.0, 3.0]


def test_hyper_connections_read_their_rows_in_turn_at_start():
    found = inspect(Stack("hyper:rate=3", 16, [torch.sin] * 4), torch.randn(3, 16))
    for index, read in enumerate(found.reads):
        assert read.gain_shares == {f"h{row}": float(row == index % 3) for row in range(3)}
    assert found.fusion.gains == {"h0": 1.0, "h1": 1.0, "h2": 1.0}


def test_mhc_reads_its_favoured_row_most_and_ends_with_all():
    found = inspect(Stack("mhc:eps=0", 16, [torch.sin] * 2), torch.randn(3, 16))
    assert len(found.reads) == 2
    for row, mixture in enumerate((*found.reads, found.fusion)):
        shares = [0.75 if other == row else 1 / 12 for other in range(4)] if row < 2 else [0.25] * 4
        assert list(mixture.gain_shares.values()) == pytest.approx(shares)
        assert list(mixture.contributions.values()) == pytest.approx(shares)


def test_residual_dual_reads_x_alone_and_ends_with_both():
    found = inspect(Stack("residual_dual", 16, [torch.sin] * 4).double(), torch.randn(3, 16, dtype=torch.float64))
    assert all(read.contributions == {"x": 1.0, "d": 0.0} for read in found.reads)
    assert found.fusion.contributions == pytest.approx({"x": 0.5, "d": 0.5})


# Logit lens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_stream_predicts_at_the_last_depth_what_the_model_predicts(name):
    found = inspect(tiny_lm(name), ids(), removal=False)
    assert found.lens.alone["x"][-1] == 1.0


def test_lens_of_each_siamese_stream_by_its_definition():
    model, batch = tiny_lm("siamese").eval(), ids()
    inputs = batch[:, :-1]
    final = model(inputs).logits.argmax(-1)
    residual, context = model.residual, model.context(inputs)
    flow = residual.start(model.embedding(inputs))
    flow.through(model.blocks[0].attention, context)
    X, Y = flow.streams
    found = inspect(model, batch, removal=False)
    for name, part in (("x", residual.x.final_norm(X)), ("y", residual.y.final_norm(Y))):
        predicted = F.linear(residual.final_norm(part), model.head_weight).argmax(-1)
        assert found.lens.alone[name][1] == pytest.approx((predicted == final).double().mean().item())


def test_the_stream_that_is_left_out_of_the_end_predicts_nothing():
    model, batch = tiny_lm("siamese"), ids(8, 33)
    set_gains(model.residual.y.final_norm, 0.0)
    found = inspect(model, batch, removal=False)
    assert found.lens.alone["x"][-1] == 1.0
    final = model.eval()(batch[:, :-1]).logits.argmax(-1)
    assert found.lens.alone["y"][-1] == pytest.approx((final == 0).double().mean().item())  # all logits 0


# Removal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["pre", "siamese", "hyper", "post"])
def test_removing_a_sublayer_whose_weights_are_zero_changes_nothing(topology):
    model = tiny_lm(topology)
    with torch.no_grad():
        model.blocks[1].ffn.down.weight.zero_()
        model.blocks[0].attention.out.weight.zero_()
    found = inspect(model, ids()).removal
    assert [rise == 0.0 for rise in found.sublayers] == [True, False, False, True]
    assert found.blocks == (found.sublayers[1], found.sublayers[2])


def test_loss_rise_is_that_of_a_model_without_the_sublayer():
    model, batch = tiny_lm("siamese").eval(), ids()
    loss = lambda m: m(batch[:, :-1], labels=batch[:, 1:]).loss.item()  # noqa: E731
    found = inspect(model, batch).removal
    without = copy.deepcopy(model)
    with torch.no_grad():
        without.blocks[0].ffn.down.weight.zero_()
    assert found.sublayers[1] == pytest.approx(loss(without) - loss(model), abs=1e-6)
    with torch.no_grad():
        without.blocks[0].attention.out.weight.zero_()
    assert found.blocks[0] == pytest.approx(loss(without) - loss(model), abs=1e-6)


def test_progress_is_told_of_every_pass():
    seen = []
    inspect(tiny_lm(), ids(), progress=lambda done, of: seen.append((done, of)))
    assert seen == [(done, 1 + 4 + 2) for done in range(1, 8)]


# Similarity ------------------------------------------------------------------------------------------


def test_blocks_that_do_nothing_have_an_effective_depth_of_1():
    found = inspect(Stack("pre", 16, [torch.zeros_like] * 6), torch.randn(20, 16)).similarity
    assert found.depths == (0, 2, 4, 6)
    assert all(value == pytest.approx(1) for row in found.cka["x"] for value in row)
    assert found.effective_depth["x"] == pytest.approx(1)


def test_effective_depth_counts_what_differs():
    assert vendi_score(torch.eye(7, dtype=torch.float64)) == pytest.approx(7)
    assert vendi_score(torch.ones(7, 7, dtype=torch.float64)) == pytest.approx(1)
    halves = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).double()
    assert vendi_score(halves) == pytest.approx(2)
    assert math.isnan(vendi_score(torch.full((2, 2), torch.nan, dtype=torch.float64)))


def test_cka_does_not_see_rotation_and_scale_but_sees_a_shuffle():
    x = torch.randn(40, 8, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
    turned, shuffled = 3 * x @ rotation, x[torch.randperm(40)]
    matrix = cka([centred_gram(part) for part in (x, turned, shuffled)])
    assert matrix[0, 1].item() == pytest.approx(1, abs=1e-6)
    assert matrix[0, 2].item() < 0.5
    torch.testing.assert_close(matrix, matrix.T)


def test_cka_is_the_definition():
    x, y = torch.randn(30, 6, dtype=torch.float64), torch.randn(30, 9, dtype=torch.float64)
    a, b = (F.normalize(part, dim=-1) for part in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    expected = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert cka([centred_gram(x), centred_gram(y)])[0, 1].item() == pytest.approx(expected.item(), abs=1e-6)
