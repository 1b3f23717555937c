"""A model and its optimiser as named tensors, whatever they are wrapped or sharded in, and back again.

| name                          | tensor                                                                  |
|-------------------------------|-------------------------------------------------------------------------|
| ``model/NAME``                | a parameter or buffer                                                   |
| ``optimizer/NAME/exp_avg`` …  | the optimiser's state of a parameter                                    |
| ``tensors/NAME``              | whatever else the loop keeps: random states, averaged weights           |

Learning rates and other settings of the optimiser are not among them: they come from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from siamesenorm.models.stack import current_name
from siamesenorm.train.checkpoint.manifest import CheckpointError
from siamesenorm.train.parallel.pipeline import Pipeline
from siamesenorm.train.tensor_layout import plain_name, restore, row_orders, stored, template

TrainingState = Mapping[str, Any]
AVERAGED = "ema."
"""How the names of averaged weights in ``tensors`` begin; the parameter's name follows."""


class Staged:
    """Named tensors as they are now; whoever made it may change them at once.

    ::

        copies = Staged(tensors)       # waits for nothing
        ...                            # in another thread, while training goes on
        write(copies.arrived())

    From a GPU they are copied in the order of its work, so that the steps behind come too late to change them. They
    go into pinned memory, which PyTorch takes for a copy that is not waited for and keeps for the next one.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {
            name: tensor.detach().to("cpu", non_blocking=True, copy=True) for name, tensor in tensors.items()
        }
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        self._under_way = [torch.cuda.current_stream(device).record_event() for device in devices]

    def arrived(self) -> dict[str, Tensor]:
        """The copies, when they are complete."""
        for event in self._under_way:
            event.synchronize()
        return self._copies


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their plain names, sharing memory with the model."""
    return {plain_name(name): tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def all_names(model: nn.Module) -> set[str]:
    """Plain names of all parameters and buffers, also of those that only other stages of a pipeline have."""
    return set(model.division.sizes) if isinstance(model, Pipeline) else set(model_tensors(model))


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Plain names by parameter, as the optimiser knows them."""
    model.state_dict()  # FSDP puts sharded parameters back in place for this, and the optimiser holds those
    return {parameter: plain_name(name) for name, parameter in model.named_parameters()}


class _Orders:
    """Row orders by the names of this module's table."""

    def __init__(self, model: nn.Module | None) -> None:
        self.orders = {} if model is None else dict(row_orders(model))

    def of(self, name: str, tensor: Tensor) -> Tensor | None:
        order = self.orders.get(_parameter_of(name))
        return order if order is not None and tensor.dim() and tensor.shape[0] == len(order) else None


def flatten(state: TrainingState) -> dict[str, Tensor]:
    """Named tensors of ``{"model": …, "optimizer": …, "tensors": …}``, each part optional."""
    flat = _live(state)
    optimizer = state.get("optimizer")
    if optimizer is not None:
        for parameter, name in _optimized(state["model"], optimizer).items():
            for key, value in optimizer.state.get(parameter, {}).items():
                flat[f"optimizer/{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    orders = _Orders(state.get("model"))
    return {name: stored(tensor, orders.of(name, tensor)) for name, tensor in flat.items()}


def _parameter_of(name: str) -> str:
    """The parameter or buffer that a name of this module's table is of."""
    kind, _, rest = name.partition("/")
    if kind == "optimizer":
        return rest.rpartition("/")[0]
    return rest.removeprefix(AVERAGED) if kind == "tensors" else rest


class Restoring:
    """Places for the tensors of a checkpoint in a model, an optimiser and a dictionary of tensors.

    sizes: names and sizes of what the checkpoint has, old names too. `places` (by the checkpoint's names) is to be
    read into, then comes `done`.
    """

    def __init__(self, state: TrainingState, sizes: Mapping[str, torch.Size]) -> None:
        model = state.get("model")
        own = set() if model is None else all_names(model)  # a name that a model has is no old one of another
        names = {name if _parameter_of(name) in own else current_name(name): name for name in sizes}
        if len(names) < len(sizes):
            twice = [name for name in sizes if name not in names.values()]
            raise CheckpointError(f"the checkpoint has {_some(twice)} twice, under an old name and the present one")
        sizes = {name: sizes[old] for name, old in names.items()}
        self.state, self.targets, self.orders = state, _live(state), _Orders(state.get("model"))
        self.optimizer_state: dict[Tensor, dict[str, Tensor]] = {}
        if state.get("optimizer") is not None:
            self._add_optimizer(sizes)
        missing = [name for name in self.targets if name not in sizes and not name.startswith("tensors/")]
        if missing:
            raise CheckpointError(f"the checkpoint has no {_some(missing)}; it belongs to another model")
        self.targets = {name: tensor for name, tensor in self.targets.items() if name in sizes}
        for name, tensor in self.targets.items():
            if tensor.shape != sizes[name]:
                raise CheckpointError(
                    f"{name} has shape {tuple(sizes[name])} in the checkpoint instead of {tuple(tensor.shape)}; "
                    "it belongs to another model"
                )
        extra = [name for name in sizes if name.startswith("model/") and name.removeprefix("model/") not in own]
        if extra and state.get("model") is not None:
            raise CheckpointError(f"the model has no {_some(extra)}; the checkpoint belongs to another one")
        self.names = {name: names[name] for name in self.targets}
        self.places = {self.names[name]: template(t, self.orders.of(name, t)) for name, t in self.targets.items()}

    def _add_optimizer(self, sizes: Mapping[str, torch.Size]) -> None:
        optimizer: Optimizer = self.state["optimizer"]
        groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for parameter, name in _optimized(self.state["model"], optimizer).items():
            prefix = f"optimizer/{name}/"
            for key, size in ((n.removeprefix(prefix), s) for n, s in sizes.items() if n.startswith(prefix)):
                if size == parameter.shape and size:
                    value = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
                else:  # the number of steps; kernels that run on a device want it there
                    there = groups[parameter].get("fused") or groups[parameter].get("capturable")
                    device = parameter.device if there else torch.device("cpu")
                    value = torch.zeros(size, dtype=torch.float32, device=device)
                self.optimizer_state.setdefault(parameter, {})[key] = value
                self.targets[prefix + key] = value

    def done(self) -> None:
        """Everything has been read: put back what lies in another order, give the optimiser its state."""
        for name, tensor in self.targets.items():
            restore(self.places[self.names[name]], tensor, self.orders.of(name, tensor))
        if (optimizer := self.state.get("optimizer")) is not None:
            optimizer.state.clear()
            optimizer.state.update(self.optimizer_state)


def _live(state: TrainingState) -> dict[str, Tensor]:
    """The model's and the loop's own tensors."""
    flat: dict[str, Tensor] = {}
    if (model := state.get("model")) is not None:
        flat |= {f"model/{name}": tensor for name, tensor in model_tensors(model).items()}
    tensors: MutableMapping[str, Tensor] = state.get("tensors") or {}
    return flat | {f"tensors/{name}": tensor for name, tensor in tensors.items()}


def _optimized(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Names of the parameters that the optimiser updates."""
    names = parameter_names(model)
    return {parameter: names[parameter] for group in optimizer.param_groups for parameter in group["params"]}


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
