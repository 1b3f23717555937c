"""Comparisons and reports in one call, with results that show themselves in a notebook.

result = siamesenorm.compare(make_model, tokens, topologies=["pre", "siamese"], lrs=[1e-3, 4e-3], seeds=3, steps=500)
result.verdict, result.table, result.figures
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from siamesenorm.lab.compare import (
    RECIPE,
    OneComparison,
    Prepared,
    check_engine,
    check_metric,
    make_grid,
    open_engine,
    prepare_grid,
)
from siamesenorm.lab.grafts import GraftSource
from siamesenorm.lab.grid import Grid
from siamesenorm.lab.live import console_of, open_table
from siamesenorm.lab.model_file import open_model_file
from siamesenorm.lab.outcome import Comparison, read_comparison
from siamesenorm.lab.own_model import own_recipe
from siamesenorm.lab.presets import PRESETS, find_preset
from siamesenorm.lab.records import find_runs, read_grid
from siamesenorm.lab.runner import ThisProcess
from siamesenorm.tasks.own import Given, given, name_of
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.overrides import as_setting

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

RUNS = Path("runs")


def compare(
    model: str | Callable[[str], nn.Module] = RECIPE,
    data: Any = None,
    *,
    topologies: Sequence[str] = (),
    lrs: Sequence[float] | float = (),
    seeds: Sequence[int] | int = 3,
    steps: int | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    validation: Any = None,
    folder: Path | str | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    preset: str | None = None,
    title: str = "",
    engine: str = "local",
    jobs: int | None = None,
    quiet: bool = False,
    **fields: Any,
) -> Comparison:
    """Compare residual topologies, on a model of your own or on a recipe, and say which is better.

    ::

        result = siamesenorm.compare(make_model, tokens, topologies=["pre", "siamese"], lrs=[1e-3, 4e-3], steps=500)
        print(result.verdict)

    model: a function that makes a new model for a topology, ``FILE.py:NAME`` of one, or the name of a recipe.
    data: an array of tokens; the name of a text, of a folder or of an embedded corpus; a Dataset with a length; or a
    function of ``"train"`` or ``"val"`` that gives a batch, such as nanoGPT's ``get_batch``. Tokens come as batches
    ``(inputs, labels)``. What is random in a batch comes from the seed.
    topologies: the first one is what the others are compared with, unless `baseline` names another.
    lrs, seeds: peak learning rates; seeds, or how many. The same seed gives every topology the same data.
    loss: ``loss(model, batch)``, a number to be made small, or that and a dictionary of further ones; by default the
    cross-entropy of the logits that the model gives for the labels of a batch.
    validation: data of the same kind to measure on; by default a twentieth of `data` is held out.
    folder: where runs and report lie; the same call again keeps what is done and goes on with the rest.
    metric: the held-out number to compare by. jobs: runs at a time, where others than this process can make the model.
    fields: further fields of the configuration by name, such as ``warmup=20``; a list of values is a further axis.

    Ctrl-C stops and saves; what was done by then is in the result, whose `complete` is False.
    """
    chosen = None if preset is None else find_preset(preset)
    metric = metric if chosen is None or metric is not None else chosen.metric
    sets = [as_setting(name, value) for name, value in fields.items()]
    shape = {"steps": steps, "batch_size": batch_size, "sequence_length": sequence_length}
    for name, value in shape.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}: {value!r} is not allowed; it takes a whole number from 1")
    for name, values in (("topologies", topologies), ("lrs", lrs), ("seeds", seeds)):
        if not isinstance(values, (Sequence, int, float)) or (
            name == "topologies" and not isinstance(values, Sequence)
        ):
            raise ConfigError(f"{name}: {values!r} is not allowed; it takes a list")
    recipe: str | dict[str, Any]
    parts, file = own_parts(model, data, validation, loss)
    if parts is None:
        recipe, named = str(model), None if model == RECIPE else Path(str(model)).stem
        asked_for = dict(zip(("train.steps", "train.batch_size", "data.sequence_length"), shape.values(), strict=True))
        asked_for |= {"data.train": data, "data.validation": validation}
        sets += [as_setting(name, value) for name, value in asked_for.items() if value is not None]
    else:
        named = str(model) if isinstance(model, str) else name_of(model)
        recipe = own_recipe(parts, named, **shape)
    asked = make_grid(
        recipe=recipe,
        topologies=[topologies] if isinstance(topologies, str) else list(topologies),
        lrs=[lr if isinstance(lr, str) else repr(lr) for lr in ([lrs] if isinstance(lrs, (int, float, str)) else lrs)],
        seeds=[str(seed) for seed in seed_list(seeds)],
        sets=sets,
        preset=chosen,
    )
    out = default_folder(preset, named) if folder is None else Path(folder)
    with given(parts), torch.random.fork_rng(enabled=parts is not None):  # what the caller draws next is not changed
        prepared, complete = run_grid(
            asked,
            out,
            metric=metric,
            baseline=baseline,
            engine=engine,
            jobs=jobs,
            console=console_of(quiet),
            model=file,
            here=parts is not None and file is None,
        )
    if not prepared.done:
        if not complete:
            raise KeyboardInterrupt
        raise ConfigError(f"{prepared.failed[0].folder}: {prepared.failed[0].message}")
    failed = tuple(f"{progress.folder}: {progress.message}" for progress in prepared.failed)
    result = read_comparison(
        prepared.done,
        out,
        title=title,
        metric=metric,
        baseline=baseline,
        preset=chosen,
        complete=complete,
        failed=failed,
    )
    result.write()
    return result


def own_parts(model: Any, data: Any, validation: Any, loss: Any) -> tuple[Given | None, str | None]:
    """What was given of somebody's own, None for a recipe; and the file that other processes can make it of, if any."""
    if callable(model):
        return Given(model, data, validation, loss), None
    if not isinstance(model, str):
        raise ConfigError(
            f"model: a {type(model).__name__} is not allowed; it takes a function that makes a model for a topology, "
            "FILE.py:NAME of one, or the name of a recipe"
        )
    if ".py:" not in model:
        if loss is not None:
            raise ConfigError(f"loss: is not allowed for {model!r}; a recipe has its own")
        return None, None
    known = open_model_file(model)
    parts = Given(
        known.make_model,
        known.data if data is None else data,
        known.validation if validation is None else validation,
        known.loss if loss is None else loss,
    )
    in_file = loss is None and all(value is None or isinstance(value, (str, Path)) for value in (data, validation))
    return parts, model if in_file else None


def run_grid(
    asked: Grid,
    folder: Path,
    *,
    metric: str | None = None,
    baseline: str | None = None,
    engine: str = "local",
    jobs: int | None = None,
    console: Console | None = None,
    prepare: Callable[[], Grid] | None = None,
    model: str | None = None,
    here: bool = False,
    source: GraftSource | None = None,
) -> tuple[Prepared, bool]:
    """Run a grid in its folder, with a live table; False if it was interrupted, which has saved what was running.

    prepare: the grid again with data that are made in the folder, once it is this comparison's.
    model: ``FILE.py:NAME`` of a model of somebody's own. here: whether only this process can make it.
    source: the trained model that all runs go on from.
    """
    check_engine(engine)
    task = asked.cells()[0].config.task  # what is wrong is said before anything is made
    if baseline is not None and baseline not in asked.topologies:
        raise ConfigError(f"--baseline: {baseline!r} is not compared; it takes one of {', '.join(asked.topologies)}")
    if metric is not None:
        check_metric(task, metric)
    with OneComparison(folder) as one:
        one.take()
        prepared = prepare_grid(asked if prepare is None else prepare(), folder, metric, one, source)
        opened = ThisProcess() if here else open_engine(engine, jobs, model)
        if console is not None:
            kept = sum(progress.kept for progress in prepared.plan)
            text = f"{len(prepared.plan)} cells in {folder}, {opened.jobs} at a time"
            console.print(text + (f"; {kept} are done" if kept else ""), style="dim", markup=False)
            for note in dict.fromkeys(note for place in prepared.plan for note in place.cell.config.notes):
                console.print(note, style="dim", markup=False)
        with open_table(prepared.plan, console) as table:
            return prepared, opened.run(prepared.plan, prepared.provenance, table)


def report(
    runs: Path | str | Sequence[Path | str],
    *,
    folder: Path | str | None = None,
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
) -> Comparison:
    """Read finished runs, of one grid or of several, of `train` or of `record`, and write their report.

    ::

        siamesenorm.report("runs/compare").open()

    runs: folders of runs, or folders that hold some; each run counts once.
    folder: where report.html, report.json and report.csv go; by default the one given, or runs/report.
    """
    paths = [Path(path) for path in ([runs] if isinstance(runs, (str, Path)) else runs)]
    result = read_report(paths, folder, title=title, metric=metric, baseline=baseline)
    result.write()
    return result


def read_report(
    paths: Sequence[Path],
    folder: Path | str | None = None,
    *,
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
) -> Comparison:
    """What finished runs say; nothing is written yet."""
    out = Path(folder) if folder is not None else paths[0] if len(paths) == 1 else RUNS / "report"
    names = {read_grid(path).get("preset") for path in paths}
    (name,) = names if len(names) == 1 else (None,)
    known = PRESETS.get(name or "")
    metric = metric if known is None or metric is not None else known.metric
    return read_comparison(
        find_runs(paths),
        out,
        prefer="" if any(read_grid(path) for path in paths) else "pre",
        title=title,
        metric=metric,
        baseline=baseline,
        preset=known,
    )


def default_folder(preset: str | None, name: str | None) -> Path:
    """``runs/compare``, with the names of preset and recipe where they are not the default's."""
    parts = [re.sub(r"[^\w.+-]+", "_", part) for part in ("compare", preset, name) if part]
    return RUNS / "-".join(parts)


def seed_list(seeds: Sequence[int] | int) -> Sequence[int]:
    """Seeds, or the first so many."""
    if isinstance(seeds, bool) or (isinstance(seeds, int) and seeds < 1):
        raise ConfigError(f"seeds: {seeds!r} is not allowed; it takes how many, or a list of them")
    return range(seeds) if isinstance(seeds, int) else [seeds] if isinstance(seeds, str) else seeds
