"""``siamesenorm compare``: a grid of topologies, learning rates and seeds, with a live table and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.train import complete_recipe

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def compare(
    recipe: Annotated[
        str | None,
        typer.Option(
            help="What is trained: a name that `siamesenorm recipes` lists, or a YAML file.",
            autocompletion=complete_recipe,
            show_default="compare-tiny",
        ),
    ] = None,
    topologies: Annotated[
        list[str] | None,
        typer.Option(
            help="Topologies with their options, the first one being what others are compared with.",
            metavar="NAME[:OPTION=VALUE…],…",
            show_default="pre,post,siamese",
        ),
    ] = None,
    lrs: Annotated[
        list[str] | None, typer.Option(help="Peak learning rates.", metavar="LR,…", show_default="from the recipe's")
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            help="Seeds; the same one gives all topologies the same data.", metavar="N,…", show_default="0,1,2"
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another field, one value or several.", metavar="FIELD=VALUE,…", show_default=False),
    ] = None,
    depths: Annotated[
        list[str] | None,
        typer.Option(help="Numbers of blocks, at a fixed number of parameters.", metavar="N,…", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at a time; by default one a GPU or core.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the grid; the same one again goes on.", show_default="runs/compare")
    ] = None,
) -> None:
    """Compare residual topologies: is one better, and how far can its learning rate go?

    With no options: pre, post and siamese at three learning rates and three seeds on an embedded corpus, a few minutes
    on a laptop. Ctrl-C stops and saves; the same command goes on.
    """
    from rich.console import Console

    from siamesenorm.lab.compare import local_engine, prepare_grid
    from siamesenorm.lab.grid import Grid, depth_axis, parse_numbers, parse_setting, parse_topologies
    from siamesenorm.lab.live import LiveTable
    from siamesenorm.lab.records import read_records
    from siamesenorm.lab.statistics import analyse
    from siamesenorm.lab.tables import show

    name = recipe or "lm-tiny"
    axes = [parse_setting(name, text) for text in set_ or []]
    fixed = tuple(axis[0].overrides[0] for axis in axes if len(axis) == 1)
    several = [axis for axis in axes if len(axis) > 1]
    if depths:
        several.append(depth_axis(name, fixed, parse_numbers(depths, "--depths", int)))
    grid = Grid(
        name,
        parse_topologies(topologies or ["pre,post,siamese"]),
        parse_numbers(lrs or ["2e-3,8e-3,3.2e-2"], "--lrs", float),
        parse_numbers(seeds or ["0"], "--seeds", int),
        fixed,
        tuple(several),
    )
    console = Console()
    prepared = prepare_grid(grid, out or Path("runs") / "compare")
    engine = local_engine(jobs)
    with LiveTable(prepared.plan, console, engine.jobs) as table:
        complete = engine.run(prepared.plan, prepared.provenance, table)
    failed = [progress for progress in prepared.plan if progress.state == "failed"]
    for progress in failed[:5]:
        typer.echo(f"siamesenorm: {progress.folder}: {progress.message}", err=True)
    if prepared.done:
        records = read_records(prepared.done)
        show(console, records, analyse(records))
    if not complete:
        typer.echo("interrupted and saved; the same command goes on from here", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed:
        raise typer.Exit(EXIT_FAILED)
