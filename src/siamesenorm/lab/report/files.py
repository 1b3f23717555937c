"""A report of finished runs: report.html to look at, report.json and report.csv to go on from."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siamesenorm.data.atomic import write_texts
from siamesenorm.lab.report.findings import Findings
from siamesenorm.lab.report.page import make_page
from siamesenorm.lab.report.published import published_rows
from siamesenorm.lab.report.records import Records, Run
from siamesenorm.lab.report.sentences import notes
from siamesenorm.train.folder import plain_numbers

HTML, JSON, CSV = "report.html", "report.json", "report.csv"


def write_report(found: Findings) -> Path:
    """Write the three files into the report's folder; the page's path is returned."""
    values = as_json(found)
    json_text = json.dumps(values, indent=1, ensure_ascii=False) + "\n"
    texts = {JSON: json_text, CSV: as_csv(values["runs"]), HTML: make_page(found).render()}
    return write_texts(found.folder, texts)[-1]


def as_json(found: Findings) -> dict[str, Any]:
    """Everything that the page shows, and the curves behind its plots."""
    records = found.records
    values = {
        "title": found.heading,
        "verdict": found.sentences,
        "notes": notes(records),
        "grafts": found.grafts,
        "published": published_rows(found),
        "analysis": found.analysis.as_dict(),
        "runs": [run_row(run, records, found.folder) for run in records.runs],
        "curves": {run.name: run.curve for run in records.runs},
        "provenance": found.provenance,
    }
    return json.loads(json.dumps(plain_numbers(values)))


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
