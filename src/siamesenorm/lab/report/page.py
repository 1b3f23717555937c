"""The report as people see it: verdict, plots, published figures, numbers, and how to make it again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from siamesenorm.lab.drawing.page import Card, Page
from siamesenorm.lab.report import by_steps, curves, figures, published
from siamesenorm.lab.report.findings import Findings
from siamesenorm.lab.report.records import Records, Run
from siamesenorm.lab.report.sentences import (
    first_weights,
    notes,
    score_rows,
    started_with,
    trained_shares,
    what_is_shown,
)
from siamesenorm.lab.report.statistics import Analysis, Range
from siamesenorm.lab.report.verdict import in_few_words, interval_text
from siamesenorm.train.config import RunConfig
from siamesenorm.train.yaml import write_yaml

MOST_CARDS, MOST_ROWS = 6, 12
"""Topologies that are shown side by side, and runs that are listed unasked."""


def make_page(found: Findings) -> Page:
    """The report as people see it."""
    records, analysis = found.records, found.analysis
    states = [run.state for run in records.runs]
    finished = states.count("finished")
    ended = f"{len(states)} runs, {finished} finished, {len(states) - finished} diverged or stuck"
    known = analysis.conditions
    page = Page(found.heading, f"{what_ran(records)}. {ended}; {known.seeds_text}, measured on {known.size}.")
    for part in found.parts:
        page.heading(f"Verdict under {part.training}" if part.training else "Verdict")
        page.cards(cards(records, part.analysis)).bullets(part.sentences, "verdict")
    for note in notes(records):
        page.paragraph(note, "warning")
    for sentence in trained_shares(records):
        page.paragraph(sentence)
    _grafts(page, found)
    _plots(page, records, analysis)
    if found.preset is not None:
        page.heading("Published beside measured").paragraph(published.about(found, found.preset))
        page.table(published.HEADERS, published.published_texts(found), words=2)
    _numbers(page, found)
    _reproduce(page, found)
    return page


def what_ran(records: Records) -> str:
    """Task, size, length and data, as far as all runs agree."""
    configs = [run.config for run in records.runs]

    def same(name: str, values: Iterable[object]) -> list[str]:
        found = {str(value) for value in values}
        return [name.format(*found)] if len(found) == 1 and found != {"None"} else []

    facts = [
        *same("{}", (config.task.capitalize() for config in configs)),
        *same("{} blocks", (getattr(config.model, "blocks", None) for config in configs)),
        *same("width {}", (getattr(config.model, "dim", None) for config in configs)),
        *same("init {}", (first_weights(config) for config in configs)),
        *same("{} steps", (f"{config.steps:,}" for config in configs)),
        *same("{} samples per step", (_samples(config) for config in configs)),
        *same("trained on {}", (corpora(config) for config in configs)),
    ]
    return ", ".join(facts)


def _samples(config: RunConfig) -> str | None:
    """Nothing for runs that were made elsewhere, which need not say it."""
    return f"{config.train.batch_size:,}" if config.train.batch_size > 1 else None


def corpora(config: RunConfig) -> str | None:
    """Names of what was trained on, without the folders they lie in."""
    named = getattr(config.data, "train", None)
    names = [named] if isinstance(named, str) else named or ()
    return " and ".join(name if name.count("/") == 0 else Path(name).name for name in names) or None


def cards(records: Records, analysis: Analysis) -> list[Card]:
    """The answer at a glance, where it has few parts: every topology at its best."""
    if len({found.setting for found in analysis.ranges}) > 1 or not 1 < len(analysis.ranges) <= MOST_CARDS:
        return []
    return [_card(records, analysis, found) for found in analysis.ranges]


def _card(records: Records, analysis: Analysis, found: Range) -> Card:
    colour = figures.colours(records)[found.topology]
    reach = "stable at every learning rate"
    if found.failing:
        reach = f"stable at {len(found.stable)} of {len(found.tried)} learning rates"
    place = None if found.best is None else analysis.place(found.topology, found.setting, found.best)
    if place is None or place.mean is None:
        return Card(found.topology, "–", [reach], colour)
    spread = "" if place.spread is None else f" ± {place.spread:.3f}"
    lines = [f"held-out {analysis.metric}{spread} at lr {place.lr:g}"]
    against = next((c for c in analysis.best_lr if c.topology == found.topology), None)
    if found.topology == analysis.baseline:
        lines.append("the baseline")
    elif against is not None:
        lines.append(in_few_words(against, analysis))
    return Card(found.topology, f"{place.mean:.3f}", [*lines, *([reach] if len(found.tried) > 1 else [])], colour)


def _plots(page: Page, records: Records, analysis: Analysis) -> None:
    metric, dashes = analysis.metric, "learning rate" if len(records.lrs) > 1 else "setting"
    page.heading("Plots")
    if figures.by_settings(records):
        page.plot(
            "settings",
            f"Held-out {metric} by setting",
            "Means over the seeds that reached their end with their standard deviation, all at the learning rate "
            f"{records.lrs[0]:g}.",
            figures.by_setting(records, analysis),
        )
    else:
        page.plot(
            "learning-rate",
            f"Held-out {metric} by learning rate",
            "Means over the seeds that reached their end with their standard deviation; a cross marks learning rates "
            "at which runs diverged.",
            figures.by_learning_rate(records, analysis),
        )
    page.plot(
        "curves",
        "Training loss",
        f"Colour is the topology, dashes are the {dashes}, bands reach from the lowest to the highest seed. "
        "Click a name to show or hide it, twice to see it alone.",
        curves.loss_curves(records, analysis),
        height=460,
    )
    for other in by_steps.measured(records):
        page.plot(
            f"{other}-by-steps",
            f"{by_steps.METRICS[other]}, by steps",
            f"Means over seeds at every evaluation; colour is the topology, dashes are the {dashes}.",
            curves.held_out_curves(records, other),
        )
    if analysis.same_lr:
        figure = figures.differences(records, analysis)
        names = [name for line in figure["data"] for name in line["y"]]
        page.plot(
            "differences",
            f"Difference from {analysis.baseline}, seed by seed",
            f"Bars are {analysis.confidence:.0%} confidence intervals by Student's t, each for itself; with one seed "
            "there are none. A run that diverged counts as the worst. The verdict corrects for how many there are.",
            figure,
            height=max(220, 80 + sum(30 + 16 * name.count("<br>") for name in names)),
        )
    page.plot(
        "heat-map",
        "The grid",
        f"Held-out {metric}, the mean over the seeds that reached their end.",
        figures.heat_map(records, analysis),
        height=max(220, 120 + 44 * len(records.topologies if figures.by_settings(records) else analysis.ranges)),
    )
    page.plot(
        "cost",
        "Cost",
        f"Medians over the runs, {analysis.baseline} being 100 %. Memory is counted above the idle process.",
        figures.cost(records, analysis),
        height=340,
    )


def _grafts(page: Page, found: Findings) -> None:
    """The model that all runs went on from, and the certificates of its grafts."""
    sentences = started_with(found.records)
    if not sentences:
        return
    page.heading("Where they start")
    for sentence in sentences:
        page.paragraph(sentence)
    rows = []
    for graft in found.grafts:
        for topology, certificate in graft.get("certificates", {}).items():
            for precision in ("fp32", "bf16"):
                rows.append((topology, precision, *(_agreement(certificate.get(precision), n) for n in AGREEMENT)))
    if rows:
        page.table(
            ("graft", "precision", *AGREEMENT.values()),
            rows,
            caption="Certificates: how far a graft, not yet trained, says the same of held-out text as its source.",
            words=2,
        )


AGREEMENT = {
    "largest_kl": "largest KL",
    "mean_kl": "mean KL",
    "top1_agreement": "top-1 agreement",
    "perplexity_before": "perplexity before",
    "perplexity_after": "after",
}


def _agreement(certificate: object, name: str) -> str:
    value = certificate.get(name) if isinstance(certificate, dict) else None
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–"


def _numbers(page: Page, found: Findings) -> None:
    records, analysis = found.records, found.analysis
    page.heading("Numbers")
    grouped = records.groups != [""]
    for each in found.analyses:
        headers, rows = score_rows(records, each)
        caption = f"{what_is_shown(each)[0].upper()}{what_is_shown(each)[1:]}."
        page.table(headers, rows, caption=caption, words=2 if grouped else 1)
    for metric in by_steps.measured(records):
        titles, lines = by_steps.table(by_steps.by_steps(records, metric))
        page.table(titles, lines, caption=f"{by_steps.METRICS[metric]}, means over seeds.", words=1)
    if analysis.same_lr:
        page.table(
            (
                *(["setting"] if grouped else []),
                "topology",
                "lr",
                f"{analysis.baseline}'s lr",
                "difference",
                "interval",
                "p, corrected",
                "seeds",
                "diverged",
            ),
            [
                (
                    *([c.setting] if grouped else []),
                    c.topology,
                    f"{c.lr:g}",
                    f"{c.baseline_lr:g}",
                    f"{c.difference.mean:+.4f}",
                    interval_text(c.difference),
                    "–" if c.corrected_p is None else f"{c.corrected_p:.2g}",
                    str(c.difference.count),
                    f"{c.lost} and {c.baseline_lost}" if c.lost or c.baseline_lost else "–",
                )
                for c in (*analysis.best_lr, *analysis.same_lr)
            ],
            caption=f"Paired differences from {analysis.baseline}: each at its best learning rate, then at the same. "
            "Intervals are each for itself; p is corrected by Holm for the comparisons of its part. Runs that "
            f"diverged, the topology's and {analysis.baseline}'s, count as the worst.",
            words=2 if grouped else 1,
        )
    page.table(
        (*(["setting"] if grouped else []), "topology", "step ms", "processor ms per step", "memory MiB"),
        [
            (
                *([c.setting] if grouped else []),
                c.topology,
                _milli(c.step_seconds),
                _milli(c.processor_seconds),
                _mebi(c.memory_bytes),
            )
            for c in analysis.costs
        ],
        caption="Medians over the runs of a topology.",
        words=2 if grouped else 1,
    )
    page.paragraph(
        "Every run with its numbers: report.csv and report.json, beside this page; every step: metrics.jsonl of a run."
    )
    page.table(
        ("run", "state", "folder", analysis.metric, "step"),
        [
            (
                run.name,
                run.state,
                os.path.relpath(run.folder, found.folder),
                _score(run, analysis.metric),
                f"{run.step}",
            )
            for run in records.runs
        ],
        words=3,
        folded=f"All {len(records.runs)} runs" if len(records.runs) > MOST_ROWS else "",
    )


def _reproduce(page: Page, found: Findings) -> None:
    facts = found.provenance
    page.heading("Make it again")
    page.paragraph("A run alone: siamesenorm train FOLDER/config.yaml --run NEW, with a folder of the table above.")
    for command in facts["commands"]:
        page.details("Command", command)
    versions = [f"{name} {version}" for known in facts["versions"] for name, version in known.items()]
    machines = [f"{m['processor']}, {m['cores']} cores, {m['system']}" for m in facts["machines"]]
    page.details("Versions and machines", "\n".join([*dict.fromkeys(versions), *machines]) or "not recorded")
    hashes = "\n".join(f"{digest}  {name}" for name, digest in facts["data"].items())
    page.details("Data, SHA-256", hashes or "not recorded")
    page.details("Configuration of the first run", write_yaml(found.records.runs[0].config.as_dict()))


def _milli(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.1f}"


def _mebi(count: float | None) -> str:
    return "–" if count is None else f"{count / 2**20:.1f}"


def _score(run: Run, metric: str) -> str:
    value = run.evaluation.get(metric)
    return "–" if value is None or run.state == "diverged" else f"{value:.4f}"
