"""The transformers model under hooks and tracers: everything fires once and sees tensors, traces serve other inputs."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from models.watching import KINDS, Watch, called_modules, flat_gradients

from .huggingface_models import HYBRID, causal_lm, tokens

TOPOLOGIES = ["siamese", HYBRID, "pre", "span", "hyper", "mhc", "residual_dual"]
OUTSIDE = {"", "model", "model.hidden_state"}
"""The models themselves return records of tensors; a hidden state is made when it is asked for."""


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_hook_fires_once_and_sees_tensors(topology):
    model, ids = causal_lm(topology), tokens()
    loss = model(ids, labels=ids).loss
    expected = flat_gradients(model, loss)
    modules = {name: module for name, module in called_modules(model).items() if name not in OUTSIDE}
    watch = Watch(modules)
    out = model(ids, labels=ids)
    assert_close(out.loss, loss, rtol=1e-4, atol=1e-5)
    assert_close(flat_gradients(model, out.loss), expected, rtol=1e-3, atol=1e-4)
    for kind in KINDS:
        assert watch.fired[kind] == dict.fromkeys(modules, 1), kind
    assert not watch.blind


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_hooks_on_layers_see_the_streams(topology):
    model, seen = causal_lm(topology), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append((args, out)))
    with torch.no_grad():
        model(tokens(2, 7))
    assert len(seen) == len(model.model.layers)
    for args, out in seen:
        assert all(isinstance(t, torch.Tensor) for t in (*args, *out))
        assert args[0].shape[:2] == out[0].shape[:2] == (2, 7)
    for (_, out), (args, _) in itertools.pairwise(seen):
        assert all(torch.equal(a, b) for a, b in zip(out, args, strict=True))


@pytest.mark.parametrize("moe", [None, {"experts": 3, "top_k": 2, "expert_dim": 6}])
@pytest.mark.parametrize("topology", ["siamese", HYBRID])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_model_serves_other_inputs(topology, moe):
    model = causal_lm(topology, moe=moe, config={"use_cache": False, "return_dict": False})
    traced = torch.jit.trace(model, tokens(), check_trace=False)
    assert "siamesenorm::" not in str(traced.inlined_graph)
    for ids in (tokens(seed=1), tokens(batch=3, seed=2)):
        assert_close(traced(ids)[0], model(ids)[0], rtol=1e-4, atol=1e-5)
