"""Which parameters a run trains: all, the topology's own, norms, factors of LoRA, or those that patterns name.

``train.parameters`` is one of these words or several with a plus between them: ``lora+residual``. All others are
frozen: they have no gradients and no optimiser state, and their weights are the same at the end.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from siamesenorm.errors import ConfigError
from siamesenorm.layers.linear import Linear
from siamesenorm.layers.lora import LoraLinear, is_factor
from siamesenorm.models.stack import Stack
from siamesenorm.residual.norms import Norm
from siamesenorm.train.checkpoint.state import model_tensors
from siamesenorm.train.config import LoraConfig, RunConfig
from siamesenorm.train.tensor_layout import place, plain_name, unwrap

FIELD = "train.parameters"
SHOWN = 4
"""Names that an error gives as examples."""


@dataclass(frozen=True)
class TrainedShare:
    """How much of a model is trained."""

    trained: int
    of: int

    @property
    def share(self) -> float:
        """0 to 1; factors of LoRA count as trained and not as the model's."""
        return min(1.0, self.trained / max(1, self.of))

    def sentence(self, parameters: str) -> str:
        """In words."""
        return f"trains {parameters}: {self.trained:,} parameters, {self.share:.2%} of the model's {self.of:,}"


def terms_of(parameters: str) -> list[str]:
    """``lora+residual`` in parts."""
    return [term.strip() for term in parameters.split("+")]


def has_lora(config: RunConfig) -> bool:
    """Whether a run trains factors of LoRA."""
    return "lora" in terms_of(config.train.parameters)


def choose_parameters(model: nn.Module, config: RunConfig) -> TrainedShare:
    """Freeze what a run does not train and put factors where it trains them; before the model is spread or compiled."""
    terms, whole = terms_of(config.train.parameters), sum(p.numel() for p in model.parameters())
    if terms == ["all"]:
        return TrainedShare(whole, whole)
    if "lora" in terms:
        put_factors(model, config.lora)
    chosen: set[str] = set()
    for term in terms:
        names = WORDS[term](model) if term in WORDS else _matching(model, term)
        if not names:
            raise ConfigError.refused(FIELD, term, f"{type(model).__name__} has no such parameters")
        chosen |= names
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    if config.train.init_vocab == "resize" and not {"embedding.weight"} <= chosen:
        raise ConfigError.refused(
            "train.init_vocab",
            "resize",
            "add embedding.weight to it, as in lora+embedding.weight",
            f"with {FIELD} = {config.train.parameters!r}, which does not train new rows",
        )
    return TrainedShare(sum(p.numel() for p in model.parameters() if p.requires_grad), whole)


def share_of(config: RunConfig, make: Callable[[RunConfig], nn.Module]) -> float:
    """What share of its parameters a run trains, without making its model."""
    if terms_of(config.train.parameters) == ["all"]:
        return 1.0
    with torch.device("meta"):
        return choose_parameters(make(config), config).share


def put_factors(model: nn.Module, lora: LoraConfig) -> None:
    """Factors around the linear layers that the targets name."""
    layers = {name: module for name, module in model.named_modules() if type(module) in (Linear, nn.Linear)}
    for target in lora.targets:
        names = [name for name in layers if fnmatch.fnmatchcase(name, target) or name.rpartition(".")[2] == target]
        if not names:
            known = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            raise ConfigError(
                f"lora.targets: {target!r} is no linear layer of {type(model).__name__}; it has {', '.join(known)}"
            )
        for name in names:
            layer, (parent, _, own) = layers[name], name.rpartition(".")
            most = min(layer.in_features, layer.out_features)
            if lora.rank > most:
                shape = f"{layer.out_features} × {layer.in_features}"
                raise ConfigError.refused("lora.rank", lora.rank, f"{name} is {shape}, it takes up to {most}")
            setattr(model.get_submodule(parent), own, LoraLinear(layer, lora.rank, lora.alpha))


@torch.no_grad()
def start_factors(model: nn.Module, seed: int) -> None:
    """First values of the factors of a model, however it is spread over processes."""
    tensors = None
    for name, module in unwrap(model).named_modules():
        if isinstance(module, LoraLinear):
            tensors = model_tensors(model) if tensors is None else tensors
            plain = plain_name(name)
            for own, value in module.first_factors(seed, plain).items():
                tensor = tensors[f"{plain}.{own}"]
                place(value.to(tensor.device, tensor.dtype), tensor, None)


def _factors(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters() if is_factor(name)}


def _residual(model: nn.Module) -> set[str]:
    """The topology's own: how streams begin and end, and the blocks' links with their gates and norms."""
    return {*model.residual_parameters()} if isinstance(model, Stack) else set()


def _norms(model: nn.Module) -> set[str]:
    """Of every norm, the topology's and those inside sublayers."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, (Norm, nn.LayerNorm))
        for name, _ in module.named_parameters()
    }


def _matching(model: nn.Module, pattern: str) -> set[str]:
    names = [name for name, _ in model.named_parameters() if not is_factor(name)]
    found = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
    if not found:
        raise ConfigError.not_allowed(
            FIELD,
            pattern,
            f"all, {', '.join(WORDS)}, or a pattern that fits names of parameters such as {', '.join(names[:SHOWN])}",
        )
    return found


WORDS: dict[str, Callable[[nn.Module], set[str]]] = {"lora": _factors, "residual": _residual, "norms": _norms}
