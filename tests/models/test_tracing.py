"""What records operators records every model as it is: right for other numbers, rows and lengths too, or refused."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm.models.lm import generate
from siamesenorm.residual.kernels import native

from .families import FAMILIES, WORDS, callable_form, language

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
every_family = pytest.mark.parametrize("family", FAMILIES)
quiet = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
built = pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")


def case(family):
    model = FAMILIES[family].model(dtype=torch.float32)
    return callable_form(model), FAMILIES[family].inputs


@every_family
@pytest.mark.parametrize("grad", [True, False])
@quiet
def test_jit_trace(family, grad):
    model, inputs = case(family)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, inputs(2), check_trace=False)
        assert "siamesenorm::" not in str(traced.inlined_graph)
        for rows in (2, 3):
            given = inputs(rows)
            assert_close(traced(*given), model(*given), **CLOSE)


class Masked(nn.Module):
    """A language model as a function of ids and mask."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask=None):
        return self.model(ids, attention_mask=mask).logits


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("traced_length", [1, 2, 6])
@quiet
def test_a_traced_language_model_serves_other_lengths(window, traced_length):
    """Also one traced on a single token, where no mask is needed, or on less than its window."""
    model = Masked(language(window=window).model(dtype=torch.float32))
    traced = torch.jit.trace(model, torch.randint(0, WORDS, (2, traced_length)))
    for shape in ((1, 1), (3, 7)):
        ids = torch.randint(0, WORDS, shape)
        assert_close(traced(ids), model(ids), **CLOSE)


@quiet
def test_a_language_model_traced_without_filling_serves_rows_with_it():
    model = Masked(language().model(dtype=torch.float32))
    ids, mask = torch.randint(0, WORDS, (2, 5)), torch.ones(2, 5, dtype=torch.long)
    traced = torch.jit.trace(model, (ids, mask), check_trace=False)
    mask[1, :2] = 0
    assert_close(traced(ids, mask), model(ids, mask), **CLOSE)


@every_family
def test_make_fx_of_a_training_step(family):
    """Gradients for other numbers, and for a loss whose own gradient is not one any more."""
    model = FAMILIES[family].model(dtype=torch.float32)

    def step(scale, *weights):
        weights = [w.detach().requires_grad_() for w in weights]
        named = dict(zip(names, weights, strict=True))
        loss = torch.func.functional_call(holder, named, ()) * scale
        return torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            return FAMILIES[family].loss(self.model, torch.float32)

    holder = Holder()
    names, weights = zip(*holder.named_parameters(), strict=True)
    graph = make_fx(step)(torch.tensor(1.0), *weights)
    others = [w + 0.1 * torch.randn_like(w) for w in weights]
    assert_close(graph(torch.tensor(3.0), *others), step(torch.tensor(3.0), *others), rtol=1e-3, atol=1e-4)


@every_family
def test_export_with_any_number_of_rows(family):
    model, inputs = case(family)
    rows, given = torch.export.Dim("rows", min=2, max=64), inputs(3)
    exported = torch.export.export(model, given, dynamic_shapes=tuple({0: rows} for _ in given), strict=False).module()
    for number in (3, 20):  # more than decoding's kernels take
        given = inputs(number)
        assert_close(exported(*given), model(*given), **CLOSE)


@every_family
def test_symbolic_tracing_is_refused(family):
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(case(family)[0])


@every_family
@pytest.mark.parametrize("grad", [True, False])
def test_fake_tensors(family, grad):
    model, inputs = case(family)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = [mode.from_tensor(t) for t in inputs(2)]
    with mode, torch.set_grad_enabled(grad):
        out = model(*given)
    assert out.shape == model(*inputs(2)).shape


@every_family
def test_flop_counters_count_the_same_with_and_without_kernels(family):
    def count():
        model = FAMILIES[family].model(dtype=torch.float32)
        with FlopCounterMode(display=False) as training:
            FAMILIES[family].loss(model, torch.float32).backward()
        with FlopCounterMode(display=False) as looking, torch.no_grad():
            callable_form(model)(*FAMILIES[family].inputs(1))
        return training.get_total_flops(), looking.get_total_flops()

    with native.disabled():
        expected = count()
    assert count() == expected
    assert min(expected) > 0


@pytest.mark.parametrize("family", ["lm", "lm with experts"])
def test_flop_counters_count_decoding(family):
    def count():
        # Torch counts no attention on a CPU but this one.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            generate(model, [[1, 2, 3], [4, 5, 6]], max_new_tokens=4)
        return counter.get_total_flops()

    model = FAMILIES[family].model(dtype=torch.float32)
    with native.disabled():
        expected = count()
    assert count() == expected > 0


@built
def test_the_profiler_names_the_operators():
    model = FAMILIES["lm"].model(dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        FAMILIES["lm"].loss(model, torch.float32).backward()
    seen = {event.key for event in profile.key_averages()}
    names = ("rms_norm", "siamese_step", "swiglu")
    assert {f"siamesenorm::{name}{way}" for name in names for way in ("", "_backward")} <= seen
    assert "siamesenorm::rotary" in seen
