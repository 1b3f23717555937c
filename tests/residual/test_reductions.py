"""What topologies come down to: siamese to its two streams, its Jacobian, and how mixing matrices are oriented."""

import pytest
import torch
from torch.func import jacrev
from torch.testing import assert_close

from siamesenorm.residual import NormSpec

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


def test_manifold_connections_apply_the_matrix_itself():
    """x = H_res x: with H_res[i, i+1] = 1 row i comes from row i + 1."""
    topology = make("mhc", 1, rate=4)
    topology.links[0].b_res.data.copy_(200 * (shift(4) - 1))
    H = torch.randn(3, 4, D, dtype=torch.float64)
    assert_close(read_and_write_nothing(topology, H), torch.roll(H, -1, dims=-2), **CLOSE)


@pytest.mark.parametrize("rate", [2, 3, 4, 8])
def test_manifold_mixing_is_doubly_stochastic(rate):
    """Rows exactly, columns as far as the rounds go, for any parameters, and different for every token."""
    topology = make("mhc", 1, rate=rate)
    randomise(topology)
    link, x = topology.links[0], torch.randn(5, rate, D, dtype=torch.float64)
    H_pre, H_post, H_res = link.connections(x)
    one = torch.ones(5, rate, dtype=torch.float64)
    assert H_res.shape == (5, rate, rate)
    assert_close(H_res.sum(-1), one, rtol=0, atol=1e-13)
    assert_close(H_res.sum(-2), one, rtol=0, atol=0.05)
    link.sinkhorn_steps = 1000
    assert_close(link.connections(x)[2].sum(-2), one, rtol=0, atol=1e-4)
    assert (H_res > 0).all()
    assert (H_res - H_res.transpose(-1, -2)).abs().max() > 1e-3 or rate == 2  # 2x2 ones are symmetric
    assert (H_res[0] - H_res[1]).abs().max() > 1e-3
    assert ((H_pre > 0) & (H_pre < 1)).all()
    assert ((H_post > 0) & (H_post < 2)).all()


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
