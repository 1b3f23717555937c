"""``siamesenorm runs``: what runs there are, and how they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.commands.options import Json

STYLES = {"finished": "green", "diverged": "red", "failed": "red", "interrupted": "yellow", "running": "cyan"}


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER…]", help="Runs, grids, or folders that hold some.", show_default="runs"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs: topology, learning rate, seed, state, steps and losses."""
    from rich.console import Console
    from rich.text import Text

    from siamesenorm.lab.report.records import find_runs
    from siamesenorm.terminal import plain_table

    rows = [row_of(folder) for folder in find_runs(folders or [Path("runs")])]
    if as_json:
        typer.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    headers = ("run", "topology", "state", "lr", "seed", "step", "loss", "held out", "when")
    table = plain_table(*headers, words=3, overflow="fold")
    for row in rows:
        steps = f"{row['step']}" + ("" if row["steps"] is None else f"/{row['steps']}")
        texts = [_shown(row[name], ".4f") for name in ("loss", "held_out")]
        state = Text(str(row["state"]), style=STYLES.get(str(row["state"]), ""))
        lr, seed = _shown(row["lr"], "g"), _shown(row["seed"], "d")
        when = str(row["time"] or "").replace("T", " ")[:16]
        table.add_row(Text(str(row["run"])), Text(str(row["topology"])), state, lr, seed, steps, *texts, Text(when))
    Console().print(table)


def row_of(folder: Path) -> dict[str, Any]:
    """One run; of one whose configuration cannot be read, what its status says."""
    from siamesenorm.errors import ConfigError
    from siamesenorm.train.folder import RunFolder

    run = RunFolder(folder)
    status = run.status()
    found = {
        "run": str(folder),
        "task": None,
        "topology": "",
        "lr": None,
        "seed": None,
        "state": status.get("state") or "unknown",
        "step": status.get("step") or 0,
        "steps": status.get("steps"),
        "loss": status.get("loss"),
        "held_out": (status.get("evaluation") or {}).get("loss"),
        "time": status.get("time"),
        "message": status.get("message", ""),
    }
    try:
        config = run.config()
    except ConfigError as error:
        return {**found, "message": str(error)}
    topology = str(getattr(config.model, "topology", ""))
    return {**found, "task": config.task, "topology": topology, "lr": config.optimizer.lr, "seed": config.train.seed}


def _shown(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "–"
