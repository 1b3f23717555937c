"""Who wrote what a reader sees: planted paths are found, shares are those of components sent along by hand."""

import pytest
import torch

from siamesenorm.lab import inspect
from siamesenorm.residual import Gated, NormSpec, Residual

from .stacks import SPECS, Stack, ids, set_gains, tiny_lm

DIM = 16


def unit(at, size=1.0):
    """The same vector for every token."""
    return size * torch.eye(DIM, dtype=torch.float64)[at].expand(5, DIM)


def writes(at, size=1.0):
    """A sublayer that puts out one vector, whatever it reads."""
    return lambda h: unit(at, size)


def shares(stack, x):
    return [pytest.approx(list(row), abs=1e-9) for row in inspect(stack, x).writers.shares]


def random_stack(topology, sublayers=6):
    """Parameters away from their start, sublayers that are no linear functions."""
    torch.manual_seed(0)
    stack = Stack(topology, DIM, [torch.sin, torch.cos] * (sublayers // 2)).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack, torch.randn(7, DIM, dtype=torch.float64)


def outputs_of(stack, x):
    """What the sublayers put out, and what they and the end see."""
    flow, outputs, reads = stack.residual.start(x), [], []
    for sublayer in stack.sublayers:
        reads.append(flow.read())
        outputs.append(sublayer(reads[-1]))
        flow.write(outputs[-1])
    return outputs, [*reads, flow.close()]


def of_components(components, h):
    """The definition."""
    return [float((c * h).detach().sum() / h.detach().square().sum()) for c in components]


# Every topology --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_shares_sum_to_one_and_none_is_of_a_writer_to_come(spec):
    model = tiny_lm(spec).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("b_r", "b_o")):  # biases, which are nobody's
                parameter.zero_()
    found = inspect(model, ids(), removal=False).writers
    assert [len(row) for row in found.shares] == [1, 2, 3, 4, 5]
    assert [sum(row) for row in found.shares] == pytest.approx([1.0] * 5, abs=1e-9)
    assert found.constants == pytest.approx([0.0] * 5, abs=1e-9)
    assert found.shares[0] == pytest.approx([1.0])


# Planted paths ---------------------------------------------------------------------------------------


def test_pre_norm_of_orthogonal_outputs_is_pythagoras():
    stack = Stack("pre", DIM, [writes(1, 4.0), writes(2, 12.0)]).double()
    expected = [[1.0], [9 / 25, 16 / 25], [9 / 169, 16 / 169, 144 / 169]]
    assert expected == shares(stack, unit(0, 3.0))


def test_what_cancels_has_a_negative_share():
    stack = Stack("pre", DIM, [writes(0, -1.0), writes(1, 0.0)]).double()
    assert shares(stack, unit(0, 3.0))[-1] == [1.5, -0.5, 0.0]


def test_attention_residuals_that_look_at_one_source_read_one_writer():
    stack = Stack("attnres:blocks=0", DIM, [writes(at) for at in range(1, 7)]).double()
    looks_at = [0, 1, 0, 2, 4, 1, 5]
    with torch.no_grad():
        _, *links = stack.residual.links  # the first has one source to look at
        for mix, at in zip([*(link.mix for link in links), stack.residual.mix], looks_at[1:], strict=True):
            mix.query.copy_(100 * unit(at)[0])
    found = inspect(stack, unit(0))
    for reader, (row, at) in enumerate(zip(found.writers.shares, looks_at, strict=True)):
        assert list(row) == pytest.approx([float(writer == at) for writer in range(reader + 1)])
        mixture = [*found.reads, found.fusion][reader]
        assert mixture.gains == pytest.approx({f"v{j}": float(j == at) for j in range(reader + 1)})


def test_a_row_that_is_read_alone_has_the_sublayers_that_write_to_it():
    stack = Stack("widen:rate=3", DIM, [writes(at) for at in range(1, 7)]).double()
    with torch.no_grad():
        stack.residual.links[5].a.copy_(torch.tensor([0.0, 1.0, 0.0]))
    assert shares(stack, unit(0))[5] == [1 / 3, 0, 1 / 3, 0, 0, 1 / 3]  # row 1: the embedding, sublayers 1 and 4


def test_rows_that_are_mixed_away_are_not_read():
    stack = Stack("hyper:rate=2,dynamic=false", DIM, [writes(at) for at in range(1, 5)]).double()
    with torch.no_grad():
        stack.residual.links[1].A_r.copy_(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))  # row 0 begins anew
        stack.residual.links[1].B.copy_(torch.tensor([1.0, 0.0]))
    assert shares(stack, unit(0))[2] == [0, 0, 1]  # sublayer 2 reads row 0


def test_siamese_without_x_reads_as_pre_norm_does():
    stack = Stack("siamese", DIM, [writes(1, 4.0), writes(2, 12.0)]).double()
    for link in stack.residual.links:
        set_gains(link.x.norm, 0.0)
    set_gains(stack.residual.x.final_norm, 0.0)
    assert shares(stack, unit(0, 3.0))[-1] == [9 / 169, 16 / 169, 144 / 169]


# Components sent along by hand -------------------------------------------------------------------------


def rms_scale(x):
    return (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()


def test_shares_of_attention_residuals_by_hand():
    stack, x = random_stack("attnres:blocks=0")
    outputs, reads = outputs_of(stack, x)
    values = [x, *outputs]
    first, *links = stack.residual.links
    assert not hasattr(first, "mix")  # it has one source
    mixes = [None, *(link.mix for link in links), stack.residual.mix]
    norms = [*(link.norm for link in stack.residual.links), stack.residual.final_norm]
    found = shares(stack, x)
    for reader, (mix, norm, h) in enumerate(zip(mixes, norms, reads, strict=True)):
        seen = values[: reader + 1]
        logits = torch.stack([(v * rms_scale(v)) @ (mix.query * mix.key_gain) if mix else v[..., 0] for v in seen])
        parts = [weight.unsqueeze(-1) * v for weight, v in zip(logits.softmax(0), seen, strict=True)]
        expected = of_components([part * rms_scale(sum(parts)) * norm.weight for part in parts], h)
        assert found[reader] == expected


def test_shares_of_the_gated_residual_by_hand():
    stack, x = random_stack("gr:rate=2")
    outputs, reads = outputs_of(stack, x)
    components = [torch.stack([x, x], -2)]
    found = shares(stack, x)
    for reader, h in enumerate(reads):
        link = stack.residual.links[reader] if reader < len(outputs) else None
        gated = stack.residual.last_read if link is None else link
        rows = sum(components)
        z = rows * rms_scale(rows) * gated.weight
        low = torch.nn.functional.silu(z.flatten(-2) @ gated.W_d.T / 2)
        gates = torch.sigmoid(low @ gated.W_u.T).unflatten(-1, (2, DIM))
        expected = of_components([(gates * c * rms_scale(rows) * gated.weight).mean(-2) for c in components], h)
        assert found[reader] == expected
        if link is not None:
            weights = 2 * torch.sigmoid(z.flatten(-2) @ link.W_w.T / 2)
            components.append(weights.unsqueeze(-1) * outputs[reader].unsqueeze(-2))


def test_shares_of_siamese_streams_by_hand():
    stack, x = random_stack("siamese")
    outputs, reads = outputs_of(stack, x)
    X, Y = [x], [x]
    found = shares(stack, x)
    for reader, h in enumerate(reads[:-1]):
        link = stack.residual.links[reader]
        X = [c * rms_scale(sum(X)) * link.x.norm.weight for c in X]
        seen = [a + b * rms_scale(sum(Y)) * link.y.norm.weight for a, b in zip(X, Y, strict=True)]
        expected = of_components([c * rms_scale(sum(seen)) * link.input_norm.weight for c in seen], h)
        assert found[reader] == expected
        X.append(outputs[reader] / (2 * (reader // 2 + 1)) ** 0.5)
        Y.append(outputs[reader])


# What is nobody's, and gates -----------------------------------------------------------------------------


def test_a_bias_is_a_constant():
    stack = Stack("pre", DIM, [torch.sin, torch.cos]).double()
    stack.residual = Residual("pre", DIM, 1, norm=NormSpec("layer")).double()
    with torch.no_grad():
        for norm in (*(link.norm for link in stack.residual.links), stack.residual.final_norm):
            norm.bias.normal_()
    x = torch.randn(7, DIM, dtype=torch.float64)
    found = inspect(stack, x).writers
    h = stack.residual.links[0].norm(x)
    assert found.constants[0] == pytest.approx(of_components([stack.residual.links[0].norm.bias], h)[0])
    assert [sum(row) + rest for row, rest in zip(found.shares, found.constants, strict=True)] == pytest.approx(
        [1.0] * 3
    )


def test_an_update_counts_as_far_as_its_gate_lets_it_through():
    half = torch.full((5, 1), 0.5, dtype=torch.float64)
    stack = Stack("pre", DIM, [lambda h: Gated(unit(1, 8.0), half), writes(2, 0.0)]).double()
    assert shares(stack, unit(0, 3.0))[-1] == [9 / 25, 16 / 25, 0]


def test_tokens_without_a_label_do_not_count():
    model, batch = tiny_lm("gr").eval(), ids(4)
    inputs, labels = batch[:, :-1], batch[:, 1:].clone()
    labels[0] = -100
    whole = inspect(model, {"input_ids": inputs, "labels": labels}, removal=False).writers
    part = inspect(model, {"input_ids": inputs[1:], "labels": labels[1:]}, removal=False).writers
    assert whole.tokens == part.tokens
    for row, other in zip(whole.shares, part.shares, strict=True):
        assert row == pytest.approx(other, abs=1e-5)
