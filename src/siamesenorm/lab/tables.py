"""What a grid says, on a terminal: losses by topology and learning rate, differences, cost, the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from siamesenorm.lab import by_steps
from siamesenorm.lab.grid import short_name
from siamesenorm.lab.records import Records
from siamesenorm.lab.statistics import Analysis, Place, beside, by_training
from siamesenorm.lab.verdict import verdict
from siamesenorm.train.config import RunConfig

MOST_VALUES = 6
"""Values of a field that are named."""


def show(console: Console, records: Records, analysis: Analysis) -> None:
    """Everything in a screenful."""
    for each in (analysis, *beside(records, analysis)):
        console.print(Text(f"\n{what_is_shown(each)}", style="dim"))
        console.print(scores(records, each))
    for metric in by_steps.measured(records):
        console.print(Text(f"\n{by_steps.METRICS[metric]}, by steps", style="dim"))
        console.print(by_steps.terminal_table(by_steps.by_steps(records, metric)))
    console.print()
    for sentence in (*started_with(records), *trained_shares(records)):
        console.print(Text(sentence, style="dim"))
    for kind, part in by_training(records, analysis):
        if kind:
            console.print(Text(f"Under {kind}", style="bold"))
        for sentence in verdict(part):
            console.print(Text.assemble(("• ", "bold cyan"), sentence))
    for note in notes(records):
        console.print(Text(note, style="yellow"))


def what_is_shown(analysis: Analysis) -> str:
    """``held-out loss on 16,384 tokens, mean ± standard deviation over 3 seeds``."""
    found = analysis.conditions
    spread = f"mean ± standard deviation over {found.seeds_text}" if len(found.seeds) > 1 else "one seed"
    return f"{found.held_out}{analysis.metric} on {found.amount}, {spread}"


def scores(records: Records, analysis: Analysis) -> Table:
    """A row for every topology and setting, a column for every learning rate."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    grouped = records.groups != [""]
    if grouped:
        table.add_column("setting", overflow="fold")
    table.add_column("topology", style="bold cyan", overflow="fold")
    for lr in records.lrs:
        table.add_column(f"lr {lr:g}", justify="right", overflow="fold")
    best = {r.setting: set() for r in analysis.ranges}  # type: dict[str, set[tuple[str, float]]]
    for found in analysis.ranges:
        if found.best is not None:
            best[found.setting].add((found.topology, found.best))
    for setting in records.groups:
        for topology in records.topologies:
            places = [analysis.place(topology, setting, lr) for lr in records.lrs]
            texts = [
                Text(place_text(place), style="bold" if place and (topology, place.lr) in best[setting] else "")
                if not (place and place.failed)
                else Text(place_text(place), style="red")
                for place in places
            ]
            if any(place is not None for place in places):
                table.add_row(*([Text(setting)] if grouped else []), Text(topology), *texts)
    return table


def place_text(place: Place | None) -> str:
    """``1.643 ± 0.004``, ``diverged``, ``1.643 (1 of 3 diverged)``."""
    if place is None:
        return "–"
    if place.mean is None:
        return " or ".join(sorted(set(place.failed.values())))
    text = f"{place.mean:.4f}" + ("" if place.spread is None else f" ± {place.spread:.4f}")
    if place.failed:
        states = " or ".join(sorted(set(place.failed.values())))
        text += f" ({len(place.failed)} of {len(place.failed) + len(place.scores)} {states})"
    return text


def first_weights(config: RunConfig) -> str | None:
    """By which rule the weights of a run started, where its model has a choice."""
    if config.train.init_from is not None:
        return None
    init, small = getattr(config.model, "init", None), getattr(config.model, "first_logits", "standard") == "small"
    return f"{init} with small first logits" if init and small else init


def started_with(records: Records) -> list[str]:
    """Which trained model runs went on from, and how good it was before."""
    found = {run.graft["source"]: run.graft for run in records.runs if run.graft}
    sentences = []
    for source, graft in found.items():
        losses = [
            f"{before['loss']:.4f} on {' and '.join(map(str, before['data']))}"
            for before in graft["before"]
            if isinstance(before.get("loss"), (int, float)) and isinstance(before.get("data"), list)
        ]
        told = f"; its held-out loss before training is {', '.join(losses)}" if losses else ""
        sentences.append(f"All runs go on from {source}, a model of {graft['topology']}{told}.")
    return sentences


def trained_shares(records: Records) -> list[str]:
    """How much of a model is trained, of every choice that is not all of it."""
    found = {}
    for run in records.runs:
        chosen, (trained, whole) = run.config.train.parameters, (run.parameters.get(n, 0) for n in ("trained", "of"))
        if chosen != "all" and trained and whole:
            found[chosen, run.topology] = f"{chosen} in {run.topology}: {trained:,.0f} ({trained / whole:.2%})"
    return [f"Parameters trained, as a share of the model's: {'; '.join(found.values())}."] if found else []


def notes(records: Records) -> list[str]:
    """What a reader should know of the runs themselves; also every field that differs, where labels do not say it."""
    found = []
    labels = " ".join(records.groups)
    hidden = [name for name, _ in records.differences if f"{short_name(name)}=" not in labels]
    if hidden or any(name.startswith("data.") for name, _ in records.differences):
        told = ", ".join(f"{name} ({_some(values)})" for name, values in records.differences)
        found.append(f"the runs differ in more than topology, learning rate and seed: {told}")
    small = sum(
        run.config.train.init_from is None and getattr(run.config.model, "first_logits", "standard") == "small"
        for run in records.runs
    )
    if small:
        found.append(
            f"{small} of {len(records.runs)} runs start with small first logits, a rule of this library; the published "
            "rules of each init are first_logits=standard"
        )
    if records.unfinished:
        found.append(
            f"{len(records.unfinished)} runs are not finished and left out: {', '.join(records.unfinished[:5])}"
        )
    for name, difference in records.duplicates[:5]:
        agreement = "" if difference is None else f"; their losses lie {difference:.2g} apart"
        found.append(f"{name} was there twice and counts once{agreement}")
    if len(records.duplicates) > 5:
        found.append(f"{len(records.duplicates) - 5} more runs were there twice")
    return found


def _some(values: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(values[:MOST_VALUES]) + (f", … {len(values)} in all" if len(values) > MOST_VALUES else "")
