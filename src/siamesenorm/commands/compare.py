"""``siamesenorm compare``: a grid of topologies, learning rates and seeds, with a live table and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.completion import (
    complete_field,
    complete_recipe,
    complete_recipe_or_field,
    complete_topologies,
)
from siamesenorm.commands.findings import exit_unless, show_failed, show_findings
from siamesenorm.commands.options import Baseline, Engine, Figures, Jobs, Metric, Open

PRESETS = ("lr", "depth", "warmup", "ablation", "arithmetic", "streams")


def compare(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [FIELD=VALUE,…]",
            help="What is trained, as --recipe takes it, and fields of the configuration, as --set takes them.",
            autocompletion=complete_recipe_or_field,
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
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of your own instead: a function in a file of Python, which is run. It is given a topology.",
            metavar="FILE.py:NAME",
        ),
    ] = None,
    topologies: Annotated[
        list[str] | None,
        typer.Option(
            help="Topologies with their options; the first one is what the others are compared with.",
            metavar="NAME[:OPTION=VALUE,…],…",
            autocompletion=complete_topologies,
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
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Another field, one value or several.", metavar="FIELD=VALUE,…", autocompletion=complete_field
        ),
    ] = None,
    depths: Annotated[
        list[str] | None, typer.Option(help="Numbers of blocks, at a fixed number of parameters.", metavar="N,…")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"An experiment of the paper at laptop size, with its published figures: {', '.join(PRESETS)}.",
            autocompletion=lambda incomplete: [name for name in PRESETS if name.startswith(incomplete)],
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text, or a folder of them, to train on.", metavar="FILE")] = None,
    jobs: Jobs = None,
    engine: Engine = "local",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder of the grid; the same one again goes on.", show_default="runs/compare…"
        ),
    ] = None,
    metric: Metric = None,
    baseline: Baseline = None,
    figures: Figures = None,
    show: Open = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many cells, minutes and bytes it would take; write nothing.")
    ] = False,
) -> None:
    """Compare residual topologies: is one better than what I use, and how far can its learning rate go?

    With no options it trains pre, post and siamese on an embedded corpus, a few minutes on a laptop. Ctrl-C stops and
    saves; the same command goes on, and cells that are done are kept.
    """
    from rich.console import Console

    from siamesenorm.lab.comparison import parse_request
    from siamesenorm.lab.report.paper_figures import parse_formats

    formats = () if figures is None else parse_formats(figures)
    request = parse_request(
        recipe=recipe,
        model=model,
        graft=graft,
        text=text,
        preset=preset,
        folder=out,
        metric=metric,
        baseline=baseline,
        topologies=topologies or (),
        lrs=lrs or (),
        seeds=seeds or (),
        optimizers=optimizers or (),
        parameters=parameters or (),
        fields=fields or (),
        sets=set_ or (),
        depths=depths or (),
    )
    console = Console()
    if dry_run:
        for part in request.dry_run(engine, jobs):
            console.print(part, soft_wrap=True) if isinstance(part, str) else console.print(part)
        return
    ran = request.run(engine, jobs, console)
    show_failed(ran.failed)
    if ran.done:
        show_findings(request.read(ran), formats=formats, browser=show)
    exit_unless(ran.complete, ran.failed)
