"""``siamesenorm branch``: a decay of its own from a checkpoint of a run at its peak learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def branch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run with schedule.kind wsd or constant.")],
    at: Annotated[int, typer.Option("--at", min=1, max=10**9, help="A step that the run has a checkpoint of.")],
    decay: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**9, help="Steps in which the learning rate falls.", show_default="schedule.decay's share"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--run", "--out", "-o", help="Folder of the new run.", show_default="RUN-AT+DECAY"),
    ] = None,
) -> None:
    """Begin a run with the checkpoint of another and let its learning rate fall: many budgets from one trunk.

    It is the run that wsd with these steps would have been from its first step on. `siamesenorm train` goes on with it.
    """
    from siamesenorm.train.branching import branch as make_branch

    folder = make_branch(run, at, decay, out)
    typer.echo(f"{folder}: stands at step {at}; siamesenorm train {folder} goes on")
