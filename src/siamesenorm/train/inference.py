"""Using a trained model: the processes that share the work, the device of each, the precision of matrix products.

::

    with inference("cuda", "bf16") as place:
        model = place.ready(model)
        with place.autocast():
            for answer in place.each(batches, model): ...

Precision is training's own: autocast, so that norms, softmax and residual streams stay in float32 and figures are
those of a run's evaluation in the same precision. Matrices that only matrix products read are cast once, not in every
pass: the same numbers in half the memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from siamesenorm.errors import ConfigError
from siamesenorm.layers.linear import Linear
from siamesenorm.layers.moe import MoE
from siamesenorm.models.stack import Block
from siamesenorm.tasks.sharing import Sharing
from siamesenorm.train.checkpoint.state import model_tensors
from siamesenorm.train.config import ParallelConfig
from siamesenorm.train.distributed import CHANNEL_TIMEOUT, World
from siamesenorm.train.parallel import apply_parallelism
from siamesenorm.train.precision import DTYPES, autocast
from siamesenorm.train.tensor_layout import place, row_orders
from siamesenorm.train.torchrun import ProcessPlace
from siamesenorm.train.trained import Stored

Module = TypeVar("Module", bound=nn.Module)
Part = TypeVar("Part")
Result = TypeVar("Result")
Mode = Literal["fsdp", "tp"]
PRECISIONS = ("fp32", *DTYPES)


class Inference:
    """One process of a command that uses a model; alone where torchrun has started no others."""

    def __init__(self, world: World, precision: str = "fp32") -> None:
        self.world, self.device, self.dtype = world, world.device, DTYPES.get(precision)
        self.is_main, self.precision = world.is_main, precision
        self.sharing = Sharing(world.data_rank, world.data_size, world.gather_data)

    def ready(self, model: Module) -> Module:
        """The model on this process's device, in evaluation mode, its matrices in the precision asked for."""
        model = model.to(self.device).eval()
        if self.dtype is not None:
            cast_matrices(model, self.dtype)
        return model

    def spread(self, stored: Stored) -> nn.Module:
        """The model of a run with a part of its weights in every process, which are read one after the other."""
        gathered = self.dtype if self.dtype is torch.bfloat16 else None
        model = apply_parallelism(stored.model, self.world, dtype=gathered, seed=0)
        orders = dict(row_orders(model))
        for name, tensor in model_tensors(model).items():
            place(stored.weights.read(name).to(tensor.device, tensor.dtype), tensor, orders.get(name))
        return model.requires_grad_(False).eval()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around every use of a model."""
        return autocast(self.device.type, self.dtype)

    def each(self, parts: Iterable[Part], work: Callable[[Part], Result]) -> Iterator[Result]:
        """``work(part)`` under `autocast` for every part, shared among processes, in order and in all of them."""

        def computed(part: Part) -> Result:
            with self.autocast():
                return work(part)

        return self.sharing.each(parts, computed)


@contextlib.contextmanager
def inference(
    device: str | None = None, precision: str = "fp32", mode: Mode | None = None, group: int | None = None
) -> Iterator[Inference]:
    """The processes of a command, met and, at the end, left; all but the main one print nothing meanwhile.

    device: a device of torch; of several processes on a machine with GPUs each takes its own. Default: a GPU if any.
    mode: how `Inference.spread` spreads a model; default: every process has all of it. group: of how many processes.
    """
    if precision not in PRECISIONS:
        raise ConfigError.not_allowed("precision", precision, PRECISIONS)
    # Parts may take long, and who has less to do waits; a process that dies is noticed at once all the same.
    parallel = ParallelConfig(mode=mode or "ddp", group=group, timeout=CHANNEL_TIMEOUT)
    world = World.start(parallel, lambda process: find_device(device, process))
    with contextlib.ExitStack() as stack:
        stack.callback(world.close)
        if not world.is_main:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield Inference(world, precision)


def find_device(name: str | None, process: ProcessPlace) -> torch.device:
    """The device of a name, or the best there is, for one of a machine's processes."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if process.size > 1 and device.type != "cpu":
            if device.index is not None:
                raise ConfigError(f"device: {name!r} is one device for {process.size} processes; give {device.type}")
            device = torch.device(device.type, process.local_rank)
        torch.empty(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError):
        problem = f"{name!r} cannot be used here; it takes cpu, or cuda with a GPU"
        if process.local_size > 1:
            problem += " for each process of a machine"
        raise ConfigError(f"device: {problem}") from None
    return device


def cast_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Put the matrices of attention and FFN into a precision, which autocast would do again in every pass."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        for module in block.modules():
            if isinstance(module, Linear):
                module.to(dtype)
            elif isinstance(module, MoE):
                for name in module.hidden_matrices():
                    matrix = getattr(module, name)
                    matrix.data = matrix.data.to(dtype)
