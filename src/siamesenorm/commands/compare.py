"""``siamesenorm compare``: a grid of topologies, learning rates and seeds, with a live table and a report."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.report import Baseline, Figures, Metric, Open, make_report
from siamesenorm.commands.train import complete_recipe

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
PRESETS = ("lr", "depth", "warmup", "ablation")
SHOWN = 5
"""Failed cells that are named."""


def compare(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIELD=VALUE,…]", help="Fields of the configuration, as --set takes them.", show_default=False
        ),
    ] = None,
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
            help="Topologies with their options; the first one is what the others are compared with.",
            metavar="NAME[:OPTION=VALUE,…],…",
            show_default="pre,post,siamese",
        ),
    ] = None,
    lrs: Annotated[
        list[str] | None,
        typer.Option(help="Peak learning rates.", metavar="LR,…", show_default="three; a recipe's own"),
    ] = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option(
            help="Seeds; the same one gives every topology the same data.", metavar="N,…", show_default="0,1,2"
        ),
    ] = None,
    optimizers: Annotated[
        list[str] | None,
        typer.Option(
            help="Optimisers, adamw or muon; topologies are compared under each by itself.",
            metavar="NAME,…",
            show_default="the recipe's",
        ),
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            help="What is trained: all, lora, residual, lora+residual, …; topologies are compared under each.",
            metavar="WORDS,…",
            show_default="all",
        ),
    ] = None,
    graft: Annotated[
        Path | None,
        typer.Option(
            help="A trained Pre-Norm model, a run or a Hugging Face folder, that all runs go on from: unchanged, and "
            "grafted to the other topologies.",
            metavar="SRC",
            show_default=False,
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
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"An experiment of the paper at laptop size, with its published figures: {', '.join(PRESETS)}.",
            autocompletion=lambda incomplete: [name for name in PRESETS if name.startswith(incomplete)],
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text, or a folder of them, to train on.", metavar="FILE", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at a time; by default one a GPU or core.", show_default=False)
    ] = None,
    engine: Annotated[
        str, typer.Option(help="Where cells run: local, or ray for a Ray cluster (extra: ray).", metavar="NAME")
    ] = "local",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the grid; the same one again goes on.", show_default="runs/compare…")
    ] = None,
    metric: Metric = None,
    baseline: Baseline = None,
    figures: Figures = None,
    show: Open = False,
) -> None:
    """Compare residual topologies: is one better than what I use, and how far can its learning rate go?

    With no options it trains pre, post and siamese on an embedded corpus, a few minutes on a laptop. Ctrl-C stops and
    saves; the same command goes on, and cells that are done are kept.
    """
    from rich.console import Console

    from siamesenorm.lab.compare import (
        OneComparison,
        check_engine,
        check_metric,
        make_grid,
        open_engine,
        prepare_grid,
        prepare_text,
    )
    from siamesenorm.lab.export import parse_formats
    from siamesenorm.lab.grafts import open_source
    from siamesenorm.lab.live import LiveTable
    from siamesenorm.lab.presets import find_preset
    from siamesenorm.train.errors import ConfigError

    check_engine(engine)
    chosen = None if preset is None else find_preset(preset)
    formats = () if figures is None else parse_formats(figures)
    folder = out or Path("runs") / "-".join(["compare", *filter(None, (preset, recipe and Path(recipe).stem))])
    source = None if graft is None else open_source(graft)
    make = functools.partial(
        make_grid,
        recipe=recipe,
        topologies=topologies or (),
        lrs=lrs or (),
        seeds=seeds or (),
        optimizers=optimizers or (),
        parameters=parameters or (),
        sets=[*(set_ or ()), *(fields or ())],
        depths=depths or (),
        preset=chosen,
        source=source,
        out=folder,
    )
    asked = make()
    task = asked.cells()[0].config.task  # what is wrong is said before a text is prepared
    if text is not None and task != "language":
        raise ConfigError(f"--text: {str(text)!r} is not allowed; the recipe is one of {task}, not of language")
    if baseline is not None and baseline not in asked.topologies:
        raise ConfigError(f"--baseline: {baseline!r} is not compared; it takes one of {', '.join(asked.topologies)}")
    if metric is not None:
        check_metric(task, metric)
    with OneComparison(folder) as one:
        one.take()
        # tokens of a trained model are its tokenizer's: the text is read as it is
        given = None if text is None else prepare_text(text, folder) if source is None else text.resolve()
        grid = asked if given is None else make(data=given)
        prepared = prepare_grid(grid, folder, metric, one, source)
        opened = open_engine(engine, jobs)
        console = Console()
        kept = sum(progress.kept for progress in prepared.plan)
        console.print(
            f"{len(prepared.plan)} cells in {folder}, {opened.jobs} at a time" + (f"; {kept} are done" if kept else ""),
            style="dim",
            markup=False,
        )
        with LiveTable(prepared.plan, console) as table:
            complete = opened.run(prepared.plan, prepared.provenance, table)
        for progress in prepared.failed[:SHOWN]:
            typer.echo(f"siamesenorm: {progress.folder}: {progress.message}", err=True)
        if prepared.done:
            make_report(
                prepared.done, folder, metric=metric, baseline=baseline, preset=chosen, formats=formats, show=show
            )
        if not complete:
            typer.echo("interrupted and saved; the same command goes on from here", err=True)
            raise typer.Exit(EXIT_INTERRUPTED)
        if prepared.failed:
            raise typer.Exit(EXIT_FAILED)
