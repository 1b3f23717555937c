"""Other people's names for our parameters: loading under them, and giving weights back under them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from siamesenorm.errors import OfficialError

Model = TypeVar("Model", bound=nn.Module)
Renaming = dict[str, str]
"""Our names of parameters and fixed tensors to theirs, one to one."""


def rename(name: str, modules: Mapping[str, str]) -> str:
    """Their name of a parameter, from names of modules (or of a parameter that is no module's)."""
    if name in modules:
        return modules[name]
    module, _, leaf = name.rpartition(".")
    if module not in modules:
        raise OfficialError(f"{name}: no official model has this parameter")
    return f"{modules[module]}.{leaf}"


def load_renamed(model: Model, names: Renaming, state: Mapping[str, Tensor]) -> Model:
    """Give a model from the meta device copies of `state`'s tensors; what does not fit raises with its names."""
    expected = model.state_dict()
    _complain("not a tensor", [name for name, value in state.items() if not isinstance(value, Tensor)])
    check_keys(names.values(), state)
    _complain(
        "wrong shape",
        [
            f"{theirs} {tuple(state[theirs].shape)} instead of {tuple(expected[ours].shape)}"
            for ours, theirs in names.items()
            if state[theirs].shape != expected[ours].shape
        ],
    )
    model.load_state_dict({ours: state[theirs].detach().clone() for ours, theirs in names.items()}, assign=True)
    return model.requires_grad_(True)


def give_renamed(model: nn.Module, names: Renaming, *, grads: bool = False) -> dict[str, Tensor]:
    """The model's weights, or their gradients, under their names."""
    if grads:
        parameters = {names[ours]: parameter for ours, parameter in model.named_parameters()}
        return {theirs: p.grad for theirs, p in parameters.items() if p.grad is not None}
    tensors = model.state_dict()
    return {theirs: tensors[ours].detach() for ours, theirs in names.items()}


def check_keys(expected: Iterable[str], given: Iterable[str]) -> None:
    """Raise where a state dict lacks keys, or has others, with their names."""
    wanted, found = set(expected), set(given)
    _complain("missing", sorted(wanted - found))
    _complain("unknown", sorted(found - wanted))


def _complain(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
        raise OfficialError(f"state dict: {what}: {', '.join(listed[:10])}{more}")
