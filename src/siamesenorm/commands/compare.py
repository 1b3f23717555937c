"""``siamesenorm compare``: a grid of topologies, learning rates and seeds, with a live table and a report."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.completion import (
    complete_field,
    complete_recipe,
    complete_recipe_or_field,
    complete_topologies,
)
from siamesenorm.commands.report import Baseline, Figures, Metric, Open, show_result

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
PRESETS = ("lr", "depth", "warmup", "ablation", "arithmetic")
SHOWN = 5
"""Failed cells that are named."""


def compare(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [FIELD=VALUE,…]",
            help="What is trained, as --recipe takes it, and fields of the configuration, as --set takes them.",
            autocompletion=complete_recipe_or_field,
            show_default=False,
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
            show_default=False,
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
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Another field, one value or several.",
            metavar="FIELD=VALUE,…",
            autocompletion=complete_field,
            show_default=False,
        ),
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

    from siamesenorm.lab.compare import make_grid, prepare_text
    from siamesenorm.lab.comparison import default_folder, run_grid
    from siamesenorm.lab.export import parse_formats
    from siamesenorm.lab.grafts import open_source
    from siamesenorm.lab.model_file import open_model_file
    from siamesenorm.lab.outcome import read_comparison
    from siamesenorm.lab.own_model import own_recipe
    from siamesenorm.lab.presets import find_preset
    from siamesenorm.tasks.own import given
    from siamesenorm.train.errors import ConfigError

    recipe, fields = recipe_of(recipe, fields or [])
    if model is not None and (recipe is not None or preset is not None):
        raise ConfigError(f"--model: {model!r} is not allowed with a recipe or preset; it takes the place of both")
    chosen = None if preset is None else find_preset(preset)
    metric = metric if chosen is None or metric is not None else chosen.metric
    formats = () if figures is None else parse_formats(figures)
    own = None if model is None else open_model_file(model)
    if own is not None and text is not None:
        own = dataclasses.replace(own, data=text)
    folder = out or default_folder(preset, model if recipe is None else Path(recipe).stem)
    source = None if graft is None else open_source(graft)
    if source is not None and own is not None:
        raise ConfigError(f"--graft: {str(graft)!r} is not allowed with --model, whose weights are its own")
    make = functools.partial(
        make_grid,
        recipe=recipe if own is None else own_recipe(own, str(model)),
        topologies=topologies or (),
        lrs=lrs or (),
        seeds=seeds or (),
        optimizers=optimizers or (),
        parameters=parameters or (),
        sets=[*(set_ or ()), *fields],
        depths=depths or (),
        preset=chosen,
        source=source,
        out=folder,
    )
    asked = make()
    task = asked.cells()[0].config.task  # what is wrong is said before a text is prepared
    if text is not None and own is None and task != "language":
        raise ConfigError(f"--text: {str(text)!r} is not allowed; the recipe is one of {task}, not of language")
    if dry_run:
        from siamesenorm.lab.compare import open_engine
        from siamesenorm.lab.dry_run import dry_run as try_out

        console = Console()
        with given(own):
            grid = asked if text is None or own is not None else make(data=text)
            for part in try_out(grid, folder, open_engine(engine, jobs, model)):
                console.print(part, soft_wrap=True) if isinstance(part, str) else console.print(part)
        return

    def readable(text: Path) -> Path:
        """Prepared; tokens of a trained model are its tokenizer's, which reads the text as it is."""
        return prepare_text(text, folder) if source is None else text.resolve()

    with given(own):
        prepared, complete = run_grid(
            asked,
            folder,
            metric=metric,
            baseline=baseline,
            engine=engine,
            jobs=jobs,
            console=Console(),
            prepare=None if text is None or own is not None else lambda: make(data=readable(text)),
            model=model,
            source=source,
        )
    for progress in prepared.failed[:SHOWN]:
        typer.echo(f"siamesenorm: {progress.folder}: {progress.message}", err=True)
    if prepared.done:
        found = read_comparison(prepared.done, folder, metric=metric, baseline=baseline, preset=chosen)
        show_result(found, formats=formats, show=show)
    if not complete:
        typer.echo("interrupted and saved; the same command goes on from here", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if prepared.failed:
        raise typer.Exit(EXIT_FAILED)


def recipe_of(recipe: str | None, fields: list[str]) -> tuple[str | None, list[str]]:
    """The recipe, which may stand before the fields as it does for train, and the fields."""
    from siamesenorm.train.errors import ConfigError

    if not fields or "=" in fields[0]:
        return recipe, fields
    if recipe is not None:
        raise ConfigError(
            f"--recipe: {recipe!r} is not allowed beside the recipe {fields[0]!r}; it takes one of the two"
        )
    return fields[0], fields[1:]
