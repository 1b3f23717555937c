"""Random shapes, strides and presence through every compiled kernel, in a process with AddressSanitizer loaded.

``python fuzz_kernels.py LIBRARY``: the kernels, built with ``-fsanitize=address,undefined``. It ends with 0 and prints
the kernels that ran, or the sanitizers end it with a report.
"""

import contextlib
import ctypes
import os
import random
import sys

import torch

from layers.operators import broken, call, examples
from siamesenorm.layers.kernels import decode, rotary, swiglu
from siamesenorm.layers.moe import MoE
from siamesenorm.layers.rotary import Rotary
from siamesenorm.residual.kernels import native, rms_norm, siamese_step, sinkhorn
from siamesenorm.residual.kernels.siamese_step import ABSENT, LAYER, RMS

ROUNDS = 60
chance = random.Random(0)
draw = chance.randint
called = set()


def numbers(*shape):
    """A tensor in one of several layouts, its memory no larger than it needs to be."""
    layout = chance.choice(["whole", "strided", "expanded", "turned"])
    if layout == "strided":
        return torch.randn(*shape, 2)[..., draw(0, 1)]
    if layout == "expanded" and len(shape) > 1:
        return torch.randn(1, *shape[1:]).expand(*shape)
    if layout == "turned" and len(shape) > 1:
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    return torch.randn(*shape)


def maybe(tensor):
    return tensor if chance.random() < 0.5 else None


def batch():
    """Few rows as a rule; now and then so many that threads share the work."""
    return [draw(0, 5) for _ in range(draw(0, 3))] if chance.random() < 0.8 else [draw(40, 90), draw(7, 9)]


def backward(out):
    """Gradients in odd layouts too."""
    out = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    torch.autograd.backward(out, [numbers(*t.shape) for t in out])


def norm():
    rows, width = batch(), draw(1, 90)
    x, weight, bias = numbers(*rows, width).requires_grad_(), maybe(numbers(width)), maybe(numbers(width))
    backward(torch.ops.siamesenorm.rms_norm(x, weight, bias, 1e-5)[0])
    rms_norm.rms_norm(x, weight, bias, 1e-5)


def step():
    rows, width = batch(), draw(1, 90)
    kinds = [chance.choice([ABSENT, RMS, LAYER]), chance.choice([RMS, LAYER]), chance.choice([ABSENT, RMS, LAYER])]
    parameters = tuple(maybe(numbers(width)) for _ in range(7))
    streams = [numbers(*rows, width).requires_grad_() for _ in range(3)]
    backward(siamese_step.siamese_step(*streams, 0.7, parameters, kinds, [1e-5] * 3))
    backward(siamese_step.siamese_step(*streams[:2], None, 0.7, parameters, kinds, [1e-5] * 3)[2])


def matrices():
    rows, n, rounds = batch(), draw(1, 9), draw(1, 25)
    backward(torch.ops.siamesenorm.sinkhorn(numbers(*rows, n * n).requires_grad_(), rounds, chance.choice([0.0, 1e-6])))
    sinkhorn.sinkhorn(numbers(draw(15, 33), n * n), rounds, 1e-6)


def units():
    backward(torch.ops.siamesenorm.swiglu(numbers(*batch(), 2 * draw(1, 90)).requires_grad_()))
    swiglu.swiglu(torch.randn(3, 2 * draw(1, 90)))


def turns():
    rows, tokens, heads, width = draw(0, 4), draw(1, 6), draw(1, 4), 2 * draw(1, 20)
    positions = torch.arange(rows * tokens).view(rows, tokens) if chance.random() < 0.5 else torch.arange(tokens)
    x = numbers(rows, tokens, heads, width).requires_grad_()
    backward(rotary.rotary(x, draw(0, heads), *Rotary().cos_sin(positions, width)))
    torch.ops.siamesenorm.rotary(x.detach(), draw(0, heads), *Rotary().cos_sin(positions, width), -1.0)


def products():
    rows, width, out = draw(0, 9), draw(1, 90), draw(1, 90) if chance.random() < 0.8 else 600
    torch.ops.siamesenorm.few_rows_linear(numbers(rows, width), numbers(out, width), maybe(numbers(out)))
    decode.linear(numbers(width), torch.randn(out, width), None)


def experts():
    width, hidden, number = draw(1, 50), draw(1, 80), draw(1, 9)
    moe = MoE(width, hidden, number, draw(1, number), bias=chance.random() < 0.5)
    moe.normalize_top_k = chance.random() < 0.5
    h = numbers(draw(1, 12), width)
    if chance.random() < 0.2:
        h = torch.full_like(h, float("nan"))
    moe(h)


def attention():
    rows, kv_heads, group, width, room = draw(1, 4), draw(1, 3), draw(1, 3), 2 * draw(1, 9), draw(1, 90)
    length = draw(0, room - 1)
    heads = numbers(rows, 1, (group + 2) * kv_heads, width).split([group * kv_heads, kv_heads, kv_heads], dim=2)
    cache = [torch.randn(rows, kv_heads, room, width) for _ in range(2)]
    cos_sin = Rotary().cos_sin(torch.tensor([length]), width)
    torch.ops.siamesenorm.next_token_attention(*heads, *cos_sin, *cache, length, draw(0, length))


def spoilt():
    """Every operator with one tensor after the other of a wrong size or dtype: refused, or nothing is overrun."""
    for rows in (1, 3):
        for name, arguments in examples(rows):
            for _, given in broken(arguments):
                with contextlib.suppress(RuntimeError, ValueError, IndexError):
                    call(name, given)


def overrun():
    """One row more than there is: what the sanitizer must end a process for."""
    x, out, rstd = torch.randn(4, 16), torch.empty(4, 16), torch.empty(4)
    part = rms_norm.NormArgs(1, 0, 1e-5, None, None, None, rstd.data_ptr())
    native.call("norm_forward", rms_norm.NormCallArgs(5, 16, 1, part, x.data_ptr(), None, out.data_ptr()))


def ends(function):
    """Whether a child process does not survive a function."""
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        function()
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def main():
    library = ctypes.CDLL(sys.argv[1])
    native._load = lambda: (library, "")
    real = native.call
    native.call = lambda name, arguments: called.add(name) or real(name, arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    assert ends(overrun), "the sanitizer does not see an overrun"
    torch.set_num_threads(2)
    for _ in range(ROUNDS):
        for part in (norm, step, matrices, units, turns):
            part()
        with torch.no_grad():
            for part in (products, experts, attention):
                part()
    spoilt()
    print(" ".join(sorted(called)))


if __name__ == "__main__":
    main()
