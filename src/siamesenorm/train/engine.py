"""One training step, whatever is learnt: forward and backward in parts, clipping, the optimiser, averaged weights.

The engine holds what a step needs and what a checkpoint must bring back. What is done between steps (evaluation,
checkpoints, divergence, logs) is `siamesenorm.train.loop`'s.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from siamesenorm.data.batches import to_device
from siamesenorm.data.seeding import mixed
from siamesenorm.errors import ConfigError
from siamesenorm.residual.ramp import ramps_of
from siamesenorm.tasks import Task
from siamesenorm.tasks.base import Batch, Loss
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.checkpoint.manifest import ManifestEntry
from siamesenorm.train.checkpoint.state import AVERAGED
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.divergence import largest_gradient
from siamesenorm.train.ema import WeightAverage
from siamesenorm.train.init_from import Starting
from siamesenorm.train.micro_batch import MicroBatches
from siamesenorm.train.optimizer import build_optimizer, set_lr
from siamesenorm.train.parallel import apply_parallelism, clip_gradients
from siamesenorm.train.parallel.experts import idle_part
from siamesenorm.train.parallel.gradients import gradient_sync
from siamesenorm.train.parallel.parallelize import compile_pays
from siamesenorm.train.parallel.pipeline import Pipeline, check_pipeline
from siamesenorm.train.parallel.sequence import divides_tokens
from siamesenorm.train.parameters import choose_parameters, has_lora, start_factors
from siamesenorm.train.precision import Precision
from siamesenorm.train.schedule import lr_factor
from siamesenorm.train.tensor_layout import plain_name
from siamesenorm.train.weights import export_weights


class StepResult:
    """What forward and backward of one step gave, the same on every process.

    The numbers lie on the device until one of them is asked for; that waits for the device, once.
    step: its number. sample: where its batch begins. names, values: the task's metrics, then the gradient norm and
    the place of the largest gradient among the parameters (-1: not looked for).
    """

    def __init__(self, step: int, sample: int, names: Sequence[str], values: Tensor) -> None:
        self.step, self.sample, self.names, self.values = step, sample, tuple(names), values

    @cached_property
    def numbers(self) -> list[float]:
        """All values, read from the device."""
        return self.values.tolist()

    @property
    def metrics(self) -> dict[str, float]:
        """The task's numbers beside the loss."""
        return {name: value for name, value in zip(self.names, self.numbers, strict=False) if name != "loss"}

    @property
    def loss(self) -> float:
        """The mean over the whole batch."""
        return self.numbers[self.names.index("loss")]

    @property
    def grad_norm(self) -> float:
        """Of all gradients together, before they were clipped."""
        return self.numbers[-2]

    @property
    def largest(self) -> int | None:
        """Which parameter had the largest gradient, where that was looked for."""
        return int(self.numbers[-1]) if self.numbers[-1] >= 0 else None


class Engine:
    """Model, optimiser and data of a run, and how a step is made of them."""

    def __init__(self, config: RunConfig, task: Task, world: World, starting: Starting | None = None) -> None:
        self.config, self.task, self.world = config, task, world
        self.micro = MicroBatches(config, task, world)
        if world.pp > 1:
            check_pipeline(config, world, self.micro.size, self.micro.count)
        self.precision = Precision(config.train, world.device)
        model = world.agree(self._build_model)
        self.divides_tokens = world.tensor_size > 1 and divides_tokens(config, world.tensor_size)
        wish = config.train.compile
        self.compiled = compile_pays(world.device, config.steps) if wish is None else wish
        self.model: nn.Module = apply_parallelism(
            model,
            world,
            dtype=self.precision.gathered,
            seed=config.train.seed,
            compiled=self.compiled,
            schedule=config.parallel.schedule,
            stages=config.parallel.stages,
            sequence_parallel=self.divides_tokens if world.mode == "tp" else None,
            loss_parallel=config.parallel.loss_parallel,
        )
        start_factors(self.model, config.train.seed)
        if starting is not None:
            starting.put_into(self.model)
        self.ramps = ramps_of(self.model)
        self.average: WeightAverage | None = None
        world.agree(self._open)
        self.batch: Batch = {}
        self.ahead = runs_ahead(config, world.device)
        self.precision.open()
        self.halted = torch.zeros((), device=world.device)
        """1 behind a step whose loss or gradients were no numbers: on the device, and no step is taken from there."""

    def _build_model(self) -> nn.Module:
        """The model, before processes share it."""
        divided = self.world.divides_weights
        with torch.device("meta") if self.task.in_parts and divided else contextlib.nullcontext():
            model = self.task.build_model()
        self.flops_per_sample = self.task.flops_per_sample(model)
        self.trained = choose_parameters(model, self.config)
        if has_lora(self.config) and self.world.mode == "tp" and self.world.size > 1:
            raise ConfigError.not_allowed("parallel.mode", "tp", "ddp, fsdp or hsdp", when="with factors of LoRA")
        # backward computes gradients of all activations, but of trained weights alone
        self.flops_per_sample *= (2 + self.trained.share) / 3
        checkpoint_activations(model, self.config.train.activation_checkpointing, self.config.train.checkpointed_every)
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
        return self.config.optimizer.lr * lr_factor(self.config.schedule, step, self.config.steps)

    def compute(self, step: int) -> StepResult:
        """Take the next batch, make its gradients and clip them."""
        sample = self.loader.sample
        self.batch = self._next_batch()
        metrics = self.gradients(step)
        self.precision.unscale(self.optimizer)
        norm = clip_gradients(self.model, self.config.optimizer.clip or math.inf)
        means = self.world.mean_of(torch.stack([*metrics.values()]))
        largest = largest_gradient(self.model) if self.ahead else means.new_full((), -1)
        values = torch.cat([means, torch.stack([norm.to(means), largest.to(means)])])
        if self.ahead:
            fit = torch.isfinite(values[list(metrics).index("loss")]) & torch.isfinite(values[-2])
            self.halted = torch.maximum(self.halted, (~fit).to(self.halted))
        return StepResult(step, sample, tuple(metrics), values)

    def _next_batch(self) -> Batch:
        batch: Batch = next(self.loader)
        return batch if self.world.device.type == "cpu" else to_device(batch, self.world.device)

    def compute_again(self, computed: StepResult) -> None:
        """The gradients of an earlier step once more; the loader is behind its batch then."""
        if self.loader.sample != computed.sample + self.config.train.batch_size:
            self.loader.seek(computed.sample)
            self.batch = self._next_batch()
        self.gradients(computed.step)

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Forward and backward of the batch in its parts; means of the task's metrics."""
        self._seed(step)
        for ramp in self.ramps:
            ramp.set_step(step)
        if not self.model.training:
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        parts, rows = self.micro.split(self.batch)
        shares = self._shares(parts, rows)
        sums: dict[str, Tensor] = {}
        for loss, share in zip(self._losses(parts, rows, shares), shares, strict=True):
            for name, value in loss.metrics.items():
                scaled = value.to(torch.float32) * share
                sums[name] = sums[name] + scaled if name in sums else scaled
        return sums

    def _losses(self, parts: list[Batch], rows: list[int], shares: Sequence[float | Tensor]) -> Iterator[Loss]:
        """Losses of the parts, whose gradients are made on the way."""
        if isinstance(self.model, Pipeline):
            with self.precision.autocast():
                outputs = self.model.gradients(self.batch, shares, self.precision.scaled)
            for part, output in zip(parts, outputs, strict=True):
                yield self.task.loss(lambda *args, output=output, **kwargs: output, part)  # type: ignore[arg-type]
            return
        for number, (part, count, share) in enumerate(zip(parts, rows, shares, strict=True), start=1):
            counting = contextlib.nullcontext() if count else idle_part(self.model)
            with gradient_sync(self.model, number == len(parts)), counting:
                with self.precision.autocast():
                    loss = self.task.loss(self.model, part)
                self.precision.scaled(loss.total * share).backward()
            yield loss

    def apply(self, step: int) -> None:
        """The optimiser's step with the gradients as they are; none where it runs ahead and has halted."""
        set_lr(self.optimizer, self.lr(step))
        if self.ahead:
            self.optimizer.found_inf = self.halted  # type: ignore[attr-defined]  # what fused kernels look at
        self.precision.step(self.optimizer)
        if self.average is not None:
            self.average.update(step)

    def _shares(self, parts: list[Batch], rows: list[int]) -> Sequence[float | Tensor]:
        """What each part's mean counts, so that all together are the mean over the whole batch of all processes."""
        weights = [weight for part in parts if (weight := self.task.weight(part)) is not None]
        if not weights:
            return [count * self.world.data_size / self.config.train.batch_size for count in rows]
        counts = torch.stack([weight if count else weight * 0 for weight, count in zip(weights, rows, strict=True)])
        counts = counts.to(torch.float64)
        whole = self.world.mean_of(counts.sum())
        return (counts / whole.clamp(min=1e-9)).to(torch.float32).unbind()  # on the device: nobody waits for it

    def _seed(self, step: int) -> None:
        """What is random in a step depends on the seed, the step and the process: there is no state to save."""
        place = self.world.data_rank + self.world.stage * 2**48
        if self.divides_tokens:  # and drops what is its own
            place += self.world.tensor_rank * 2**56
        torch.manual_seed(mixed(self.config.train.seed, step * 2**16 + place))

    # Between steps ---------------------------------------------------------------------------------------

    def evaluate(self, final: bool = False) -> dict[str, float]:
        """The task's metrics on held-out data, which processes share; of averaged weights if there are any."""
        # What DDP wraps, by itself: its own forward would talk to processes that have other work to do.
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        averaged = contextlib.nullcontext() if self.average is None else self.average.applied()
        self.model.eval()
        try:
            with torch.no_grad(), self.precision.autocast(), averaged:
                return self.task.evaluate(model, self.world.ranks(final))
        finally:
            self.model.train()

    def state(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Everything a checkpoint holds; reading it back changes this engine in place."""
        progress = {**progress, "sample": self.loader.sample, "precision": self.precision.state()}
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "tensors": self._averaged(AVERAGED),
            "progress": progress,
        }

    def restored(self, progress: dict[str, Any]) -> None:
        """A checkpoint has been read into `state`: go on from there."""
        self.loader.seek(int(progress["sample"]))
        self.precision.load(progress.get("precision", {}))
        self.optimizer.zero_grad(set_to_none=True)
        self.halted.zero_()

    def _averaged(self, prefix: str = "") -> dict[str, Tensor]:
        if self.average is None:
            return {}
        return {prefix + plain_name(name): tensor for name, tensor in self.average.average.items()}

    def export(self, file: Path) -> ManifestEntry | None:
        """Weights, averaged ones if there are any, as one safetensors file; the main process gets its checksum."""
        return export_weights(self.model, file, self._averaged() or None, is_main=self.world.is_main)

    def close(self) -> None:
        """Stop reading ahead; give the process its own precision back."""
        self.loader.close()
        self.precision.close()


def runs_ahead(config: RunConfig, device: torch.device) -> bool:
    """Whether steps are begun before the numbers of those before them are read, so that a device never waits.

    A step whose loss or gradients are no numbers is then left out by the optimiser's fused kernel, with all behind it.
    Leaving out single steps (``skip``, the search for fp16's scale) takes their numbers first. On a CPU nothing is
    won by it.
    """
    decides = config.divergence.policy == "skip" or config.train.precision == "fp16"
    return device.type != "cpu" and config.optimizer.fused and not decides
