"""What topologies come down to: siamese to its two streams, its Jacobian, and how mixing matrices are oriented."""

import itertools

import pytest
import torch
from torch.func import jacrev
from torch.testing import assert_close

from siamesenorm.residual import NormSpec, Residual

from .stacks import PAIR, D, L, make, make_sublayers, randomise

BARE = {"input_norm": False, "final_norm": False}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def zero(topology, *suffixes):
    """Zero the parameters whose name ends so, and say how many there were."""
    found = [p for name, p in topology.named_parameters() if name.endswith(suffixes)]
    with torch.no_grad():
        for parameter in found:
            parameter.zero_()
    return len(found)


def give(single, pair, stream):
    """The parameters of one stream of a pair, as those of the single-stream topology."""
    own = dict(pair.named_parameters())
    with torch.no_grad():
        for name, parameter in single.named_parameters():
            where = name.replace("norm.", f"{stream}.norm.") if name.startswith("links") else f"{stream}.{name}"
            parameter.copy_(own[where])


def random_case(text, fused=True, blocks=L, **options):
    topology = make(text, blocks, norm="rms", fused=fused, **options)
    randomise(topology)
    return topology, make_sublayers([PAIR] * blocks), torch.randn(2, 3, D, dtype=torch.float64)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("depth_scaling", ["none", "sqrt(2(l+1))", "sqrt(l+1)"])
def test_zero_x_gains_leave_pre_norm_on_y(depth_scaling, fused):
    """post_pre without N_in and N_out; whatever X receives, its norm takes it away."""
    pair, sublayers, x = random_case("siamese", fused, depth_scaling=depth_scaling, **BARE)
    pre = make("pre")
    give(pre, pair, "y")
    assert (pair(x, sublayers) - pre(x, sublayers)).abs().max() > 1e-3
    assert zero(pair, "x.norm.weight", "x.final_norm.weight") == 2 * L + 1
    assert_close(pair(x, sublayers), pre(x, sublayers), **CLOSE)


def test_zero_x_gains_in_the_default_form_norm_twice():
    """N_in after N_Y and N_out after N_Yf change nothing while gains are one and eps vanishes."""
    norm = NormSpec("rms", eps=1e-30)
    pair, pre = make("siamese", norm=norm), make("pre", norm=norm)
    zero(pair, "x.norm.weight", "x.final_norm.weight")
    sublayers, x = make_sublayers([PAIR] * L), torch.randn(2, 3, D, dtype=torch.float64)
    assert_close(pair(x, sublayers), pre(x, sublayers), **CLOSE)


def test_zero_x_gains_leave_pre_norm_on_y_in_the_plain_form_after_its_first_sublayer():
    """Algorithm 1 norms X after the addition, so the first sublayer alone still sees the raw embedding."""
    pair, sublayers, x = random_case("siamese:form=plain")
    zero(pair, "x.norm.weight")
    y = x + sublayers[0](x + pair.links[0].y.norm(x))
    for k in range(1, 2 * L):
        y = y + sublayers[k](pair.links[k].y.norm(y))
    assert_close(pair(x, sublayers), pair.y.final_norm(y), **CLOSE)


def test_zero_x_and_g_gains_leave_pre_norm_on_y_in_the_hybrid_form():
    pair, sublayers, x = random_case("siamese:form=hybrid_pre", **BARE)
    pre = make("pre")
    give(pre, pair, "y")
    assert zero(pair, "x.norm.weight", "x.final_norm.weight", "gain") == 2 * L + 1
    assert_close(pair(x, sublayers), pre(x, sublayers), **CLOSE)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("form", "options", "single"),
    [
        ("post_pre", {**BARE, "depth_scaling": "none"}, "post"),
        ("plain", {}, "post:norm_at=end"),
        ("hybrid_pre", {**BARE, "depth_scaling": "none"}, "hybrid"),
    ],
)
def test_zero_y_gains_leave_the_x_stream(form, options, single, fused):
    """Post-Norm in both its writings, HybridNorm with g = 1; without N_in, N_out and depth scaling."""
    pair, sublayers, x = random_case("siamese", fused, form=form, **options)
    with torch.no_grad():
        for name, parameter in pair.named_parameters():
            if name.endswith("gain"):
                parameter.fill_(1)
    alone = make(single)
    give(alone, pair, "x")
    assert (pair(x, sublayers) - alone(x, sublayers)).abs().max() > 1e-3
    assert zero(pair, "y.norm.weight", "y.final_norm.weight") == 2 * L + 1
    assert_close(pair(x, sublayers), alone(x, sublayers), **CLOSE)


def test_zero_y_gains_with_depth_scaling_leave_post_norm_with_scaled_branches():
    pair, sublayers, x = random_case("siamese", **BARE)
    post = make("post")
    give(post, pair, "x")
    zero(pair, "y.norm.weight", "y.final_norm.weight")
    branches = [lambda h, k=k, F=F: F(h) / (2 * (k // 2 + 1)) ** 0.5 for k, F in enumerate(sublayers)]
    assert_close(pair(x, sublayers), post(x, branches), **CLOSE)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_jacobian_of_a_plain_step(norm):
    """d(X', Y')/d(X, Y) = [[J_NX (I + J_F), J_NX J_F J_NY], [J_F, I + J_F J_NY]]."""
    topology = make("siamese:form=plain", 1, norm=norm)
    randomise(topology)
    (_, F), link = make_sublayers([PAIR]), topology.links[0]
    X, Y = torch.randn(2, D, dtype=torch.float64)

    def step(X, Y):
        streams, h = link.read((X, Y))
        return link.write(streams, F(h))

    h = X + link.y.norm(Y)
    J_F, J_NY, J_NX = jacrev(F)(h), jacrev(link.y.norm)(Y), jacrev(link.x.norm)(X + F(h))
    eye = torch.eye(D, dtype=torch.float64)
    expected = ((J_NX @ (eye + J_F), J_NX @ J_F @ J_NY), (J_F, eye + J_F @ J_NY))
    for mine, theirs in zip(jacrev(step, argnums=(0, 1))(X, Y), expected, strict=True):
        assert_close(mine, theirs, **CLOSE)


def shift(n):
    """Entry (i, i+1) is one: a permutation that is not symmetric."""
    return torch.roll(torch.eye(n, dtype=torch.float64), 1, dims=1)


def read_and_write_nothing(topology, H):
    streams, h = topology.links[0].read(H)
    return topology.links[0].write(streams, torch.zeros_like(h))


@pytest.mark.parametrize("dynamic", [True, False])
def test_hyper_connections_apply_the_transpose(dynamic):
    """H = A_r^T H: with A_r[i, i+1] = 1 row j comes from row j - 1."""
    topology = make("hyper", 1, rate=4, dynamic=dynamic)
    topology.links[0].A_r.data.copy_(shift(4))
    H = torch.randn(3, 4, D, dtype=torch.float64)
    assert_close(read_and_write_nothing(topology, H), torch.roll(H, 1, dims=-2), **CLOSE)


def test_manifold_connections_apply_the_transpose():
    """R = comb^T R: with comb[i, i+1] = 1 row j comes from row j - 1."""
    topology = make("mhc", 1, rate=4, eps=0.0)
    topology.links[0].b.data[8:] = 200 * (shift(4) - 1).flatten()
    R = torch.randn(3, 4, D, dtype=torch.float64)
    assert_close(read_and_write_nothing(topology, R), torch.roll(R, 1, dims=-2), **CLOSE)


def test_permutations_are_applied_as_they_are():
    """R = P R: with all weight on the order (1, 2, 3, 0) row j comes from row j + 1."""
    topology = make("mhc_lite", 1, rate=4)
    orders = list(itertools.permutations(range(4)))
    topology.links[0].b.data[8:] = torch.tensor([200.0 * (order == (1, 2, 3, 0)) for order in orders])
    R = torch.randn(3, 4, D, dtype=torch.float64)
    assert_close(read_and_write_nothing(topology, R), torch.roll(R, -1, dims=-2), **CLOSE)


@pytest.mark.parametrize("name", ["mhc", "mhc_lite"])
@pytest.mark.parametrize("rate", [2, 3, 4, 5])
def test_manifold_mixing_is_doubly_stochastic(name, rate):
    """Rows exactly, columns as far as Sinkhorn's rounds go, for any parameters, and different for every token."""
    topology = make(name, 1, rate=rate, **({"eps": 0.0} if name == "mhc" else {}))
    randomise(topology)
    link, R = topology.links[0], torch.randn(5, rate, D, dtype=torch.float64)
    link.b.data.normal_()  # far from the identity
    H_pre, H_post, H_res = link.connections(R)
    one = torch.ones(5, rate, dtype=torch.float64)
    assert H_res.shape == (5, rate, rate)
    assert_close(H_res.sum(-1), one, rtol=0, atol=1e-13)
    assert_close(H_res.sum(-2), one, rtol=0, atol=0.05)
    link.rounds = 1000
    assert_close(link.connections(R)[2].sum(-2), one, rtol=0, atol=1e-4)
    assert (H_res > 0).all()
    assert (H_res - H_res.transpose(-1, -2)).abs().max() > 1e-3 or rate == 2  # 2x2 ones are symmetric
    assert (H_res[0] - H_res[1]).abs().max() > 1e-3
    assert ((H_pre > 0) & (H_pre < 1)).all()
    assert ((H_post > 0) & (H_post < 2)).all()


def test_the_gain_of_what_residual_dual_reads_is_that_of_its_input_norm():
    plain, normed = (Residual(text, 8, 1) for text in ("residual_dual", "residual_dual:input_norm=true"))
    for topology in (plain, normed):
        first, second = topology.links
        torch.nn.init.constant_(first.norm.weight, 3.0)
        if topology is normed:
            torch.nn.init.constant_(second.input_norm.weight, 0.5)
    assert plain.links[1].read_gain(plain.links[0]) == 3.0
    assert normed.links[1].read_gain(normed.links[0]) == 0.5


def test_residual_dual_does_not_swap_its_streams():
    """x is the normalised stream that sublayers read; d is the bare sum and meets a norm only at the end."""
    topology, sublayers, x = random_case("residual_dual", blocks=1)
    seen = []
    flow = topology.start(x)
    for sublayer in sublayers:
        flow.through(lambda h, F=sublayer: (seen.append(h), F(h))[1])
    streams = topology.named_streams(flow.streams)
    first = topology.links[0].norm(x + sublayers[0](x))
    assert_close(seen[0], x)
    assert_close(seen[1], first, **CLOSE)
    assert_close(streams["d"], x + sublayers[0](x) + sublayers[1](first), **CLOSE)
    assert_close(flow.close(), streams["x"] + topology.final_norm(streams["d"]), **CLOSE)


def test_span_takes_its_first_skip_from_the_raw_embedding():
    """Block 0 attends to N(x); both skips of the block are raw x, and later blocks read without a norm."""
    topology, sublayers, x = random_case("span")
    seen = []
    topology(x, [lambda h, F=F: (seen.append(h), F(h))[1] for F in sublayers])
    links = topology.links
    u = links[0].norm(x + sublayers[0](links[0].read_norm(x)))
    assert_close(seen[0], links[0].read_norm(x))
    assert_close(seen[1], u, **CLOSE)
    assert_close(seen[2], links[1].norm(x + sublayers[1](u)), **CLOSE)


def with_parameters_of(topology, other):
    """The parameters of another topology that have the same names."""
    own = dict(topology.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            own[name].copy_(parameter)
    return topology


def test_beam_is_the_sandwich_with_its_stream_at_unit_scale():
    norm = NormSpec("rms", eps=0.0)
    sandwich, sublayers, x = random_case("sandwich", blocks=5)
    sandwich = with_parameters_of(make("sandwich", 5, norm=norm), sandwich)
    beam = with_parameters_of(make("beam", 5, norm=norm), sandwich)
    assert_close(beam(x, sublayers), sandwich(x, sublayers), **CLOSE)
    flow = make("beam", 20, norm=norm).start(x)
    for _ in range(40):
        flow.through(torch.randn_like)
    assert 0.5 < flow.streams.square().mean().sqrt() < 2


def test_embedding_back_without_its_scalars_is_pre_norm():
    """r = 1 and z = b = 0."""
    pre, sublayers, x = random_case("pre", blocks=3)
    back = with_parameters_of(make("x0", 3), pre)
    with torch.no_grad():
        for name, parameter in back.named_parameters():
            if name.endswith((".r", ".z")) or name == "b":
                parameter.fill_(float(name.endswith(".r")))
    assert_close(back(x, sublayers), pre(x, sublayers), **CLOSE)


def test_gated_residual_with_one_row_and_open_gates_is_pre_norm():
    """G = 1 and s = 1: z is the norm of the one row. Two opposite directions leave no token's gate closed."""
    pre, sublayers, x = random_case("pre", blocks=3)
    gated = make("gr:rate=1,rank=2", 3)
    direction = torch.randn(D, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in gated.named_parameters():
            if name.endswith("W_w"):
                parameter.zero_()
            elif name.endswith("W_d"):
                parameter.copy_(1e4 * torch.stack([direction, -direction]))
            elif name.endswith("W_u"):
                parameter.fill_(1e4)
        for link, other in zip(gated.links, pre.links, strict=True):
            link.weight.copy_(other.norm.weight.unsqueeze(0))
        gated.last_read.weight.copy_(pre.final_norm.weight.unsqueeze(0))
    assert_close(gated(x, sublayers), pre(x, sublayers), **CLOSE)


def test_full_attention_residual_mixes_outputs_not_states():
    """A query that sees one source alone gives the sublayer that source: an output, without what came before it."""
    topology, sublayers, x = random_case("attnres:blocks=0", blocks=2)
    flow = topology.start(x)
    outputs = [flow.through(sublayer) for sublayer in sublayers]
    assert all(torch.equal(v, o) for (v, _), o in zip(flow.streams, [x, *outputs], strict=True))
    (v, _) = flow.streams[2]
    with torch.no_grad():
        topology.mix.query.copy_(1e6 * v[0, 0])
        topology.mix.key_gain.fill_(1)
    assert_close(flow.close()[0, 0], topology.final_norm(outputs[1])[0, 0], **CLOSE)
