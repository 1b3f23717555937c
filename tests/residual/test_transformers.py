"""The designs of 2026 agree with the classes that run them in transformers: outputs and all gradients, in float64.

Each oracle is a loop over sublayers with the other library's module for what joins them to the stream(s).
"""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from siamesenorm.residual import NormSpec

from .stacks import PAIR, make, make_sublayers, randomise

# What is in the newest transformers alone is compared there.
their_beam = pytest.importorskip("transformers.models.beam.modeling_beam")
deepseek_v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
glm5_next = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
hy_v4 = pytest.importorskip("transformers.models.hy_v4.modeling_hy_v4")
muse_spark = pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")
qwen4_exp = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
their_zaya = pytest.importorskip("transformers.models.zaya.modeling_zaya")
D, L, N, EPS = 16, 3, 4, 1e-6
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
CONFIG = types.SimpleNamespace(
    hidden_size=D,
    rms_norm_eps=EPS,
    hc_mult=N,
    hc_count=N,
    hc_eps=1e-5,
    hc_sinkhorn_iters=20,
    hc_magnitude=2,
    hc_lowrank=D // 8,
    residual_gate_temperature=0.3,
)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """The other library computes gates in float32, also of float64: here in what it is given."""
    monkeypatch.setattr(torch.Tensor, "float", lambda self: self)


def copied(module, **parameters):
    """The other library's module in float64, holding our parameters themselves, so that gradients reach them."""
    module = module.double()
    for name, value in parameters.items():
        owner, _, last = name.rpartition("__")
        holder = module.get_submodule(owner) if owner else module
        del holder._parameters[last]
        setattr(holder, last, value)
    return module


def rows(x):
    return x.unsqueeze(2).expand(-1, -1, N, -1).contiguous()


def mhc(connection, head):
    def oracle(topology, x, sublayers):
        R = rows(x)
        for link, F in zip(topology.links, sublayers, strict=True):
            post, comb, h = copied(connection(CONFIG), fn=link.W, base=link.b, scale=link.a)(R)
            R = post.unsqueeze(-1) * F(link.norm(h)).unsqueeze(-2) + comb.transpose(-1, -2) @ R
        return topology.final_norm(head(topology)(R))

    return oracle


def learned_head(head):
    return lambda topology: copied(
        head(CONFIG), hc_fn=topology.collapse.W, hc_base=topology.collapse.b, hc_scale=topology.collapse.a
    )


def ihc(topology, x, sublayers):
    R = rows(x)
    for link, F in zip(topology.links, sublayers, strict=True):
        post, h = copied(hy_v4.HYV4HyperConnection(CONFIG), fn=link.W, base=link.b, scale=link.a)(R)
        R = post.unsqueeze(-1) * F(link.norm(h)).unsqueeze(-2) + R
    return topology.final_norm(learned_head(hy_v4.HYV4HyperHead)(topology)(R))


def gated(read, W_w=None):
    parameters = {
        "hc_norm__weight": read.weight.flatten() - 1,
        "input_mix_weight_down__weight": read.W_d,
        "input_mix_weight_up__weight": read.W_u,
        **({} if W_w is None else {"block_inject_weight__weight": W_w}),
    }
    return copied(qwen4_exp.Qwen4ExpTextGatedResidual(CONFIG, use_combine=W_w is not None), **parameters)


def gr(topology, x, sublayers):
    R = rows(x).flatten(-2)
    for link, F in zip(topology.links, sublayers, strict=True):
        h, kept, weights = gated(link, link.W_w)(R)
        R = kept + (F(h).unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
    return gated(topology.last_read)(R)


def muse(topology, x, sublayers):
    for link, F in zip(topology.links, sublayers, strict=True):
        x = copied(muse_spark.MuseSparkResidualGate(CONFIG), gate=link.w)(x, link.output_norm(F(link.norm(x))))
    return topology.final_norm(x)


def zaya(topology, x, sublayers):
    names = {"hidden_states_scale": "s_o", "hidden_states_bias": "b_o", "residual_scale": "s_r", "residual_bias": "b_r"}
    for link, F in zip(topology.links, sublayers, strict=True):
        scaling = copied(
            their_zaya.ZayaResidualScaling(D), **{theirs: getattr(link, ours) for theirs, ours in names.items()}
        )
        x = scaling(F(link.norm(x)), x)
    return topology.final_norm(x)


def beam(topology, x, sublayers):
    for number, (link, F) in enumerate(zip(topology.links, sublayers, strict=True), 2):
        x = their_beam.depth_scaled_residual_add(link.output_norm(F(link.norm(x))), x, number)
    return topology.final_norm(x)


ORACLES = {
    "mhc:collapse=learned,eps=1e-5": mhc(
        deepseek_v4.DeepseekV4HyperConnection, learned_head(deepseek_v4.DeepseekV4HyperHead)
    ),
    "mhc:eps=1e-5": mhc(glm5_next.Glm5NextTextHyperConnection, lambda topology: glm5_next.Glm5NextTextHyperHead()),
    "ihc:eps=1e-5": ihc,
    "gr": gr,
    "muse": muse,
    "zaya": zaya,
    "beam": beam,
}


@pytest.mark.parametrize("text", ORACLES)
def test_outputs_and_gradients_are_those_of_transformers(text):
    topology, sublayers = make(text, L, D, norm=NormSpec("rms", eps=EPS)), make_sublayers([PAIR] * L, D)
    randomise(topology)
    parameters = [*topology.parameters(), *sublayers.parameters()]
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)
    got, expected = topology(x, sublayers), ORACLES[text](topology, x, nn.ModuleList(sublayers))
    assert_close(got, expected, **CLOSE)
    for mine, theirs in zip(
        *(torch.autograd.grad(out, [x, *parameters], direction) for out in (got, expected)), strict=True
    ):
        assert_close(mine, theirs, **CLOSE)
