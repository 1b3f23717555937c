"""Held-out numbers by steps, as the report and the terminal show them."""

import json

from rich.console import Console

from siamesenorm.lab.report import by_steps, curves
from siamesenorm.lab.report.outcome import Comparison
from siamesenorm.lab.report.records import find_runs, read_records
from siamesenorm.lab.report.statistics import analyse
from siamesenorm.lab.report.terminal import show

from .folders import write_run


def add_evaluations(folder, values):
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps({"step": s, "evaluation": {"frechet": v}}) + "\n" for s, v in values.items())


def records_of(tmp_path):
    for topology, seed, values in (
        ("pre", 0, {20: 8.0, 40: 4.0}),
        ("pre", 1, {20: 6.0, 40: 2.0}),
        ("siamese", 0, {20: 3.0, 40: 1.0}),
    ):
        add_evaluations(write_run(tmp_path, topology, seed=seed), values)
    return read_records(find_runs([tmp_path]))


def test_a_line_is_the_mean_over_seeds_at_every_step(tmp_path):
    records = records_of(tmp_path)
    assert by_steps.measured(records) == ["frechet"]
    lines = {line.topology: line.values for line in by_steps.by_steps(records, "frechet")}
    assert lines == {"pre": {20: 7.0, 40: 3.0}, "siamese": {20: 3.0, 40: 1.0}}


def test_terminal_and_plot_show_the_same_lines(tmp_path):
    records = records_of(tmp_path)
    console = Console(width=100, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as shown:
        show(console, Comparison(records, analyse(records), tmp_path))
    text = shown.get()
    assert "step 20" in text
    assert "7" in text
    plotted = {trace["name"]: (trace["x"], trace["y"]) for trace in curves.held_out_curves(records, "frechet")["data"]}
    assert plotted["siamese 0.01"] == ([20, 40], [3.0, 1.0])


def test_what_is_no_number_is_left_out(tmp_path):
    add_evaluations(write_run(tmp_path, "pre"), {20: 8.0, 40: None})
    (line,) = by_steps.by_steps(read_records(find_runs([tmp_path])), "frechet")
    assert line.values == {20: 8.0}


def test_runs_without_such_numbers_show_none(tmp_path):
    write_run(tmp_path, "pre")
    assert by_steps.measured(read_records(find_runs([tmp_path]))) == []
