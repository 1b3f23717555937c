"""What each C kernel is worth: the operation, and a whole step or answer, with the kernel and without it.

    python benchmarks/kernels.py                    # writes benchmarks/results/kernels.json
    python benchmarks/kernels.py --quick

Operations run forward and backward, or without gradients where the kernel has none, with `native.disabled()` as the
other side. Whole training steps (d512x12, `pre` and `siamese`) and whole answers of greedy decoding leave out one
kernel at a time; `without all` leaves out every one. All are eager: compiled models do not use the kernels.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from contestants import CONTEXT, SHAPES, Shape, line_up
from race import Results, Turn, arguments, repeated
from siamesenorm.layers.kernels import decode, rotary, swiglu
from siamesenorm.layers.linear import linear
from siamesenorm.layers.moe import MoE
from siamesenorm.layers.rotary import Rotary
from siamesenorm.models.lm import LanguageModel, LMConfig, MoEConfig, generate
from siamesenorm.residual import Residual, siamese
from siamesenorm.residual.kernels import native, rms_norm, sinkhorn


def _nothing(*_: Any) -> None:
    """What a kernel's function gives where the plain form is to run."""


Without = Callable[[], AbstractContextManager[Any]]
NEVER = SimpleNamespace(takes=lambda *_: False)
WITHOUT: dict[str, Without] = {
    "rms_norm": lambda: mock.patch.object(rms_norm, "devices", NEVER),
    "siamese_step": lambda: mock.patch.object(siamese, "takes", NEVER.takes),
    "sinkhorn": lambda: mock.patch.object(sinkhorn, "native", NEVER),
    "rotary": lambda: mock.patch.object(rotary, "native", NEVER),
    "swiglu": lambda: mock.patch.object(swiglu, "native", NEVER),
    "few_rows_linear": lambda: mock.patch.object(decode, "linear", _nothing),
    "next_token_attention": lambda: mock.patch.object(decode, "attention", _nothing),
    "few_tokens_experts": lambda: mock.patch.object(decode, "experts", _nothing),
    "all": native.disabled,
}
"""Ways to run without one kernel, or without all of them."""
IN_TRAINING = {
    topology: ("rms_norm", *own, "rotary", "swiglu")
    for topology, own in {"pre": (), "siamese": ("siamese_step",), "mhc": ("sinkhorn",)}.items()
}
IN_DECODING = ("few_rows_linear", "next_token_attention")
PROMPT, TOKENS = 32, 64


def within(context: Without, turn: Turn) -> Turn:
    """A turn that runs inside of a context."""

    def inside() -> None:
        with context():
            turn()

    return inside


def forward_backward(function: Callable[..., Any], *inputs: Tensor, times: int) -> Turn:
    """An operation and its gradients for all inputs."""
    leaves = [t.requires_grad_() for t in inputs]
    made = function(*leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    grads = [torch.randn_like(t) for t in outputs]

    def turn() -> None:
        out = function(*leaves)
        torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, grads)

    return repeated(turn, times)


def operations(shape: Shape, times: int) -> dict[str, Turn]:
    """A kernel's own operation at the sizes of a shape."""
    torch.manual_seed(0)
    rows, width = (shape.batch, shape.sequence), shape.dim // shape.heads
    stream = torch.randn(*rows, shape.dim)
    links = Residual("siamese", shape.dim, 2, needs="waived")
    between: Any = links.step(*links.links[:2])
    sequence_angles = Rotary().cos_sin(torch.arange(shape.sequence), width)
    heads = torch.randn(*rows, 3 * shape.heads, width)
    cache = torch.zeros(2, 1, shape.heads, CONTEXT, width)
    query = torch.randn(3, 1, 1, shape.heads, width)
    weight = torch.randn(shape.hidden, shape.dim)
    moe = MoE(shape.dim, shape.hidden // 2, 16, 2)
    angles = Rotary().cos_sin(torch.tensor([PROMPT]), width)

    def attend() -> Tensor:
        q, k, v = query
        out = decode.attention(q, k, v, *angles, cache[0], cache[1], PROMPT, 0)
        if out is not None:
            return out
        q, k = rotary.plain(q, *angles), rotary.plain(k, *angles)
        cache[0][:, :, PROMPT : PROMPT + 1], cache[1][:, :, PROMPT : PROMPT + 1] = k.transpose(1, 2), v.transpose(1, 2)
        seen = cache[:, :, :, : PROMPT + 1]
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), seen[0], seen[1])

    return {
        "rms_norm": forward_backward(
            lambda x, w: rms_norm.rms_norm(x, w, None, 1e-5), stream.clone(), torch.ones(shape.dim), times=times
        ),
        "siamese_step": forward_backward(
            lambda x, y, o: _flat(between((x, y), o, None)), *(torch.randn_like(stream) for _ in range(3)), times=times
        ),
        "sinkhorn": forward_backward(lambda x: sinkhorn.sinkhorn(x, 20, 1e-6), torch.randn(*rows, 16), times=times),
        "rotary": forward_backward(lambda x: rotary.rotary(x, 2 * shape.heads, *sequence_angles), heads, times=times),
        "swiglu": forward_backward(swiglu.swiglu, torch.randn(*rows, 2 * shape.hidden), times=times),
        "few_rows_linear": _undifferentiated(lambda: linear(stream[:1, :1], weight), 20 * times),
        "next_token_attention": _undifferentiated(attend, 20 * times),
        "few_tokens_experts": _undifferentiated(lambda: moe(stream[:1, :1]), 20 * times),
    }


def _flat(result: Any) -> tuple[Tensor, ...]:
    (x, y), h = result
    return x, y, h


def _undifferentiated(function: Turn, times: int) -> Turn:
    return within(torch.no_grad, repeated(function, times))


def answers(shape: Shape, moe: bool, tokens: int) -> Turn:
    """Greedy decoding of one row."""
    experts = MoEConfig(experts=16, top_k=2, expert_dim=shape.hidden // 2) if moe else None
    config = LMConfig(
        vocab_size=shape.vocabulary,
        dim=shape.dim,
        blocks=shape.blocks,
        heads=shape.heads,
        ffn_dim=shape.hidden,
        topology="pre",
        max_length=CONTEXT,
        moe=experts,
    )
    model = LanguageModel(config, seed=0).eval()
    prompt = torch.randint(1, shape.vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    return lambda: generate(model, prompt, max_new_tokens=tokens)


def left_out(turn: Turn, kernels: tuple[str, ...]) -> dict[str, Turn]:
    """A turn with all kernels, without each one, and without all."""
    return {"with all": turn} | {f"without {k}": within(WITHOUT[k], turn) for k in (*kernels, "all")}


def main() -> int:
    parser = arguments(__doc__, "kernels", rounds=20)
    parser.add_argument("--shape", default="d512x12", choices=list(SHAPES))
    args = parser.parse_args()
    if not native.enabled():
        parser.error(f"there are no kernels to measure: {native.absence()}")
    shape = SHAPES[args.shape].quick() if args.quick else SHAPES[args.shape]
    times, tokens = (1, 4) if args.quick else (20, TOKENS)
    results = Results(parser, args, shape=vars(shape))
    for kernel in list(WITHOUT)[:-1]:

        def sides() -> dict[str, Turn]:
            turn = operations(shape, times)[kernel]  # noqa: B023
            return {"kernel": within(contextlib.nullcontext, turn), "plain": within(native.disabled, turn)}

        results.race(f"operation {kernel}", sides)
    for topology, kernels in IN_TRAINING.items():

        def steps() -> dict[str, Turn]:
            return left_out(line_up([topology], shape, ["eager"])[f"{topology}@eager"], kernels)  # noqa: B023

        results.race(f"training step {topology}", steps)
    results.race("decoding pre", lambda: left_out(answers(shape, False, tokens), IN_DECODING))
    results.race(
        "decoding pre with experts",
        lambda: left_out(answers(shape, True, tokens), (*IN_DECODING, "few_tokens_experts")),
    )
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
