"""What a grid says, on a terminal: numbers by topology and learning rate, the verdict, published figures."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from siamesenorm.lab.report import by_steps, published
from siamesenorm.lab.report.findings import Findings
from siamesenorm.lab.report.records import Records
from siamesenorm.lab.report.sentences import notes, place_text, started_with, trained_shares, what_is_shown
from siamesenorm.lab.report.statistics import Analysis
from siamesenorm.terminal import plain_table


def show(console: Console, found: Findings) -> None:
    """Everything in a screenful."""
    records = found.records
    for analysis in found.analyses:
        console.print(Text(f"\n{what_is_shown(analysis)}", style="dim"))
        console.print(scores(records, analysis))
    for metric in by_steps.measured(records):
        console.print(Text(f"\n{by_steps.METRICS[metric]}, by steps", style="dim"))
        headers, rows = by_steps.table(by_steps.by_steps(records, metric))
        table = plain_table(*headers, name="bold cyan", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print()
    for sentence in (*started_with(records), *trained_shares(records)):
        console.print(Text(sentence, style="dim"))
    for part in found.parts:
        if part.training:
            console.print(Text(f"Under {part.training}", style="bold"))
        for sentence in part.sentences:
            console.print(Text.assemble(("• ", "bold cyan"), sentence))
    for note in notes(records):
        console.print(Text(note, style="yellow"))
    if found.preset is not None:
        table = plain_table()
        for header in published.HEADERS:
            table.add_column(header, justify="right" if header in ("published", "ours") else "left")
        for row in published.published_texts(found):
            table.add_row(*map(Text, row))
        console.print(Text(f"\n{published.about(found, found.preset)}", style="dim"))
        console.print(table)


def scores(records: Records, analysis: Analysis) -> Table:
    """A row for every topology and setting, a column for every learning rate."""
    table = plain_table()
    grouped = records.groups != [""]
    if grouped:
        table.add_column("setting", overflow="fold")
    table.add_column("topology", style="bold cyan", overflow="fold")
    for lr in records.lrs:
        table.add_column(f"lr {lr:g}", justify="right", overflow="fold")
    for found in analysis.ranges:
        texts = []
        for lr in records.lrs:
            place = analysis.place(found.topology, found.setting, lr)
            style = "red" if place and place.failed else "bold" if lr == found.best else ""
            texts.append(Text(place_text(place), style=style))
        table.add_row(*([Text(found.setting)] if grouped else []), Text(found.topology), *texts)
    return table
