"""What page, terminal and notebook say of runs in the same words: a number, what it was measured on, how runs began."""

from __future__ import annotations

from collections.abc import Sequence

from siamesenorm.lab.compare.grid import short_name
from siamesenorm.lab.report.records import Records
from siamesenorm.lab.report.statistics import Analysis, SeedScores
from siamesenorm.train.config import RunConfig

MOST_VALUES = 6
"""Values of a field that are named."""


def what_is_shown(analysis: Analysis) -> str:
    """``held-out loss on 16,384 tokens, mean ± standard deviation over 3 seeds``."""
    found = analysis.conditions
    spread = f"mean ± standard deviation over {found.seeds_text}" if len(found.seeds) > 1 else "one seed"
    return f"{found.held_out}{analysis.metric} on {found.amount}, {spread}"


def place_text(place: SeedScores | None) -> str:
    """``1.643 ± 0.004``, ``diverged``, ``1.643 (1 of 3 diverged)``, ``1.643 ± 0.004 (2 of 3 seeds)``."""
    if place is None:
        return "–"
    if place.mean is None:
        return " or ".join(sorted(set(place.failed.values())))
    text = f"{place.mean:.4f}" + ("" if place.spread is None else f" ± {place.spread:.4f}")
    if place.failed:
        states = " or ".join(sorted(set(place.failed.values())))
        text += f" ({len(place.failed)} of {len(place.failed) + len(place.scores)} {states})"
    elif len(place.scores) < place.of:
        text += f" ({len(place.scores)} of {place.of} seeds)"
    return text


def score_rows(records: Records, analysis: Analysis) -> tuple[list[str], list[list[str]]]:
    """Headers, and a row for every topology and setting with a number for every learning rate."""
    grouped = records.groups != [""]
    headers = [*(["setting"] if grouped else []), "topology", *(f"lr {lr:g}" for lr in records.lrs)]
    rows = []
    for found in analysis.ranges:
        places = (analysis.place(found.topology, found.setting, lr) for lr in records.lrs)
        rows.append([*([found.setting] if grouped else []), found.topology, *map(place_text, places)])
    return headers, rows


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
        before_text = f"; its held-out loss before training is {', '.join(losses)}" if losses else ""
        sentences.append(f"All runs go on from {source}, a model of {graft['topology']}{before_text}.")
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
        fields = ", ".join(f"{name} ({_some(values)})" for name, values in records.differences)
        found.append(f"the runs differ in more than topology, learning rate and seed: {fields}")
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
    early = [
        f"{run.name} (at {run.measured_early} of {run.step})" for run in records.runs if run.measured_early is not None
    ]
    if early:
        found.append(f"{len(early)} runs were last evaluated before their end: {_some(early)}")
    for name, difference in records.duplicates[:5]:
        agreement = "" if difference is None else f"; their losses lie {difference:.2g} apart"
        found.append(f"{name} was there twice and counts once{agreement}")
    if len(records.duplicates) > 5:
        found.append(f"{len(records.duplicates) - 5} more runs were there twice")
    return found


def _some(values: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(values[:MOST_VALUES]) + (f", … {len(values)} in all" if len(values) > MOST_VALUES else "")
