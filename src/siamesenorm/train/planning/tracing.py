"""One training step on tensors that have shapes and no values: what lives when, what is computed, what is sent.

The model is the real one, and so are its sublayers, links, kernels' shapes, autocast and checkpointing; only the
numbers are missing. Every storage that a step makes is followed from its first operator to its last reference.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from siamesenorm.models.stack import Stack
from siamesenorm.residual.kernels.eager import planned_for
from siamesenorm.train.tensor_layout import local

StageKey = tuple[str, int]
"""``("forward", block)``, ``("head", 0)``, ``("backward", block)`` or ``("end", 0)``: where in a step."""
FORMS = {"aten::addmm_": torch.ops.aten.addmm, "aten::baddbmm_": torch.ops.aten.baddbmm}
"""Operators in place, as torch's FLOP counter knows them."""
SENT = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
}
"""Collectives, by how the names of torch's operators for them begin."""


@dataclass
class Moment:
    """The fullest moment of a stage, in bytes."""

    alive: int = 0
    """All that the step has made, gradients left out."""
    gradients: int = 0
    """Of weights, there by then."""
    casts: int = 0
    """Of what is alive: copies of blocks' weights in a lower precision."""

    @property
    def both(self) -> int:
        """Bytes of all."""
        return self.alive + self.gradients


@dataclass
class Trace:
    """What one step of one process did."""

    stages: dict[StageKey, Moment] = field(default_factory=dict)
    kept: int = 0
    """Bytes alive when forward is over: what backward needs."""
    gradients: int = 0
    """Bytes of all gradients of weights in the end."""
    flops: float = 0.0
    """Of matrix products and attention, a product and a sum being two."""
    traffic: float = 0.0
    """Bytes that all other operators read and write."""
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes that a process sends, by collective, in rings: (n - 1) / n of a gathered whole, twice that to sum it."""
    collectives: int = 0


class Ledger(TorchDispatchMode):
    """Storages that are alive, work and collectives of all operators inside."""

    def __init__(self) -> None:
        super().__init__()
        self.trace, self.stage = Trace(), ("forward", -1)
        self.alive = self.casts = 0
        self._sizes: dict[int, int] = {}
        self._weights: set[int] = set()
        self._casts: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it made."""
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):  # what it does with its parts comes here again
            return NotImplemented
        if operator is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1  # there is none to read, and any will do
        out = operator(*args, **kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        for tensor in outputs:
            self.follow(tensor)
        if operator is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._weights:
            key = out.untyped_storage()._cdata
            self._casts.add(key)
            self.casts += self._sizes[key]
        self._count(operator, args, kwargs, out, outputs)
        self.look()
        return out

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage until its last reference is gone."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = size = storage.nbytes()
            self.alive += size
            weakref.finalize(storage, self._gone, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Its size has changed without an operator."""
        if (key := storage._cdata) in self._sizes:
            self.alive += storage.nbytes() - self._sizes[key]
            self._sizes[key] = storage.nbytes()
            self.look()

    def _gone(self, key: int) -> None:
        size = self._sizes.pop(key)
        self.alive -= size
        if key in self._casts:
            self._casts.discard(key)
            self.casts -= size

    def look(self) -> None:
        """Compare this moment with the fullest one of its stage."""
        found = self.trace.stages.setdefault(self.stage, Moment())
        if self.alive + self.trace.gradients > found.both:
            found.alive, found.gradients, found.casts = self.alive, self.trace.gradients, self.casts

    def enter(self, name: str, block: int) -> None:
        """Another stage begins."""
        self.stage = (name, block)
        self.look()

    def accumulated(self, parameter: Tensor) -> None:
        """A weight has got its gradient, which is counted apart from now on."""
        assert parameter.grad is not None
        storage = local(parameter.grad).untyped_storage()
        size = self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = 0
        self.alive, self.trace.gradients = self.alive - size, self.trace.gradients + local(parameter.grad).nbytes
        parameter.grad = None
        self.look()

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """What is there before the step and behind it; views of it are no memory of the step's."""
        for tensor in tensors:
            self._sizes[local(tensor).untyped_storage()._cdata] = 0

    def know_weights(self, tensors: Iterable[Tensor]) -> None:
        """Blocks' weights, whose casts are counted apart."""
        self._weights |= {local(tensor).untyped_storage()._cdata for tensor in tensors}

    def _count(self, operator: Any, args: Any, kwargs: Any, out: Any, outputs: list[Tensor]) -> None:
        packet = FORMS.get(operator.name().partition(".")[0], operator._overloadpacket)
        if packet in flop_registry:
            self.trace.flops += flop_registry[packet](*args, **kwargs, out_val=out) * _seen(operator, args, kwargs)
        elif operator.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            self._count_sent(operator, args)
        elif not operator.is_view and outputs:
            given = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            self.trace.traffic += sum(t.nbytes for t in (*outputs, *given))

    def _count_sent(self, operator: Any, args: Any) -> None:
        name = operator.__name__.partition(".")[0].strip("_")
        kind = next((kind for begin, kind in SENT.items() if name.startswith(begin)), None)
        if kind is None:
            return
        size, tensors = group_size(args), [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        whole = max((t.nbytes for t in tensors), default=0)
        if kind == "all_reduce":
            whole = sum(t.nbytes for t in tensors)
        elif kind == "all_gather" and operator.namespace == "_c10d_functional":
            whole *= size  # it is given a part
        share = 1.0 if kind == "send" else (size - 1) / size * (2 if kind == "all_reduce" else 1)
        self.trace.sent[kind] = self.trace.sent.get(kind, 0.0) + whole * share
        self.trace.collectives += 1


def _seen(operator: Any, args: Any, kwargs: Any) -> float:
    """The share of attention's pairs that is computed: half where it is causal."""
    if "scaled_dot_product" not in operator.__name__:
        return 1.0
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return 0.5 if given.get("is_causal") else 1.0


def group_size(args: Any) -> int:
    """Processes of a collective's group: an object, or a name."""
    for value in tree_leaves(args):
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(Exception):
                return int(dist.ProcessGroup.unbox(value).size())
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

            return int(_resolve_process_group(value).size())  # type: ignore[arg-type]  # a type that torch 2.8 has not
    return 1


@contextlib.contextmanager
def shapes_alone(device: str) -> Iterator[None]:
    """Tensors made inside have no values; operators are those that ``device`` (``cpu`` or ``cuda``) runs."""
    with planned_for(device, FakeTensor), FakeTensorMode(allow_non_fake_inputs=True):
        yield


def trace_step(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], autocast: contextlib.AbstractContextManager[Any]
) -> Trace:
    """Forward and backward of a model inside of `shapes_alone`; weights themselves are not counted.

    loss: from the model to what is differentiated; it makes its own batch.
    """
    ledger = Ledger()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_resizes_seen(ledger))
        if isinstance(model, Stack):
            stack.enter_context(_stages(model, ledger))
        hooks = [
            p.register_post_accumulate_grad_hook(ledger.accumulated) for p in model.parameters() if p.requires_grad
        ]
        stack.callback(lambda: [hook.remove() for hook in hooks])
        ledger.leave_out([*model.parameters(), *model.buffers()])
        if isinstance(model, Stack):
            ledger.know_weights(model.blocks.parameters())
        stack.enter_context(ledger)
        with autocast:
            total = loss(model)
        ledger.trace.kept = ledger.alive
        ledger.enter("backward", len(getattr(model, "blocks", ())))
        total.backward()
        del total
        ledger.enter("end", 0)
    return ledger.trace


@contextlib.contextmanager
def _resizes_seen(ledger: Ledger) -> Iterator[None]:
    """Sharding frees and fills gathered weights by resizing storages, which is no operator."""
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        ledger.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]


@contextlib.contextmanager
def _stages(model: Stack[Any], ledger: Ledger) -> Iterator[None]:
    """Tell the ledger where the pass is: by the runner of blocks on the way there, by gradients on the way back."""
    inner, numbers = model.run, {id(block): number for number, block in enumerate(model.blocks)}

    def run(block: Any, streams: Any, context: Any) -> Any:
        number = numbers[id(block)]
        ledger.enter("forward", number)
        result = inner(block, streams, context)
        for tensor in tree_leaves(result[0]):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: ledger.enter("backward", number) if _later(number) else None)
        if number == len(numbers) - 1:
            ledger.enter("head", 0)
        return result

    def _later(number: int) -> bool:
        """Streams that later blocks read too get gradients early; a stage begins once."""
        name, now = ledger.stage
        return name == "backward" and number < now

    model.run = run
    try:
        yield
    finally:
        model.run = inner
