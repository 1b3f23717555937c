"""The numbers of a report as plain rows: runs, and where everything came from."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siamesenorm.lab.presets import Preset
from siamesenorm.lab.published import published_rows
from siamesenorm.lab.records import Records, Run
from siamesenorm.lab.statistics import Analysis, by_training
from siamesenorm.lab.tables import notes
from siamesenorm.lab.verdict import verdict
from siamesenorm.train.folder import plain_numbers


def as_json(records: Records, analysis: Analysis, folder: Path, title: str, preset: Preset | None) -> dict[str, Any]:
    """Everything that the page shows, and the curves behind its plots."""
    found = {
        "title": title,
        "verdict": list(dict.fromkeys(s for _, part in by_training(records, analysis) for s in verdict(part))),
        "notes": notes(records),
        "grafts": list({json.dumps(run.graft): run.graft for run in records.runs if run.graft}.values()),
        "published": [] if preset is None else published_rows(analysis, preset),
        "analysis": analysis.as_dict(),
        "runs": [run_row(run, records, folder) for run in records.runs],
        "curves": {run.name: run.curve for run in records.runs},
        "provenance": provenance(records),
    }
    return json.loads(json.dumps(plain(found)))


def plain(value: Any) -> Any:
    """The same with texts for names and null for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return plain_numbers(value)


def run_row(run: Run, records: Records, folder: Path) -> dict[str, Any]:
    """One run as a row of numbers."""
    return {
        "name": run.name,
        "topology": run.topology,
        "setting": records.setting(run),
        "lr": run.lr,
        "seed": run.seed,
        "state": run.state,
        "step": run.step,
        "steps": run.config.steps,
        **{f"evaluation.{name}": value for name, value in run.evaluation.items()},
        "parameters": run.config.train.parameters,
        "parameters_trained": run.parameters.get("trained"),
        "parameters_of_model": run.parameters.get("of"),
        "step_seconds": run.step_seconds,
        "processor_seconds": run.facts.get("processor_seconds"),
        "memory_bytes": run.facts.get("memory_bytes"),
        "identity": run.identity,
        "folder": os.path.relpath(run.folder, folder),
        "message": run.message,
    }


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows under one header; what a row does not have is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _csv_safe(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _csv_safe(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "@", "\t", "\r") else value


def provenance(records: Records) -> dict[str, Any]:
    """Commands, versions, machines and data of all runs, each once."""

    def each(field: str) -> list[Any]:
        found = {
            json.dumps(run.facts[field], sort_keys=True): run.facts[field] for run in records.runs if field in run.facts
        }
        return list(found.values())

    data: dict[str, str] = {}
    for hashes in each("data"):
        data |= hashes
    return {"commands": each("command"), "versions": each("versions"), "machines": each("machine"), "data": data}
