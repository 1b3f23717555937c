"""Pipeline parallelism of a language model: every group of processes has some of the blocks.

Stages and schedules are those of `torch.distributed.pipelining`. What travels between two stages is what the topology
carries at that depth, one tensor per stream, however many these are; shapes are computed without memory (``meta``).
The first stage has the embedding, the last the topology's end, the head and the loss. Every process reads the batch
of its part, so that positions, masks and labels need not travel.

All names of parameters are those of the whole model: checkpoints know nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils import _pytree as pytree

from siamesenorm.errors import ConfigError
from siamesenorm.layers.moe import RouterStats
from siamesenorm.models.lm import LanguageModel, LMOutput
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.parallel.boundaries import Boundaries, used_by_open
from siamesenorm.train.parallel.sequence import TokenPlacement
from siamesenorm.train.tensor_layout import STAGES

INTERLEAVED = "interleaved_1f1b"
SINGLE: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
LOSSES = 5
"""What the last stage tells of a micro-batch: loss, cross-entropy, balance loss, z-loss, entropy of routers."""


class Division:
    """Which stage has what of a model, and which stages are this process's."""

    def __init__(self, model: nn.Module, world: World, schedule: str = "1f1b", stages: int = 1) -> None:
        if not isinstance(model, LanguageModel):
            kind = type(model).__name__
            raise ConfigError.refused("parallel.pp", world.pp, "pipelines take language models", when=f"for {kind}")
        if model.config.tied:
            ends = "the first stage has the embedding and the last one the head"
            raise ConfigError.refused("parallel.pp", world.pp, ends, "with model.tied = true")
        self.model, self.world, self.schedule = model, world, schedule
        self.count = world.pp * (stages if schedule == INTERLEAVED else 1)
        if model.config.blocks < self.count:
            few = f"{self.count} stages take as many blocks, model.blocks = {model.config.blocks}"
            raise ConfigError.refused("parallel.pp", world.pp, few)
        self.blocks = divided(model.config.blocks, self.count)
        self.own = range(world.stage, self.count, world.pp)
        self.boundaries = Boundaries(model)
        self.opening = used_by_open(self.boundaries.residual, self.boundaries.dtype)
        self.sizes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
        self.tokens: TokenPlacement | None = None
        """How those of a pass are divided within a stage."""

    def stage_of(self, name: str) -> int:
        """The stage that has a parameter or buffer."""
        kind, _, rest = name.partition(".")
        if kind == "blocks":
            number = int(rest.partition(".")[0])
            return next(n for n, blocks in enumerate(self.blocks) if number in blocks)
        return 0 if kind in ("embedding", "positions") or rest in self.opening else self.count - 1

    def has(self, part: nn.Module) -> bool:
        """Whether something of a part of the model is this process's."""
        names = [name for name, module in self.model.named_modules() if module is part]
        inside = [name for name in self.sizes if any(name.startswith(f"{prefix}.") for prefix in names)]
        return any(self.stage_of(name) in self.own for name in inside)

    def finish(self, wrap: Callable[[nn.Module], object]) -> Pipeline:
        """The pipeline, when the parts of this process are ready; `wrap` spreads what a stage has beside its blocks."""
        model = self.model
        blocks = {number: model.blocks[number] for n in self.own for number in self.blocks[n]}
        model.blocks = nn.ModuleDict({str(number): block for number, block in blocks.items()})  # type: ignore[assignment]
        for name in [name for name, _ in model.named_parameters() if self.stage_of(name) not in self.own]:
            forget(model, name)
        ends = {n: (n == 0, n == self.count - 1) for n in self.own}
        stages = {n: Stage(model, self.blocks[n], *ends[n], self.tokens) for n in self.own}
        for stage in stages.values():
            wrap(stage)
        return Pipeline(self, stages)


def divided(blocks: int, stages: int) -> list[range]:
    """Blocks of every stage; the first ones have one more where it does not come out even."""
    few, more = divmod(blocks, stages)
    ends = [few * n + min(n, more) for n in range(stages + 1)]
    return [range(*part) for part in pairwise(ends)]


def forget(model: nn.Module, name: str) -> None:
    """Take a parameter out of a model."""
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, None)


class Stage(nn.Module):
    """Some blocks; with the embedding if it is the first, with the end and the loss if it is the last."""

    model: LanguageModel
    layout: Any
    """How streams that arrive are nested."""

    def __init__(
        self, model: LanguageModel, numbers: range, first: bool, last: bool, tokens: TokenPlacement | None = None
    ) -> None:
        super().__init__()
        self.first, self.last, self.tokens = first, last, tokens
        object.__setattr__(self, "model", model)  # no child: it has what other stages have, too
        self.blocks = nn.ModuleDict({str(number): model.blocks[str(number)] for number in numbers})  # type: ignore[call-overload]
        if first:
            self.embedding, self.positions = model.embedding, model.positions
        if first or last:
            self.residual = model.residual
        if last:
            self.head = model.head

    def forward(self, *arrived: Tensor, input_ids: Tensor, labels: Tensor, **rest: Any) -> Any:
        """The streams behind the stage, and sums over the routers so far; or the losses."""
        model = self.model
        context, places = model.context_and_positions(input_ids, **rest)
        if self.tokens is not None:
            self.tokens.begin(input_ids.shape[1])
        if self.first:
            x = model.embed(input_ids, places)
            streams, routers = model.residual.open(x), x.new_zeros(3)
        else:
            streams = pytree.tree_unflatten(list(arrived[:-1]), self.layout)
            routers = arrived[-1]
        for block in self.blocks.values():
            streams, reported = model.run(block, streams, context)  # type: ignore[arg-type]
            for stats in reported:
                parts = (stats.balance_loss, stats.z_loss, stats.router_entropy)
                routers = routers + torch.stack(parts).to(routers.dtype)
        if not self.last:
            leaves = pytree.tree_leaves(streams)
            return tuple(leaf.to(routers.dtype).contiguous() for leaf in (*leaves, routers))
        means = (routers / model.config.blocks).unbind()
        experts = () if model.config.moe is None else (RouterStats(means[0], means[1], routers.new_zeros(0), means[2]),)
        output = LMOutput(model.residual.close(streams), experts=experts)
        model.add_loss(output, labels)
        assert output.loss is not None
        assert output.cross_entropy is not None
        return torch.stack([output.loss, output.cross_entropy, *means]).unsqueeze(0)


class Pipeline(nn.Module):
    """A process's part of a pipeline: its stages, and the schedules that they run in."""

    def __init__(self, division: Division, stages: Mapping[int, Stage]) -> None:
        super().__init__()
        self.division, self.world = division, division.world
        setattr(self, STAGES, nn.ModuleDict({str(n): stage for n, stage in stages.items()}))
        mesh = self.world.meshes.stages
        assert mesh is not None
        self.group: dist.ProcessGroup = mesh.get_group()
        self.last = dist.get_global_rank(self.group, (division.count - 1) % self.world.pp)
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._scaled: Callable[[Tensor], Tensor] = lambda loss: loss

    def train(self, mode: bool = True) -> Pipeline:
        """The model's own modules too, which no stage may have."""
        self.division.model.train(mode)
        return super().train(mode)

    def forward(self, input_ids: Tensor, **batch: Tensor) -> LMOutput:
        """The loss of a batch, without gradients, the same in every stage."""
        if batch.get("labels") is None:
            raise ConfigError("parallel.pp: a pipeline gives losses only; it takes labels")
        with torch.no_grad():
            return output_of(self._run({"input_ids": input_ids, **batch}, 1, training=False)[0], self.division.model)

    def gradients(
        self, batch: Mapping[str, Tensor], shares: Sequence[float | Tensor], scaled: Callable[[Tensor], Tensor]
    ) -> list[LMOutput]:
        """Forward and backward of a batch in micro-batches, one for each share that its loss counts.

        scaled: what else is done to a loss before backward. Returns each micro-batch's losses, in every stage.
        """
        self._scaled = scaled
        target = torch.stack([torch.as_tensor(share, device=self.world.device) for share in shares])
        values = self._run(batch, len(shares), training=True, target=target)
        return [output_of(row, self.division.model) for row in values]

    def _run(self, batch: Mapping[str, Tensor], parts: int, training: bool, target: Tensor | None = None) -> Tensor:
        rows, tokens = batch["input_ids"].shape
        schedule = self._schedule(rows // parts, tokens, parts, training)
        found = schedule.step(target=target, **batch)
        values = torch.zeros(parts, LOSSES, dtype=torch.float64, device=self.world.device)
        if found is not None:
            values.copy_(found.detach())
        dist.broadcast(values, self.last, self.group)
        return values

    def _loss(self, output: Tensor, share: Tensor) -> Tensor:
        return self._scaled(output[0, 0] * share[0].to(output.dtype))

    def _schedule(self, rows: int, tokens: int, parts: int, training: bool) -> Any:
        key = (rows, tokens, parts, training)
        if key not in self._schedules:
            division = self.division
            stages: list[Any] = [self._stage(n, rows, tokens) for n in division.own]
            options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False} if training else {}
            if len(stages) > 1:
                self._schedules[key] = ScheduleInterleaved1F1B(stages, parts, **options)
            else:
                kind = SINGLE[division.schedule if training else "gpipe"]
                self._schedules[key] = kind(stages[0], parts, **options)
        return self._schedules[key]

    def _stage(self, number: int, rows: int, tokens: int) -> PipelineStage:
        """A stage of torch's for micro-batches of one shape."""
        division, stage = self.division, getattr(self, STAGES)[str(number)]
        blocks = division.blocks[number]
        if division.tokens is not None:
            tokens //= division.tokens.parts_of(tokens)
        arriving, stage.layout = division.boundaries.at(blocks.start, rows, tokens)
        leaving, _ = division.boundaries.at(blocks.stop, rows, tokens)
        return PipelineStage(
            stage,
            number,
            division.count,
            self.world.device,
            input_args=() if stage.first else arriving,
            output_args=torch.empty(1, LOSSES, device="meta") if stage.last else leaving,
            group=self.group,
        )

    def everywhere(self, name: str, tensor: Tensor | None) -> Tensor:
        """A whole tensor of the stage that has it, in every stage; all processes call this in one order."""
        shape, dtype = self.division.sizes[name]
        whole = torch.empty(shape, dtype=dtype, device=self.world.device) if tensor is None else tensor.contiguous()
        source = dist.get_global_rank(self.group, self.division.stage_of(name) % self.world.pp)
        dist.broadcast(whole, source, self.group)
        return whole


def output_of(values: Tensor, model: LanguageModel) -> LMOutput:
    """What a pass without a pipeline would have said of its losses."""
    loss, cross_entropy, balance, z, entropy = values.unbind()
    experts = () if model.config.moe is None else (RouterStats(balance, z, values.new_zeros(0), entropy),)
    return LMOutput(values.new_empty(0), loss=loss, experts=experts, cross_entropy=cross_entropy)


def check_pipeline(config: RunConfig, world: World, size: int, count: int) -> None:
    """Raise where a run asks for what pipelines do not have; nothing is made yet.

    size, count: of the micro-batches of a process.
    """
    pp, schedule, batch = world.pp, config.parallel.schedule, config.train.batch_size
    if config.train.parameters != "all":
        raise ConfigError.not_allowed(
            "parallel.pp", pp, "all", when=f"with train.parameters = {config.train.parameters!r}"
        )
    if config.train.precision == "fp16":
        why = "only the last stage knows the loss and its scale; a pipeline takes fp32 or bf16"
        raise ConfigError.refused("train.precision", "fp16", why, f"with parallel.pp = {pp}")
    for name in ("arithmetic", "lm_eval"):
        if getattr(config.evaluation, name, None):
            raise ConfigError.refused("parallel.pp", pp, "a pipeline gives losses only", when=f"with evaluation.{name}")
    if batch != size * count * world.data_size:
        why = (
            f"micro-batches of a pipeline are equal, and {batch} samples on {world.data_size} processes of a stage "
            f"are no multiple"
        )
    elif takes(schedule, pp, count):
        return
    elif schedule == "1f1b":
        why = f"1f1b takes {pp} micro-batches or more of the {size * count} samples that a process has"
    else:
        why = f"it makes {count} micro-batches, and {schedule} takes multiples of {count // pp}"
    raise ConfigError.refused("train.micro_batch_size", size, why, f"with parallel.pp = {pp}")


def takes(schedule: str, pp: int, count: int) -> bool:
    """Whether a schedule of so many groups of processes takes so many micro-batches."""
    if schedule == "1f1b":
        return count >= pp
    return schedule != INTERLEAVED or count % max(1, count // pp) == 0
