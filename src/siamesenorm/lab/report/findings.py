"""What finished runs say, computed once: page, files, terminal and notebook show the same findings."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from siamesenorm.lab.compare.presets import GridPreset
from siamesenorm.lab.report.records import Records
from siamesenorm.lab.report.statistics import Analysis, analyse
from siamesenorm.lab.report.verdict import verdict

BESIDE = ("accuracy", "frechet")
"""What people ask for beside the metric that decides, where runs have it."""


class PartVerdict(NamedTuple):
    """The runs of one optimiser and choice of parameters, and what they say."""

    training: str
    """Empty where all runs were trained alike."""
    analysis: Analysis
    sentences: list[str]


@dataclass(frozen=True, repr=False)
class Findings:
    """Finished runs and what they say of their topologies."""

    records: Records
    analysis: Analysis
    folder: Path
    """Where the report lies."""
    title: str = ""
    preset: GridPreset | None = None

    @property
    def heading(self) -> str:
        """The title, or one that says what was compared."""
        names = self.records.topologies
        return self.title or (f"{len(names)} residual topologies compared" if len(names) > 1 else names[0])

    @functools.cached_property
    def parts(self) -> list[PartVerdict]:
        """The verdict on every optimiser and choice of parameters."""
        kinds = self.records.trainings
        if len(kinds) == 1:
            return [PartVerdict("", self.analysis, verdict(self.analysis))]
        analyses = {kind: self.analysis.within(settings) for kind, settings in kinds.items()}
        return [PartVerdict(kind, part, verdict(part)) for kind, part in analyses.items()]

    @property
    def sentences(self) -> list[str]:
        """The verdict of all parts, each sentence once."""
        return list(dict.fromkeys(sentence for part in self.parts for sentence in part.sentences))

    @functools.cached_property
    def analyses(self) -> list[Analysis]:
        """By the metric that decides, then by those that people ask for beside it."""
        measured = {name for run in self.records.runs for name in run.evaluation}
        beside = [name for name in BESIDE if name in measured and name != self.analysis.metric]
        baseline = self.analysis.baseline
        return [self.analysis, *(analyse(self.records, metric=name, baseline=baseline) for name in beside)]

    @property
    def grafts(self) -> list[dict[str, Any]]:
        """Records of the models that runs went on from, each once."""
        return list({json.dumps(run.graft): run.graft for run in self.records.runs if run.graft}.values())

    @functools.cached_property
    def provenance(self) -> dict[str, Any]:
        """Commands, versions, machines and data of all runs, each once."""

        def each(field: str) -> list[Any]:
            known = [run.facts[field] for run in self.records.runs if field in run.facts]
            return list({json.dumps(value, sort_keys=True): value for value in known}.values())

        data = {name: digest for hashes in each("data") for name, digest in hashes.items()}
        return {"commands": each("command"), "versions": each("versions"), "machines": each("machine"), "data": data}
