"""Arguments for every operator of the library: what the tests that sweep over all of them share."""

import torch
from torch import Tensor

from siamesenorm.layers import grouped  # defines operators, as the next line does
from siamesenorm.layers.kernels import decode, rotary, swiglu  # noqa: F401
from siamesenorm.layers.rotary import Rotary
from siamesenorm.residual.kernels import siamese_step, sinkhorn  # noqa: F401
from siamesenorm.residual.kernels.siamese_step import ABSENT, LAYER, RMS

OPERATORS = torch.ops.siamesenorm


def defined():
    """Names of all operators that the library has made known."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("siamesenorm::") for name in names if name.startswith("siamesenorm::"))


def draw(*shape):
    return torch.randn(*shape)


def strided(*shape):
    """Numbers with a stride of two in the last dimension."""
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


def step_parameters(kinds, affine, biased, gain, width):
    norms = [kind != ABSENT and affine for kind in kinds]
    vectors = [draw(width) if there and (k == 0 or biased) else None for there in norms for k in (0, 1)]
    return [*vectors, draw(width) if gain else None]


def slots_of(chosen, experts):
    slots, _ = grouped.sort_slots(chosen, experts)
    return slots.ends, slots.token, slots.of_token


def examples(rows=3, make=draw):
    """Operator names with arguments each: present and absent parts, `rows` rows of tensors that `make` draws."""
    width = 6
    x = make(rows, 2, width)
    for affine in (True, False):
        weight, bias = (draw(width), draw(width)) if affine else (None, None)
        yield "rms_norm", (x, weight, bias, 1e-5)
        yield "rms_norm_backward", (make(rows, 2, width), x, weight, bias, make(rows, 2).abs())
    for kinds, affine, gain in (
        ([RMS, RMS, RMS], True, False),
        ([ABSENT, LAYER, LAYER], True, True),
        ([LAYER, RMS, ABSENT], False, False),
    ):
        parameters = step_parameters(kinds, affine, kinds[1] == LAYER, gain, width)
        yield "siamese_step", (*(make(rows, 2, width) for _ in range(3)), 0.5, *parameters, kinds, [1e-5] * 3)
        saved = make(rows, 2, width), make(rows, 2, width), torch.rand(6, rows, 2)
        yield "siamese_step_backward", (*(make(rows, 2, width) for _ in range(3)), *saved, 0.5, *parameters, kinds)
        yield "siamese_step", (*(make(rows, 2, width) for _ in range(2)), None, 0.5, *parameters, kinds, [1e-5] * 3)
        yield "siamese_step_backward", (None, None, make(rows, 2, width), *saved, 0.5, *parameters, kinds)
    yield "sinkhorn", (make(rows, 2, 9), 3, 1e-6)
    yield "sinkhorn_backward", (make(rows, 2, 9), make(rows, 2, 9), 3, 1e-6)
    yield "swiglu", (make(rows, 2, 8),)
    yield "swiglu_backward", (make(rows, 2, 4), make(rows, 2, 8))
    for positions in (torch.arange(2), torch.arange(2 * rows).view(rows, 2)):
        yield "rotary", (make(rows, 2, 3, 4), 2, *Rotary().cos_sin(positions, 4), 1.0)
    for bias in (draw(5), None):
        yield "few_rows_linear", (make(rows, width), make(5, width), bias)
        experts = make(4, width), make(4, 6, width), None if bias is None else draw(4, 6)
        yield (
            "few_tokens_experts",
            (make(rows, width), 2, True, *experts, make(4, width, 3), None if bias is None else draw(4, width)),
        )
    cache = draw(rows, 2, 7, 4), draw(rows, 2, 7, 4)
    heads = make(rows, 1, 8, 4).split([4, 2, 2], dim=2)
    yield "next_token_attention", (*heads, *Rotary().cos_sin(torch.tensor([5]), 4), *cache, 5, 2)
    ends, token, of_token = slots_of(torch.arange(2 * rows).view(rows, 2) % 3, 4)
    for bias, route in ((draw(4, 5), (token, of_token)), (None, (None, None))):
        x = make(rows if route[0] is not None else 2 * rows, width)
        yield "grouped_linear", (x, make(4, 5, width), bias, ends, *route)
        wants = (True, True, bias is not None)
        yield "grouped_linear_backward", (make(2 * rows, 5), x, make(4, 5, width), ends, *route, *wants)


def broken(arguments):
    """The arguments with one tensor spoilt after the other."""
    for k, t in enumerate(arguments):
        if isinstance(t, Tensor) and t.is_floating_point():
            for wrong in (t.double(), t[..., :-1], t[:-1] if t.dim() > 1 else t[None]):
                yield k, [*arguments[:k], wrong, *arguments[k + 1 :]]


DIFFERENTIABLE = {"rms_norm", "siamese_step", "sinkhorn", "swiglu", "rotary", "grouped_linear"}


def call(name, arguments):
    return getattr(OPERATORS, name)(*arguments)


def tensors(result):
    return [result] if isinstance(result, Tensor) else [t for t in result if isinstance(t, Tensor)]
