"""A plan: the layouts of a run that fit into so many GPUs, the fastest first, and the command for the best."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from siamesenorm.errors import ConfigError
from siamesenorm.train.config import RunConfig
from siamesenorm.train.planning.hardware import GPU, Assumptions, gib
from siamesenorm.train.planning.layouts import Layout, given_layout, possible_layouts
from siamesenorm.train.planning.needs import Need, at_depth, need_of, parts_of
from siamesenorm.train.planning.refusals import problem_of
from siamesenorm.train.planning.stages import AtDepth
from siamesenorm.train.planning.timing import Sent, StepTime, sent_by, step_time, work_of

MOST_GPUS = 4096


@dataclass(frozen=True)
class LayoutChoice:
    """A layout and what it comes to."""

    layout: Layout
    need: Need
    time: StepTime
    sent: Sent
    flops: float
    """Of one GPU in a step."""
    samples: float
    """A second, of all GPUs."""
    utilisation: float
    """Share of peak FLOPs."""
    fits: bool

    def as_json(self, config: RunConfig) -> dict[str, Any]:
        """Plain data."""
        layout = {**asdict(self.layout), "name": self.layout.name, "data": self.layout.data}
        layout["parts"] = self.layout.parts(config.train.batch_size)
        return {
            "layout": layout,
            "fits": self.fits,
            "memory": {**asdict(self.need), "state": self.need.state},
            "step": {**asdict(self.time), "seconds": self.time.seconds},
            "sent": {**asdict(self.sent), "all": self.sent.all},
            "flops": self.flops,
            "samples_per_second": self.samples,
            "utilisation": self.utilisation,
            "overrides": self.layout.overrides(config),
        }


@dataclass(frozen=True)
class Plan:
    """All of a run's layouts on so many GPUs."""

    config: RunConfig
    gpus: int
    gpu: GPU
    assumed: Assumptions
    parameters: int
    choices: tuple[LayoutChoice, ...]
    """That fit, the fastest first."""
    too_large: LayoutChoice | None
    """The one that comes nearest, where none fits."""
    given: LayoutChoice | None
    """The run's own configuration as it stands."""
    refused: dict[str, str]
    """Why layouts of a kind are not there."""

    def verdict(self) -> str:
        """What to do, in one sentence."""
        gpus = f"{self.gpus} × {self.gpu.name}"
        if not self.choices:
            if self.too_large is None:
                reasons = "; ".join(f"{kind}: {why}" for kind, why in self.refused.items())
                return f"no layout is possible on {gpus}: {reasons}"
            need, room = self.too_large.need.peak, self.gpu.memory * self.assumed.usable
            return (
                f"does not fit on {gpus}: the smallest layout ({describe(self.too_large.layout)}) needs {gib(need)} "
                f"a GPU, and {gib(room)} of its {gib(self.gpu.memory)} are usable"
            )
        best = self.choices[0]
        return (
            f"fits on {gpus}: {describe(best.layout)} needs {gib(best.need.peak)} of {gib(self.gpu.memory)} a GPU and "
            f"takes about {seconds(best.time.seconds)} a step, an estimate that no GPU has confirmed"
        )


def make_plan(config: RunConfig, gpus: int, gpu: GPU, assumed: Assumptions | None = None) -> Plan:
    """Try all layouts of a run on so many GPUs; nothing is run, and no data are opened."""
    if not 1 <= gpus <= MOST_GPUS:
        raise ConfigError.not_allowed("--gpus", gpus, f"1 to {MOST_GPUS}")
    if gpus > gpu.machine and gpus % gpu.machine:
        raise ConfigError.not_allowed("--gpus", gpus, f"up to {gpu.machine} or whole machines of as many")
    assumed = assumed or Assumptions()
    found: list[LayoutChoice] = []
    refused: dict[str, str] = {}
    tried = [(layout, problem_of(config, layout)) for layout in possible_layouts(config, gpus, gpu.machine)]
    possible = {layout.name for layout, problem in tried if problem is None}
    for layout, problem in tried:
        if problem is None:
            found.append(evaluate(config, layout, gpu, assumed, _estimated(config, layout)))
        elif layout.name not in possible:
            refused.setdefault(layout.name, problem)
    fitting = sorted((one for one in found if one.fits), key=lambda one: (round(one.time.seconds, 6), one.need.peak))
    best = [evaluate(config, choice.layout, gpu, assumed) for choice in fitting[:1]]  # by a trace of its own
    nearest = min(found, key=lambda choice: choice.need.peak, default=None) if not fitting else None
    return Plan(
        config,
        gpus,
        gpu,
        assumed,
        parts_of(config).all,
        tuple(best + fitting[1:]),
        nearest,
        check_given(config, gpus, gpu, assumed),
        refused,
    )


def check_given(config: RunConfig, gpus: int, gpu: GPU, assumed: Assumptions) -> LayoutChoice | None:
    """What a run's own configuration comes to; None where it is no layout at all."""
    try:
        layout = given_layout(config, gpus, gpu.machine)
    except ConfigError:
        return None
    if problem_of(config, layout) is not None:
        return None
    return evaluate(config, layout, gpu, assumed)


def evaluate(
    config: RunConfig, layout: Layout, gpu: GPU, assumed: Assumptions, at: AtDepth | None = None
) -> LayoutChoice:
    """What a layout comes to; at: its profiles by number of blocks, where they are known."""
    at = at or at_depth(config, layout, "cuda")
    work = work_of(config, layout, at)
    need, sent = need_of(config, layout, "cuda", at), sent_by(config, layout)
    time = step_time(config, layout, work, sent, gpu, assumed)
    peak = gpu.flops if config.train.precision != "fp32" else gpu.flops_fp32
    return LayoutChoice(
        layout,
        need,
        time,
        sent,
        work.flops,
        config.train.batch_size / time.seconds,
        work.flops / time.seconds / peak,
        need.peak <= gpu.memory * assumed.usable,
    )


def _estimated(config: RunConfig, layout: Layout) -> AtDepth:
    """Profiles from those of a whole model and of tensor groups of two: what is split halves, the rest stays."""
    layout = replace(layout, ep=min(layout.ep, 2))  # however many there are, as many rows travel as stay
    whole = at_depth(config, replace(layout, tensor=1), "cuda")
    if layout.tensor == 1:
        return whole
    halves = at_depth(config, replace(layout, tensor=2), "cuda")
    return lambda depth: whole(depth).towards(halves(depth), 2 * (1 - 1 / layout.tensor))


def best_of_kinds(choices: Sequence[LayoutChoice], most: int) -> Iterator[LayoutChoice]:
    """The fastest, and for every kind of layout and checkpointing its fastest, `most` in all."""
    seen: set[tuple[str, str]] = set()
    for choice in choices:
        kind = choice.layout.name, choice.layout.checkpointing
        if kind not in seen and len(seen) < most:
            seen.add(kind)
            yield choice


def command(plan: Plan, choice: LayoutChoice, recipe: str, overrides: Sequence[str]) -> str:
    """What to type on every machine."""
    machines, each = max(1, plan.gpus // plan.gpu.machine), min(plan.gpus, plan.gpu.machine)
    decided = choice.layout.overrides(plan.config)
    names = [text.partition("=")[0] for text in decided]
    own = [text for text in overrides if not any(decides(name, text.partition("=")[0]) for name in names)]
    words = [recipe, *own, *decided]
    train = "siamesenorm train " + " ".join(map(shlex.quote, words))
    if plan.gpus == 1:
        return train
    meet = f"--nnodes {machines} --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if machines > 1 else ""
    return f"torchrun {meet}--nproc-per-node {each} -m {train}"


def decides(name: str, key: str) -> bool:
    """Whether a field's full name is what an override's key stands for."""
    return name == key or name.endswith(f".{key}")


def describe(layout: Layout) -> str:
    """A layout in words."""
    kept = {"none": "", "sublayer": ", sublayers computed again", "full": ", blocks computed again"}
    return f"{layout.name} with micro-batches of {layout.micro_batch}{kept[layout.checkpointing]}"


def seconds(value: float) -> str:
    """Seconds or milliseconds."""
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
