"""Looking inside a model in one call: one of your own with a batch, or one that a run or a folder holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor, nn

from siamesenorm.data.reading import MissingError, read_bytes
from siamesenorm.errors import InspectionError
from siamesenorm.lab.inspection.measure import measure
from siamesenorm.lab.inspection.page import JSON, write_report
from siamesenorm.lab.inspection.result import Inspection
from siamesenorm.lab.inspection.source import open_inspected
from siamesenorm.lab.inspection.spikes import spikes_of_run
from siamesenorm.opening import is_run
from siamesenorm.residual import Topology
from siamesenorm.terminal import progress_bar
from siamesenorm.train.provenance import command, machine_facts

FOLDER = "inspection"
"""Where the inspection of a run lies, in its folder."""
TOKENS = 2048
"""Tokens of text that are read, about."""


def inspect(
    model: nn.Module | Path | str,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    head: Callable[[Tensor], Tensor] | None = None,
    topology: Topology | None = None,
    removal: bool = True,
    text: Path | str | None = None,
    tokens: int = TOKENS,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Inspection:
    """Look inside a model that uses `Residual`: norms, gradients, who wrote what is read, logit lens, removals.

    ::

        found = siamesenorm.inspect(model, ids, loss=lambda model, ids: model(ids)[1])
        found.rms["x"], found.plot("rms")

        siamesenorm.inspect("runs/compare/cells/siamese-…")            # what the command does

    model: a model, which is left as it was; or the folder of a run or of an exported language model.
    batch: what the model takes: a tensor, a tuple of arguments or a dictionary of them; of a folder, none. A
    `LanguageModel` takes ids (rows, tokens), or a dictionary with input_ids and labels.
    loss: ``loss(model, batch)``, a number; without it, neither gradients nor removals (a model of ours has its own).
    head: scores from hidden states (tokens, dim); without it, no logit lens (a model of ours has its own).
    topology: the one to look at, where the model has several.
    removal: whether to measure the loss without each sublayer and block, three passes per block.
    progress: called with how many of these passes are done, of how many.
    text, tokens: of a folder: a text to read, and how much of it; by default what the run was validated on.
    """
    if isinstance(model, nn.Module):
        if batch is None:
            raise InspectionError("batch: is missing; it takes what the model takes, such as ids of (rows, tokens)")
        return measure(model, batch, loss=loss, head=head, topology=topology, removal=removal, progress=progress)
    if not isinstance(model, (str, Path)):
        raise InspectionError.wrong_kind("model", model, "an nn.Module, or the folder of a run")
    if batch is not None or loss is not None or head is not None or topology is not None:
        raise InspectionError("batch: is not allowed with a folder, which has its own; it takes text= and tokens=")
    return inspect_folder(Path(model), None if text is None else Path(text), tokens, removal=removal)


def inspect_folder(
    folder: Path, text: Path | None, tokens: int, *, removal: bool = True, console: Console | None = None
) -> Inspection:
    """The inspection of what a folder holds, with its progress on a console, and where it comes from."""
    source = open_inspected(folder, text, tokens)
    with progress_bar(console or Console(quiet=True), "passes") as progress:
        found = measure(source.model, source.batch, loss=source.loss, removal=removal, progress=progress)
    facts = {**source.facts, "command": command(), **machine_facts()}
    return found.model_copy(update={"source": facts, "spikes": spikes_of_run(folder) if is_run(folder) else None})


def default_folder(folder: Path) -> Path:
    """Inside a run; beside other runs for an exported model, whose folder is left as it is."""
    return folder / FOLDER if is_run(folder) else Path("runs") / f"{FOLDER}-{folder.resolve().name}"


def inspection_of(run: Path) -> Inspection | None:
    """The inspection that lies in a run's folder, if there is one."""
    try:
        return Inspection.from_json(read_bytes(run / FOLDER / JSON, "inspection"))
    except MissingError:
        return None


def inspect_runs(runs: Iterable[Path], console: Console | None = None) -> None:
    """Look inside runs, all but removals, and leave what is found in their folders."""
    for run in runs:
        write_report(inspect_folder(run, None, TOKENS, removal=False, console=console), run / FOLDER)
