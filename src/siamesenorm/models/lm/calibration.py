"""Gains of a blend's other topology, set so that it computes on a text what Pre-Norm did, as far as they can.

`calibrate` goes through the stack once, on the source's own activations: every norm gets the gains that bring its
output nearest to what stood in its place, by least squares in closed form. `regress` then goes block by block on the
other topology's own activations, and moves all of a block's new parameters by gradient towards what the next block of
the source reads. The sublayers' weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.residual.blend import Blend, BlendLink
from siamesenorm.residual.flow import output_of
from siamesenorm.residual.norms import Norm
from siamesenorm.residual.ramp import Growing

LAST = 10**12
"""A step at which every blend is over."""
RATE = 0.02
NEAR = 1e-3
"""Relative error that is left alone: the eps of norms."""


@torch.no_grad()
def calibrate(model: LanguageModel, ids: Tensor) -> None:
    """Set the norms of the other topology, and those that grow in, on rows of tokens."""
    residual, blocks = blend_of(model)
    residual.set_step(0)
    x, context = begin(model, ids)
    with fitting(residual.target, lambda: x):
        residual.target.open(x)
    streams = residual.open(x)
    for block in blocks:
        for link, sublayer in zip(block.links, (block.attend, block.feed), strict=True):
            seen = link.source.read(streams[0])[1]
            if not near(link.target.read(streams[1])[1], seen):
                with fitting(link.target, lambda seen=seen: seen):  # type: ignore[misc]
                    link.target.read(streams[1])
            streams, h = link(streams)
            with fitting(block):  # what grows in: its own input
                output, gate = output_of(sublayer(h, context))
            following = next_reading(model, link, link.source.write(streams[0], output))
            with fitting(link.target, lambda o=output, f=following: (o, f)):  # type: ignore[misc]
                link.target.write(streams[1], output)
            streams = link.add(streams, output, gate)
    last = residual.source.close(streams[0])
    if not near(residual.target.close(streams[1]), last):
        with fitting(residual.target, lambda: last):
            residual.target.close(streams[1])


def near(found: Tensor, wanted: Tensor) -> bool:
    """Whether there is nothing to be set."""
    return bool((found - wanted).norm() <= NEAR * wanted.norm())


def next_reading(model: LanguageModel, link: nn.Module, x: Tensor) -> Tensor:
    """What Pre-Norm's next sublayer reads, or the head."""
    links = list(model.residual.links)
    number = links.index(link) + 1
    if number == len(links):
        return model.residual.source.close(x)  # type: ignore[union-attr, operator]
    return links[number].source.read(x)[1]  # type: ignore[union-attr, operator]


@contextmanager
def fitting(module: nn.Module, wanted: Callable[[], Any] | None = None) -> Iterator[None]:
    """Norms that run inside get gains first: towards what is wanted, or, where they grow in, towards their input.

    A pair that is wanted is a sublayer's output and what is read behind it: norms of the output itself are brought
    near the output, norms of the stream near the reading. Norms that are switched off stay so.
    """

    def before(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        u = inputs[0]
        target = u if wanted is None else wanted()
        if isinstance(target, tuple):
            output, following = target
            target = output if u.shape == output.shape and torch.equal(u, output) else following
        if target.shape == u.shape and bool(norm.weight.any()):  # type: ignore[operator]
            fit(norm, u, target)

    grown = {inner.norm for inner in module.modules() if isinstance(inner, Growing)}
    norms = [n for n in module.modules() if isinstance(n, Norm) and (wanted is not None or n in grown)]
    hooks = [norm.register_forward_pre_hook(before) for norm in norms if norm.weight is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fit(norm: Any, u: Tensor, wanted: Tensor) -> None:
    """The gains (and biases) with which a norm of u is nearest to what is wanted, by channel."""
    norm.weight.fill_(1.0)
    if norm.bias is not None:
        norm.bias.zero_()
    n, y = (tensor.double().flatten(0, -2) for tensor in (type(norm).forward(norm, u), wanted))
    if norm.bias is not None:
        mean_n, mean_y = n.mean(0), y.mean(0)
        gain = ((n - mean_n) * (y - mean_y)).sum(0) / (n - mean_n).square().sum(0).clamp(min=1e-12)
        norm.bias.copy_(mean_y - gain * mean_n)
    else:
        gain = (n * y).sum(0) / n.square().sum(0).clamp(min=1e-12)
    norm.weight.copy_(gain)


def regress(model: LanguageModel, source: LanguageModel, ids: Tensor, *, steps: int) -> None:
    """Move the new parameters, block by block, so many steps towards what the source's next block reads."""
    residual, blocks = blend_of(model)
    wanted = readings(source, ids)
    residual.set_step(LAST)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        x, context = begin(model, ids)
        streams = residual.open(x)
        for number, (block, target) in enumerate(zip(blocks, wanted, strict=True)):
            following = blocks[number + 1].links[0] if number + 1 < len(blocks) else None

            def reading(block: Any = block, following: Any = following, streams: Any = streams) -> tuple[Any, Tensor]:
                behind = block(streams, context)[0]
                return behind, residual.close(behind) if following is None else following.read(behind)[1]

            new = [*new_parameters(block), *(new_parameters(following) if following is not None else ())]
            new += [] if following is not None else list(residual.target.parameters())
            descend(reading, target, new, steps)
            with torch.no_grad():
                streams = reading()[0]
    finally:
        for parameter, wish in zip(model.parameters(), trained, strict=True):
            parameter.requires_grad_(wish)


def descend(reading: Callable[[], tuple[Any, Tensor]], target: Tensor, new: list[nn.Parameter], steps: int) -> None:
    """Adam on the relative squared error; the best values found stay."""
    scale = target.square().mean()
    with torch.no_grad():
        best, kept = float((reading()[1] - target).square().mean() / scale), [p.detach().clone() for p in new]
    for parameter in new:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(new, lr=RATE, betas=(0.8, 0.95)) if new else None
    for _ in range(steps if optimizer is not None else 0):
        assert optimizer is not None
        optimizer.zero_grad()
        loss = (reading()[1] - target).square().mean() / scale
        if loss.item() < best:
            best, kept = loss.item(), [p.detach().clone() for p in new]
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(new, kept, strict=True):
            parameter.requires_grad_(False)
            parameter.copy_(value)


def new_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Of the other topology's links, and of norms that grow in."""
    found: dict[nn.Parameter, None] = {}
    for inner in module.modules():
        if isinstance(inner, BlendLink):
            found |= dict.fromkeys(inner.target.parameters())
        elif isinstance(inner, Growing):
            found |= dict.fromkeys(inner.norm.parameters())
    return list(found)


@torch.no_grad()
def readings(source: LanguageModel, ids: Tensor) -> list[Tensor]:
    """What every block behind the first reads in a Pre-Norm model, and the head."""
    x, context = begin(source, ids)
    found: list[Tensor] = []
    for number, block in enumerate(source.blocks):
        if number:
            found.append(block.links[0].read(x)[1])  # type: ignore[index, union-attr]
        x = block(x, context)[0]
    return [*found, source.residual.close(x)]


def begin(model: LanguageModel, ids: Tensor) -> tuple[Tensor, Any]:
    """The embedding of rows of tokens, and what attention needs beside it."""
    positions = torch.arange(ids.shape[1], device=ids.device)
    return model.embed(ids, positions).detach(), model.context(ids)


def blend_of(model: LanguageModel) -> tuple[Any, list[Any]]:
    """The blend and its blocks."""
    assert isinstance(model.residual, Blend)
    return model.residual, list(model.blocks)
