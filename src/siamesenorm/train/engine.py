"""One training step, whatever is learnt: forward and backward in parts, clipping, the optimiser, averaged weights.

The engine holds what a step needs and what a checkpoint must bring back. What is done between steps (evaluation,
checkpoints, divergence, logs) is `siamesenorm.train.loop`'s.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.residual import Topology
from siamesenorm.tasks import Task
from siamesenorm.tasks.base import Batch
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.checkpoint import export_weights
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.ema import WeightAverage
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.layout import plain_name
from siamesenorm.train.manifest import Entry
from siamesenorm.train.optimizer import build_optimizer, set_lr
from siamesenorm.train.parallel import apply_parallelism, clip_gradients, compile_pays, gradient_sync
from siamesenorm.train.precision import Precision
from siamesenorm.train.schedule import share_of_peak

MIXER = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Step:
    """What forward and backward of one step gave, the same on every process."""

    loss: float
    grad_norm: float
    metrics: dict[str, float] = field(default_factory=dict)
    """The task's others."""


class Engine:
    """Model, optimiser and data of a run, and how a step is made of them."""

    def __init__(self, config: RunConfig, task: Task, world: World) -> None:
        self.config, self.task, self.world = config, task, world
        parts = world.data_size * config.train.accumulation
        if config.train.batch_size % parts:
            raise ConfigError(
                f"train.batch_size: {config.train.batch_size} is not allowed; {world.data_size} processes and "
                f"{config.train.accumulation} accumulated parts take multiples of {parts}"
            )
        self.precision = Precision(config.train, world.device)
        model = world.agree(self._build_model)
        wish = config.train.compile
        self.compiled = compile_pays(world.device, config.steps) if wish is None else wish
        self.model: nn.Module = apply_parallelism(
            model, world, dtype=self.precision.gathered, seed=config.train.seed, compiled=self.compiled
        )
        self.ramps = [m for m in self.model.modules() if isinstance(m, Topology) and m.options.prores]
        self.average: WeightAverage | None = None
        world.agree(self._open)
        self.batch: Batch = {}

    def _build_model(self) -> nn.Module:
        """The model, before processes share it."""
        divided = self.world.divides_weights
        with torch.device("meta") if self.task.in_parts and divided else contextlib.nullcontext():
            model = self.task.build_model()
        checkpoint_activations(model, self.config.train.activation_checkpointing)
        self.flops_per_sample = self.task.flops_per_sample(model)
        return model if divided else model.to(self.world.device)

    def _open(self) -> None:
        """What this process has for itself: the optimiser and averages of its weights, its part of the data."""
        config, world = self.config, self.world
        self.optimizer = build_optimizer(self.model, config.optimizer)
        if config.train.ema is not None:
            self.average = WeightAverage(self.model, config.train.ema, warmup=config.train.ema_warmup)
        self.loader = self.task.loader(
            rank=world.data_rank,
            world_size=world.data_size,
            sample=0,
            pin_memory=world.device.type == "cuda",
        )

    # A step ----------------------------------------------------------------------------------------------

    def lr(self, step: int) -> float:
        """The learning rate of a 1-based step."""
        return self.config.optimizer.lr * share_of_peak(self.config.schedule, step, self.config.steps)

    def compute(self, step: int) -> Step:
        """Take the next batch, make its gradients and clip them."""
        self.batch = self._to_device(next(self.loader))
        metrics = self.gradients(step)
        self.precision.unscale(self.optimizer)
        norm = clip_gradients(self.model, self.config.optimizer.clip or math.inf)
        values = torch.stack([*metrics.values(), norm.to(torch.float32)]).tolist()  # one wait for the device
        *means, grad_norm = values
        named = self.world.mean(dict(zip(metrics, means, strict=True)))
        return Step(named.pop("loss"), grad_norm, named)

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Forward and backward of the batch in its parts; means of the task's metrics."""
        self._seed(step)
        for residual in self.ramps:
            residual.set_step(step)
        if not self.model.training:
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts = split_batch(self.batch, self.config.train.accumulation)
        shares = self._shares(parts)
        sums: dict[str, Tensor] = {}
        for number, (part, share) in enumerate(zip(parts, shares, strict=True), start=1):
            with gradient_sync(self.model, number == len(parts)):
                with self.precision.autocast():
                    loss = self.task.loss(self.model, part)
                self.precision.backward(loss.total if share == 1 else loss.total * share)
            for name, value in loss.metrics.items():
                scaled = value.to(torch.float32) * share
                sums[name] = sums[name] + scaled if name in sums else scaled
        return sums

    def apply(self, step: int) -> None:
        """The optimiser's step with the gradients as they are."""
        set_lr(self.optimizer, self.lr(step))
        self.precision.step(self.optimizer)
        if self.average is not None:
            self.average.update(step)

    def _shares(self, parts: list[Batch]) -> list[float]:
        """What each part's mean counts, so that all together are the mean over the whole batch of all processes."""
        weights = [self.task.weight(part) for part in parts]
        if weights[0] is None:
            return [1 / len(parts)] * len(parts)
        counts = [weight or 0.0 for weight in weights]
        whole = self.world.mean({"weight": sum(counts)})["weight"]
        return [count / max(whole, 1e-9) for count in counts]

    def _seed(self, step: int) -> None:
        """What is random in a step depends on the seed, the step and the process: there is no state to save."""
        mixed = (self.config.train.seed * MIXER + step * 2**16 + self.world.data_rank) % 2**63
        torch.manual_seed(mixed)

    def _to_device(self, batch: Batch) -> Batch:
        if self.world.device.type == "cpu":
            return batch
        return {name: values.to(self.world.device, non_blocking=True) for name, values in batch.items()}

    # Between steps ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _evaluating(self) -> Any:
        """Averaged weights if there are any, no dropout, no gradients."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.precision.autocast())
            if self.average is not None:
                stack.enter_context(self.average.applied())
            self.model.eval()
            try:
                yield
            finally:
                self.model.train()

    def evaluate(self, final: bool = False) -> dict[str, float]:
        """The task's metrics on held-out data."""
        world = self.world
        with self._evaluating():
            return self.task.evaluate(
                self.model, rank=world.data_rank, world_size=world.data_size, average=world.mean, final=final
            )

    def state(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Everything a checkpoint holds; reading it back changes this engine in place."""
        progress = {**progress, "sample": self.loader.sample, "precision": self.precision.state()}
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "tensors": self._averaged("ema."),
            "progress": progress,
        }

    def restored(self, progress: dict[str, Any]) -> None:
        """A checkpoint has been read into `state`: go on from there."""
        self.loader.seek(int(progress["sample"]))
        self.precision.load(progress.get("precision", {}))
        self.optimizer.zero_grad(set_to_none=True)

    def _averaged(self, prefix: str = "") -> dict[str, Tensor]:
        if self.average is None:
            return {}
        return {prefix + plain_name(name): tensor for name, tensor in self.average.average.items()}

    def export(self, file: Path) -> Entry | None:
        """Weights, averaged ones if there are any, as one safetensors file; the main process gets its checksum."""
        return export_weights(self.model, file, self._averaged() or None, is_main=self.world.is_main)

    def close(self) -> None:
        """Stop reading ahead."""
        self.loader.close()


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """A batch in equal parts by rows."""
    if parts == 1:
        return [batch]
    pieces = {name: values.chunk(parts) for name, values in batch.items()}
    return [{name: values[number] for name, values in pieces.items()} for number in range(parts)]
