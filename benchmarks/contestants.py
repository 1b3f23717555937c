"""Language models that race: ours on any topology, and transformers' of the same shape, each in several ways.

A contestant is ``MODEL@WAY``. Models are topologies of this package, ``llama``, ``olmo2`` and ``qwen3``; ways are
``eager``, ``compiled`` (ours, block by block), ``layers`` (theirs, decoder layer by decoder layer) and ``whole``
(theirs, all at once with the loss). All ways of a model share its weights and its optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from race import Turn, repeated
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a language model and of its batch."""

    dim: int
    blocks: int
    heads: int
    hidden: int
    sequence: int = 256
    batch: int = 4
    vocabulary: int = 8192
    steps: int = 1
    """Training steps in a turn."""

    def quick(self) -> Shape:
        """So small that nothing but running is seen."""
        return replace(self, dim=64, heads=4, hidden=96, blocks=2, sequence=16, batch=2, vocabulary=64, steps=1)


SHAPES = {
    "d256x8": Shape(256, 8, 4, 704),
    "d512x12": Shape(512, 12, 8, 1376),
    "d1024x6": Shape(1024, 6, 16, 2752),
    "d64x12": Shape(64, 12, 4, 192, sequence=64, batch=16, vocabulary=256, steps=10),
}
OURS = ("pre", "siamese", "siamese:form=hybrid_pre")
THEIRS = ("llama", "olmo2", "qwen3")
CONTEXT = 1024


def build(name: str, shape: Shape) -> nn.Module:
    """A model by its name."""
    return _transformers(name, shape) if name in THEIRS else _ours(name, shape)


def _ours(topology: str, shape: Shape) -> LanguageModel:
    config = LMConfig(
        vocab_size=shape.vocabulary,
        dim=shape.dim,
        blocks=shape.blocks,
        heads=shape.heads,
        ffn_dim=shape.hidden,
        topology=topology,
        max_length=CONTEXT,
    )
    return LanguageModel(config, seed=0)


def _transformers(name: str, shape: Shape) -> nn.Module:
    import transformers

    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": shape.dim // shape.heads}),
    }
    config, model, more = kinds[name]
    torch.manual_seed(0)
    made: nn.Module = model(
        config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.dim,
            intermediate_size=shape.hidden,
            num_hidden_layers=shape.blocks,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            **more,
        )
    )
    return made.train()


def ways(name: str) -> tuple[str, ...]:
    """The ways that a model can run."""
    return ("eager", "layers", "whole") if name in THEIRS else ("eager", "compiled")


def in_way(make: Callable[[], Any], model: Any, way: str, layers: Callable[[Any], Iterable[nn.Module]]) -> Any:
    """A model that shares the weights of another and runs in its own way."""
    if way == "eager":
        return model
    other = make()
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)  # the very parameters, not copies
    if way == "compiled":
        other.compile_blocks()
    elif way == "layers":
        for layer in layers(other):
            layer.compile()
    else:
        return torch.compile(other)
    return other


def training(
    make: Callable[[], nn.Module],
    loss: Loss,
    which: Iterable[str],
    layers: Callable[[Any], Iterable[nn.Module]] = lambda model: model.model.layers,
    steps: int = 1,
    optimized: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> dict[str, Turn]:
    """A turn for each way: whole training steps, the optimiser included, which is AdamW if none is given."""
    model = make()
    optimizer = optimized(model) if optimized else torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return {way: repeated(_step(in_way(make, model, way, layers), loss, optimizer), steps) for way in which}


def _step(run: Any, loss: Loss, optimizer: torch.optim.Optimizer) -> Turn:
    def step() -> None:
        loss(run).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # behind the step: contestants that wait hold no gradients

    return step


def next_token_loss(name: str, shape: Shape) -> Loss:
    """The loss that a model gives on random tokens, by its own code."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, shape.vocabulary, (shape.batch, shape.sequence + 1), generator=generator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if name in THEIRS:
        return lambda run: run(inputs, labels=labels, shift_labels=labels, use_cache=False).loss
    return lambda run: run(inputs, labels=labels).loss


def line_up(names: Iterable[str], shape: Shape, chosen: Iterable[str] | None = None) -> dict[str, Turn]:
    """Turns of all models in all their ways, or in those that are chosen."""
    turns: dict[str, Turn] = {}
    for name in names:
        which = [way for way in ways(name) if chosen is None or way in chosen]
        made = training(lambda name=name: build(name, shape), next_token_loss(name, shape), which, steps=shape.steps)  # type: ignore[misc]
        turns |= {f"{name}@{way}": turn for way, turn in made.items()}
    return turns


def every_topology() -> list[str]:
    """`pre`, then all others of the registry, the forms of `siamese` and AttnRes without groups."""
    others = [name for name in TOPOLOGIES if name != "pre"]
    return ["pre", *others, "siamese:form=hybrid_pre", "siamese:form=plain", "attnres:blocks=0"]
