"""CompleteP (arXiv 2505.01618): a model that is wider or deeper than its base learns at its base's learning rate.

With m_N = dim / base_width, m_L = blocks / base_depth, against the standard parametrisation (alpha = 1)::

    | parameters                             | std        | learning rate | decay    | AdamW's eps     |
    |----------------------------------------|------------|---------------|----------|-----------------|
    | matrices of sublayers, AdamW           | m_N^-1/2   | m_N^-1        | m_N      | m_N^-1 m_L^-1   |
    | the same, Muon                         | m_N^-1/2   | m_N^-1/2      | m_N^1/2  |                 |
    | the same of queries, keys, values      | m_N^-1/2   | m_N^-1        | m_N      |                 |
    | others that sum over the width         | m_N^-1/2   | m_N^-1        | m_N      | m_N^-1 m_L^-1   |
    | gains and biases of branches           |            |               |          | m_N^-1 m_L^-1   |
    | what lies on the skip                  |            | m_L^-p        |          | m_N^-1          |
    | embedding, last norm, head             |            |               |          | m_N^-1          |

Every branch is multiplied by m_L^-1, and what the head reads by m_N^-1. Laws of depth that an initialiser or a topology
has, and laws of width of embedding and head, are read at the base. So a model of its base's size is the standard one.

A width grows by more heads, not by larger ones: then attention needs no factor. Muon's update has singular values that
grow with the root of a matrix' longer side; a change of m_N^-1/2 keeps what it does to a vector as it is, and for
queries, keys and values, whose matrices (one per head) grow in one direction only, it takes m_N^-1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from siamesenorm.models.stack_config import StackConfig


class Factors(NamedTuple):
    """What multiplies an optimiser's settings for a parameter."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


def base_width(config: StackConfig) -> int:
    """The width that laws of width are read at: the base's, or the model's own."""
    return config.base_width if config.parametrization == "completep" and config.base_width else config.dim


def base_depth(config: StackConfig) -> int:
    """The number of blocks that laws of depth are read at: the base's, or the model's own."""
    return config.base_depth if config.parametrization == "completep" and config.base_depth else config.blocks


def width_ratio(config: StackConfig) -> float:
    """m_N."""
    return config.dim / base_width(config)


def depth_ratio(config: StackConfig) -> float:
    """m_L."""
    return config.blocks / base_depth(config)


def parameter_factors(model: nn.Module, muon: Mapping[nn.Parameter, Any]) -> dict[nn.Parameter, Factors]:
    """Factors of all parameters of a model, of which Muon updates those of `muon`; none where all are 1."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "parametrization", "standard") == "standard":
        return {}
    wide, deep = width_ratio(config), depth_ratio(config)
    if wide == deep == 1:
        return {}
    named = dict(model.named_parameters())
    short = {named[name] for name in _declared(model, "short_matrices")}
    summed = {named[name] for name in _declared(model, "hidden_matrices")}
    summed |= {named[name] for name in _declared(model, "width_sums")}
    powers = {
        parameter: power
        for prefix, power in _powers(model).items()
        for name, parameter in named.items()
        if name == prefix or name.startswith(f"{prefix}.")
    }
    found: dict[nn.Parameter, Factors] = {}
    for name, parameter in named.items():
        by_width = 1.0
        if parameter in summed:
            by_width = wide**-0.5 if parameter in muon and parameter not in short else 1 / wide
        in_branch = name.startswith("blocks.") and parameter not in powers
        eps = 1 / (wide * deep) if in_branch else 1 / wide
        found[parameter] = Factors(by_width * deep ** -powers.get(parameter, 0.0), 1 / by_width, eps)
    return found


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, module in model.named_modules():
        yield f"{prefix}." if prefix else "", module


def _declared(model: nn.Module, method: str) -> set[str]:
    """Full names that modules give by a method of theirs."""
    return {
        f"{dot}{name}"
        for dot, module in _modules(model)
        if callable(names := getattr(module, method, None))
        for name in names()
    }


def _powers(model: nn.Module) -> dict[str, float]:
    return {
        f"{dot}{name}": power
        for dot, module in _modules(model)
        if callable(powers := getattr(module, "depth_powers", None))
        for name, power in powers().items()
    }
