"""Hooks on every module of every model fire once a pass and see tensors, compiled or not; they change nothing."""

import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from .families import FAMILIES
from .small import ALL
from .watching import KINDS, Watch, called_modules, flat_gradients

every_family = pytest.mark.parametrize("family", FAMILIES)
OUTSIDE = {""}
"""The model itself: it returns no tensors but a record of them, of which torch warns."""


def loss_of(family, model):
    return FAMILIES[family].loss(model, torch.float32)


def everything(model):
    return {name: module for name, module in called_modules(model).items() if name not in OUTSIDE}


def assert_all_fire(family, topology):
    model = FAMILIES[family].model(topology, torch.float32)
    expected = loss_of(family, model)
    expected_grads = flat_gradients(model, expected)
    modules = everything(model)
    watch = Watch(modules)
    loss = loss_of(family, model)
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert_close(flat_gradients(model, loss), expected_grads, rtol=1e-3, atol=1e-4)
    for kind in KINDS:
        assert watch.fired[kind] == dict.fromkeys(modules, 1), kind
    assert not watch.blind
    watch.remove()
    assert_close(loss_of(family, model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("topology", ALL)
def test_every_hook_fires_once_and_sees_tensors(topology):
    assert_all_fire("lm", topology)


@every_family
@pytest.mark.parametrize(
    "topology", ["siamese", "siamese:form=hybrid_pre", "siamese:form=plain", "pre", "span", "hyper"]
)
def test_every_hook_fires_in_every_model(family, topology):
    assert_all_fire(family, topology)


@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_one_hook_at_a_time(kind):
    """A hook on one module must not need the hooks on others to be seen."""
    model = FAMILIES["lm with experts"].model(dtype=torch.float32)
    for name, module in everything(model).items():
        watch = Watch({name: module}, (kind,))
        flat_gradients(model, loss_of("lm with experts", model))
        assert watch.fired[kind] == {name: 1}, name
        watch.remove()


@every_family
def test_hooks_on_all_modules_there_are(family):
    model, seen = FAMILIES[family].model(dtype=torch.float32), []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(("forward", module))),
        nn.modules.module.register_module_full_backward_hook(lambda module, *_: seen.append(("backward", module))),
    ]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "For backward hooks to be called, module output should be")
            flat_gradients(model, loss_of(family, model))
    finally:
        for handle in handles:
            handle.remove()
    for kind in ("forward", "backward"):
        fired = [module for what, module in seen if what == kind]
        for name, module in everything(model).items():
            assert sum(m is module for m in fired) == 1, (kind, name)


@every_family
def test_a_hook_may_change_what_it_sees(family):
    """On a block and on a link as well, whose streams may be several tensors."""
    model = FAMILIES[family].model(dtype=torch.float32)
    before = loss_of(family, model)
    block, bump = model.blocks[0], torch.linspace(0, 1, 8)
    handle = block.register_forward_hook(lambda _, args, out: (out[0] + bump, *out[1:]))
    assert (loss_of(family, model) - before).abs() > 1e-5
    handle.remove()
    handle = block.links[1].register_forward_hook(lambda _, args, out: (out[0], out[1] + bump))
    assert (loss_of(family, model) - before).abs() > 1e-5
    handle.remove()
    handle = block.register_forward_pre_hook(lambda _, args: (args[0] + bump, *args[1:]))
    assert (loss_of(family, model) - before).abs() > 1e-5
    handle.remove()
    assert_close(loss_of(family, model), before, rtol=0, atol=0)


@every_family
def test_hooks_hung_up_after_compiling_fire(family):
    """The block then runs eagerly, and compiled again when they are gone."""
    torch._dynamo.reset()
    model = FAMILIES[family].model(dtype=torch.float32)
    graphs = []

    def backend(graph, _):
        graphs.append(0)

        def run(*args):
            graphs[-1] += 1
            return graph(*args)

        return run

    model.compile_blocks(backend=backend)
    expected = loss_of(family, model)
    assert sum(graphs) == len(model.blocks)
    inside = {n: m for n, m in everything(model).items() if n.startswith("blocks.")}
    watch = Watch(inside)
    loss = loss_of(family, model)
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    flat_gradients(model, loss)
    for kind in KINDS:
        assert watch.fired[kind] == dict.fromkeys(inside, 1), kind
    assert sum(graphs) == len(model.blocks)
    watch.remove()
    loss_of(family, model)
    assert sum(graphs) == 2 * len(model.blocks)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    loss_of(family, model)
    handle.remove()
    assert all(any(m is module for m in seen) for module in inside.values())


@pytest.mark.parametrize("family", ["lm", "dit"])
@pytest.mark.parametrize("kind", ["forward", "full_backward"])
def test_hooks_hung_up_before_compiling_fire(family, kind):
    torch._dynamo.reset()
    model = FAMILIES[family].model(dtype=torch.float32)
    inside = {n: m for n, m in everything(model).items() if n.startswith("blocks.")}
    watch = Watch(inside, (kind,))
    model.compile_blocks(backend="eager")
    flat_gradients(model, loss_of(family, model))
    assert watch.fired[kind] == dict.fromkeys(inside, 1)


@every_family
def test_a_hook_in_the_place_of_one_that_was_compiled_fires_and_the_other_no_more(family):
    """As many hooks as then, and not the same ones."""
    torch._dynamo.reset()
    model, fired = FAMILIES[family].model(dtype=torch.float32), []
    ffn = model.blocks[0].ffn
    first = ffn.register_forward_hook(lambda *_: fired.append("first"))
    model.compile_blocks(backend="eager")
    loss_of(family, model)
    first.remove()
    ffn.register_forward_hook(lambda *_: fired.append("second"))
    loss_of(family, model)
    assert fired == ["first", "second"]
