"""What a comparison stands on: how much was held out, how many seeds there were, how weights started.

conditions(records, "loss").sentence()  ->  Measured on 16,384 held-out tokens, 3 seeds; first weights: init=mitchell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from siamesenorm.lab.report.records import Records, Run
from siamesenorm.residual import Residual, TopologyError
from siamesenorm.tasks import find_task
from siamesenorm.tasks.harness import SAMPLES
from siamesenorm.tasks.metrics import LEAST

SMALL = (8, 2)
"""Width and blocks of the stacks that are made to ask topologies for their rules."""


@dataclass(frozen=True)
class Conditions:
    """The same for every sentence of a verdict."""

    of: str
    """What is held out: tokens, images, samples, …"""
    sizes: tuple[int, ...]
    """Of the runs' held-out sets, ascending; none where no run says it."""
    seeds: tuple[int, ...]
    init: tuple[str, ...]
    """Rules of the runs' first weights, as their configurations name them."""
    own_init: tuple[str, ...]
    """Topologies that put factors of their authors on top."""

    @property
    def too_small(self) -> bool:
        """Whether a held-out set is too small to compare by."""
        return bool(self.sizes) and self.sizes[0] < self.least

    @property
    def least(self) -> int:
        """How much must be held out to compare by."""
        return LEAST[self.of]

    @property
    def held_out(self) -> str:
        """``held-out``, but of samples, which are made."""
        return "" if self.of == "samples" else "held-out "

    @property
    def amount(self) -> str:
        """``16,384 tokens``."""
        return self._count_text(self.of)

    @property
    def size(self) -> str:
        """``16,384 held-out tokens``."""
        return self._count_text(f"{self.held_out}{self.of}")

    def _count_text(self, what: str) -> str:
        if not self.sizes:
            return f"{what} (how many is not recorded)"
        counts = dict.fromkeys(f"{size:,}" for size in (self.sizes[0], self.sizes[-1]))
        return f"{' to '.join(counts)} {what}"

    @property
    def seeds_text(self) -> str:
        """``3 seeds``."""
        return "1 seed" if len(self.seeds) == 1 else f"{len(self.seeds)} seeds"

    @property
    def init_text(self) -> str:
        """``init=mitchell; deepnorm with its authors' factors on top``."""
        rules = " or ".join(rule or "the model's only rule" for rule in self.init)
        whose = "its" if len(self.own_init) == 1 else "their"
        return rules + (f"; {', '.join(self.own_init)} with {whose} authors' factors on top" if self.own_init else "")

    def sentence(self) -> str:
        """All of it."""
        return f"Measured on {self.size}, {self.seeds_text}; first weights: {self.init_text}."


def conditions(records: Records, metric: str) -> Conditions:
    """What the runs of a report have recorded about one of their numbers."""
    task = find_task(records.runs[0].config.task)
    known = task.metric(metric)
    of = known.of if known is not None else task.unit
    drawn = dict.fromkeys(run.topology for run in records.runs if run.config.train.init_from is None)
    return Conditions(
        of=of,
        sizes=tuple(sorted({size for run in records.runs if (size := _size(run, metric, of)) is not None})),
        seeds=tuple(records.seeds),
        init=tuple(dict.fromkeys(_first_weights(run) or task.init_rule(run.config) for run in records.runs)),
        own_init=tuple(topology for topology in drawn if not _neutral(topology)),
    )


def _size(run: Run, metric: str, of: str) -> int | None:
    """Of a task of the harness, as many as it says itself."""
    own = run.evaluation.get(f"{metric.rpartition('/')[0]}/{SAMPLES}") if metric.startswith("lm_eval/") else None
    size = run.held_out.get(of) if own is None else own
    return None if size is None or not math.isfinite(size) else int(size)


def _first_weights(run: Run) -> str | None:
    """Whose weights a run began with, where these are no draws."""
    source = run.graft.get("source") or run.config.train.init_from
    return None if source is None else f"those of {Path(str(source)).name}"


def _neutral(topology: str) -> bool:
    try:
        return Residual(topology, *SMALL).init_rule.is_neutral
    except TopologyError:  # a user's own topology, whose model says how it starts
        return True
