"""``siamesenorm train``: a recipe with overrides, begun or resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.options import Overrides, Recipe
from siamesenorm.refusal import EXIT_FAILED

EXIT_DIVERGED = 3
SIGNAL_BASE = 128


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", "--out", "-o", help="Folder of the run; by default runs/ with the names of recipe and overrides."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a run that is there; what decides no loss may change."),
    ] = False,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="Go on from the run's checkpoint of this step, and not from the newest."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, removing what the run has written.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how long it would take and in how much memory; write nothing.")
    ] = False,
) -> None:
    """Train a model; the same command again goes on where it was interrupted.

    Exit codes: 0 finished, 1 failed, 2 bad input, 3 diverged, 129, 130 or 143 interrupted and saved.
    """
    from rich.console import Console

    from siamesenorm.errors import ConfigError
    from siamesenorm.train.display import ConsoleDisplay, Display, output_may_be_gone
    from siamesenorm.train.distributed import World, lost_another
    from siamesenorm.train.folder import Mode
    from siamesenorm.train.loop import train as run_training
    from siamesenorm.train.recipes import resolve
    from siamesenorm.train.session import default_folder
    from siamesenorm.train.torchrun import refuse, was_restarted

    if resume and restart:
        raise ConfigError("--resume and --restart: both are given; it takes one of the two")
    if at is not None and restart:
        raise ConfigError("--at and --restart: both are given; it takes one of the two")
    mode: Mode = "resume" if resume or at is not None else "restart" if restart else "auto"
    at = None if was_restarted() else at  # it has gone back there already
    try:
        config = resolve(recipe, overrides or [])
    except ConfigError as error:
        refuse(str(error))  # other processes need not wait for this one
        raise
    folder = run or default_folder(recipe, overrides or [], mode == "resume")
    title = config.about or " ".join([recipe, *(overrides or [])])
    console = Console(stderr=True)
    if dry_run:
        from siamesenorm.train.dry_run import estimate
        from siamesenorm.train.folder import RunFolder

        RunFolder(folder).check(config, mode, at)
        for line in (f"{folder}: {title}", *config.notes, estimate(config).sentence()):
            typer.echo(line)
        return
    world = World.start(config.parallel)
    try:
        display = ConsoleDisplay(console, f"{title}\n{folder}") if world.is_main else Display()
        result = run_training(config, folder, mode=mode, display=display, world=world, at=at)
    except Exception as error:
        if world.size > 1 and lost_another(error):
            problem = (
                f"process {world.rank}: another process of the run has failed or was lost; its own message says why"
            )
        elif isinstance(error, OSError):
            problem = f"{folder}: {error.strerror or error}"
        else:
            raise
        typer.echo(f"siamesenorm: {problem}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        world.close()
    if world.is_main:
        with output_may_be_gone():
            typer.echo(f"{result.folder}: {result.message}")
    if result.state == "diverged":
        raise typer.Exit(EXIT_DIVERGED)
    if result.signal is not None:
        raise typer.Exit(SIGNAL_BASE + result.signal.value)
