"""Comparisons in one call, from the question to the report: on the command line and in Python.

result = siamesenorm.compare(make_model, tokens, topologies=["pre", "siamese"], lrs=[1e-3, 4e-3], seeds=3, steps=500)
result.verdict, result.table, result.figures
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.axes import RECIPE, make_grid
from siamesenorm.lab.compare.dry_run import dry_run
from siamesenorm.lab.compare.engines import check_engine, open_engine
from siamesenorm.lab.compare.grafts import GraftSource, open_graft_source
from siamesenorm.lab.compare.grid import Grid
from siamesenorm.lab.compare.live import open_table
from siamesenorm.lab.compare.own_model import open_model_file, own_recipe
from siamesenorm.lab.compare.preparation import OneComparison, Prepared, check_metric, prepare_grid, prepare_text
from siamesenorm.lab.compare.presets import GridPreset, find_preset
from siamesenorm.lab.compare.runner import ThisProcess
from siamesenorm.lab.inspection.looking import inspect_runs
from siamesenorm.lab.report.outcome import Comparison, read_comparison
from siamesenorm.tasks.own import Given, given, name_of
from siamesenorm.train.overrides import as_setting

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

RUNS = Path("runs")


@dataclass(frozen=True)
class ComparisonRequest:
    """What is compared, on what, and where it lies; its grid and fields are checked, nothing is written yet."""

    grid: Grid
    folder: Path
    preset: GridPreset | None = None
    metric: str | None = None
    """What is compared by; None: the preset's, or the held-out loss."""
    baseline: str | None = None
    own: Given | None = None
    """A user's own model."""
    model: str | None = None
    """``FILE.py:NAME``, where other processes can make that model."""
    source: GraftSource | None = None
    """The trained model that all runs go on from."""
    text: Path | None = None
    """What is trained on, in place of the recipe's own."""

    def __post_init__(self) -> None:
        task = self.grid.cells()[0].config.task
        if self.text is not None and task != "language":
            text = str(self.text)
            raise ConfigError.refused("--text", text, f"the recipe is one of {task}, not of language")

    def dry_run(self, engine: str = "local", jobs: int | None = None) -> Iterable[Table | str]:
        """What it would take; nothing is written."""
        with given(self.own):
            grid = self.grid if self.text is None else self.grid.on(self.text)
            yield from dry_run(grid, self.folder, open_engine(engine, jobs, self.model))

    def run(self, engine: str = "local", jobs: int | None = None, console: Console | None = None) -> Prepared:
        """Run the grid in its folder, with a live table; an interruption saves what was running."""
        check_engine(engine)
        if self.baseline is not None and self.baseline not in self.grid.topologies:
            names = ", ".join(self.grid.topologies)
            raise ConfigError(f"--baseline: {self.baseline!r} is not compared; it takes one of {names}")
        metric = self.metric or (None if self.preset is None else self.preset.metric)
        if metric is not None:
            check_metric(self.grid.cells()[0].config.task, metric)
        with given(self.own), OneComparison(self.folder) as one:
            one.take()
            prepared = prepare_grid(self._readable(), self.folder, metric, one, self.source)
            here = self.own is not None and self.model is None  # nobody else can make the model
            opened = ThisProcess() if here else open_engine(engine, jobs, self.model)
            if console is not None:
                kept = sum(progress.kept for progress in prepared.plan)
                text = f"{len(prepared.plan)} cells in {self.folder}, {opened.jobs} at a time"
                console.print(text + (f"; {kept} are done" if kept else ""), style="dim", markup=False)
                for note in dict.fromkeys(note for place in prepared.plan for note in place.cell.config.notes):
                    console.print(note, style="dim", markup=False)
            with open_table(prepared.plan, console) as table:
                complete = opened.run(prepared.plan, prepared.provenance, table)
            if self.preset is not None and self.preset.looks_inside:
                inspect_runs((cell.folder for cell in prepared.plan if cell.state == "finished"), console)
            return dataclasses.replace(prepared, complete=complete)

    def _readable(self) -> Grid:
        """On the text, prepared once the folder is ours; a trained model's tokenizer reads it as it is."""
        if self.text is None:
            return self.grid
        return self.grid.on(prepare_text(self.text, self.folder) if self.source is None else self.text.resolve())

    def read(self, ran: Prepared, title: str = "") -> Comparison:
        """What the cells say that have a result."""
        return read_comparison(
            ran.done,
            self.folder,
            title=title,
            metric=self.metric,
            baseline=self.baseline,
            preset=self.preset,
            complete=ran.complete,
            failed=tuple(f"{progress.folder}: {progress.message}" for progress in ran.failed),
        )


def parse_request(
    *,
    recipe: str | None = None,
    model: str | None = None,
    graft: Path | None = None,
    text: Path | None = None,
    preset: str | None = None,
    folder: Path | None = None,
    metric: str | None = None,
    baseline: str | None = None,
    fields: Sequence[str] = (),
    sets: Sequence[str] = (),
    **axes: Sequence[str],
) -> ComparisonRequest:
    """The request of a command line; fields: more of `sets`, behind the recipe; axes: those of `make_grid`."""
    if fields and "=" not in fields[0]:
        if recipe is not None:
            raise ConfigError.not_allowed("--recipe", recipe, "one of the two", f"beside the recipe {fields[0]!r}")
        recipe, *fields = fields
    if model is not None and (recipe is not None or preset is not None):
        raise ConfigError.refused("--model", model, "it takes the place of both", when="with a recipe or preset")
    own = None if model is None else open_model_file(model)
    if own is not None and text is not None:
        own, text = dataclasses.replace(own, data=text), None
    source = None if graft is None else open_graft_source(graft)
    if source is not None and own is not None:
        raise ConfigError.refused("--graft", graft, when="with --model, whose weights are its own")
    chosen, out = find_preset(preset), folder or default_folder(preset, model if recipe is None else Path(recipe).stem)
    named = recipe if own is None else own_recipe(own, str(model))
    grid = make_grid(recipe=named, preset=chosen, source=source, out=out, sets=[*sets, *fields], **axes)
    return ComparisonRequest(grid, out, chosen, metric, baseline, own, model, source, text)


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
    chosen = find_preset(preset)
    sets = [as_setting(name, value) for name, value in fields.items()]
    shape = {"steps": steps, "batch_size": batch_size, "sequence_length": sequence_length}
    for name, value in shape.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError.not_allowed(name, value, "a whole number from 1")
    for name, values in (("topologies", topologies), ("lrs", lrs), ("seeds", seeds)):
        if not isinstance(values, (Sequence, int, float)) or (
            name == "topologies" and not isinstance(values, Sequence)
        ):
            raise ConfigError.not_allowed(name, values, "a list")
    recipe: str | dict[str, Any]
    own, file = own_parts(model, data, validation, loss)
    if own is None:
        recipe, named = str(model), None if model == RECIPE else Path(str(model)).stem
        asked_for = dict(zip(("train.steps", "train.batch_size", "data.sequence_length"), shape.values(), strict=True))
        asked_for |= {"data.train": data, "data.validation": validation}
        sets += [as_setting(name, value) for name, value in asked_for.items() if value is not None]
    else:
        named = str(model) if isinstance(model, str) else name_of(model)
        recipe = own_recipe(own, named, **shape)
    grid = make_grid(
        recipe=recipe,
        topologies=[topologies] if isinstance(topologies, str) else list(topologies),
        lrs=[lr if isinstance(lr, str) else repr(lr) for lr in ([lrs] if isinstance(lrs, (int, float, str)) else lrs)],
        seeds=[str(seed) for seed in seed_list(seeds)],
        sets=sets,
        preset=chosen,
    )
    out = default_folder(preset, named) if folder is None else Path(folder)
    request = ComparisonRequest(grid, out, chosen, metric, baseline, own, file)
    with torch.random.fork_rng(enabled=own is not None):  # what the caller draws next is not changed
        ran = request.run(engine, jobs, None if quiet else Console(stderr=True))
    if not ran.done:
        if not ran.complete:
            raise KeyboardInterrupt
        raise ConfigError(f"{ran.failed[0].folder}: {ran.failed[0].message}")
    result = request.read(ran, title)
    result.write()
    return result


def own_parts(model: Any, data: Any, validation: Any, loss: Any) -> tuple[Given | None, str | None]:
    """The user's own model, None for a recipe; and the file that other processes can make it of, if any."""
    if callable(model):
        return Given(model, data, validation, loss), None
    if not isinstance(model, str):
        raise ConfigError.wrong_kind(
            "model", model, "a function that makes a model for a topology, FILE.py:NAME of one, or the name of a recipe"
        )
    if ".py:" not in model:
        if loss is not None:
            raise ConfigError(f"loss: is not allowed for {model!r}; a recipe has its own")
        return None, None
    changed = {"data": data, "validation": validation, "loss": loss}
    own = dataclasses.replace(open_model_file(model), **{n: v for n, v in changed.items() if v is not None})
    in_file = loss is None and all(value is None or isinstance(value, (str, Path)) for value in (data, validation))
    return own, model if in_file else None


def default_folder(preset: str | None, name: str | None) -> Path:
    """``runs/compare``, with the names of preset and recipe where they are not the default's."""
    parts = [re.sub(r"[^\w.+-]+", "_", part) for part in ("compare", preset, name) if part]
    return RUNS / "-".join(parts)


def seed_list(seeds: Sequence[int] | int) -> Sequence[int]:
    """Seeds, or the first so many."""
    if isinstance(seeds, bool) or (isinstance(seeds, int) and seeds < 1):
        raise ConfigError.not_allowed("seeds", seeds, "how many, or a list of them")
    return range(seeds) if isinstance(seeds, int) else [seeds] if isinstance(seeds, str) else seeds
