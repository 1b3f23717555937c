"""Reports: the three files agree, strings of users stay text, nothing is fetched, grids of machines are merged."""

import csv
import html.parser
import io
import json
import re
import xml.etree.ElementTree

import pytest
from rich.console import Console

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.presets import PRESETS
from siamesenorm.lab.drawing.contrast import READABLE, contrast, ink, on_scale
from siamesenorm.lab.drawing.page import Page, breakable, label, script_json
from siamesenorm.lab.report import findings
from siamesenorm.lab.report.curves import loss_curves
from siamesenorm.lab.report.figures import by_learning_rate, by_setting, cost, differences, heat_map
from siamesenorm.lab.report.outcome import Comparison
from siamesenorm.lab.report.page import what_ran
from siamesenorm.lab.report.paper_figures import export_figures, parse_formats
from siamesenorm.lab.report.records import find_runs, read_records
from siamesenorm.lab.report.sentences import notes
from siamesenorm.lab.report.statistics import analyse
from siamesenorm.lab.report.terminal import scores, show
from siamesenorm.lab.report.verdict import verdict

from .folders import FACTS, SCORES, write_grid, write_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Reader(html.parser.HTMLParser):
    """Every element with its attributes, and the text that a person would see."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.texts, self.inside = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    root = tmp_path_factory.mktemp("grid")
    write_grid(root / "cells", SCORES)
    records = read_records(find_runs([root]))
    analysis = analyse(records, baseline="pre")
    page = Comparison(records, analysis, root, title="Mine").write()
    return root, records, analysis, page.read_text(encoding="utf-8")


def test_csv_has_what_json_has(grid):
    root, records, *_ = grid
    rows = json.loads((root / "report.json").read_text())["runs"]
    read = list(csv.DictReader(io.StringIO((root / "report.csv").read_text())))
    assert len(rows) == len(read) == len(records.runs)
    for row, line in zip(rows, read, strict=True):
        assert {name: "" if value is None else str(value) for name, value in row.items()} == {
            name: value for name, value in line.items() if name in row
        }
        assert all(value == "" for name, value in line.items() if name not in row)


def test_every_number_of_the_json_lies_in_a_run_beside_it(grid):
    root, *_ = grid
    report = json.loads((root / "report.json").read_text())
    for row in report["runs"]:
        status = json.loads((root / row["folder"] / "status.json").read_text())
        assert status["evaluation"].get("loss") == row.get("evaluation.loss")


def test_page_shows_verdict_numbers_and_provenance(grid):
    *_, page = grid
    text = " ".join(Reader(page).texts)
    assert "siamese is better than pre by 0.1 nats" in text
    assert "2 diverged or stuck; 3 seeds, measured on 16,384 held-out tokens." in text
    assert "Measured on 16,384 held-out tokens, 3 seeds; first weights: init=" in text
    assert "2 and 0" in text  # of post and of pre, at 0.01, which count as the worst
    assert "2.0033 ± 0.0252" in text
    assert "2.9000 (2 of 3 diverged)" in text
    for fact in ("torch 2.13", "siamesenorm compare", "ab" * 32, "topology: "):
        assert fact in text


def test_page_asks_for_nothing(grid):
    *_, page = grid
    elements = Reader(page).elements
    assert not [tag for tag, _ in elements if tag in ("link", "img", "iframe", "object", "embed", "base", "form")]
    assert not [attrs for _, attrs in elements if {"src", "href", "srcset", "action"} & set(attrs)]
    (policy,) = [attrs["content"] for tag, attrs in elements if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_plots_are_there_with_their_data(grid):
    *_, page = grid
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])
    assert set(figures) == {"learning-rate", "curves", "differences", "heat-map", "cost"}
    ids = {attrs.get("id") for _, attrs in Reader(page).elements}
    assert {f"plot-{name}" for name in figures} <= ids
    crosses = [trace for trace in figures["learning-rate"]["data"] if trace["marker"].get("symbol") == "x"]
    assert [trace["x"] for trace in crosses] == [[1e-2]]  # where post diverged
    (heat,) = figures["heat-map"]["data"]
    assert heat["x"] == ["0.001", "0.01"]
    assert sorted(heat["y"]) == ["post", "pre", "siamese"]
    bands = [trace for trace in figures["curves"]["data"] if trace.get("fill") == "toself"]
    assert len(bands) == 6


def test_the_same_runs_give_the_same_files(grid):
    root, records, analysis, page = grid
    again = Comparison(records, analysis, root, title="Mine").write()
    assert again.read_text(encoding="utf-8") == page


# Strings of users ----------------------------------------------------------------------------------------


def test_strings_of_users_stay_text(tmp_path):
    facts = {**FACTS, "command": EVIL, "data": {EVIL: EVIL}, "versions": {EVIL: EVIL}}
    write_run(tmp_path / "x", name="-img src=x onerror=alert(3)-", facts=facts, overrides=(f"about={EVIL}",))
    (folder,) = find_runs([tmp_path])
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "message": EVIL, "state": "diverged"}))
    records = read_records([folder])
    page = Comparison(records, analyse(records), tmp_path, title=EVIL).write().read_text(encoding="utf-8")
    reader = Reader(page)
    assert [tag for tag, _ in reader.elements].count("script") == 3  # data, plotly.js, the page's own
    assert not [tag for tag, _ in reader.elements if tag == "img"]
    assert not [name for _, attrs in reader.elements for name in attrs if name.startswith("on")]
    assert EVIL in "".join(reader.texts)


def test_json_in_a_script_cannot_end_it():
    text = script_json({"name": EVIL, "comment": "<!--", "line": "\u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"name": EVIL, "comment": "<!--", "line": "\u2028"}


def test_labels_of_plots_have_no_tags():
    assert label("<b>a</b> & b") == "&lt;b&gt;a&lt;/b&gt; &amp; b"


def test_formulas_for_spreadsheets_are_defused(tmp_path):
    folder = write_run(tmp_path, name="=cmd")
    records = read_records([folder])
    Comparison(records, analyse(records), tmp_path / "out").write()
    assert "\n'=cmd," in (tmp_path / "out" / "report.csv").read_text()


def test_a_plot_has_its_name_once():
    page = Page("x").plot("a", "", "", {"data": []})
    with pytest.raises(ValueError, match="is there already"):
        page.plot("a", "", "", {"data": []})


# The command ---------------------------------------------------------------------------------------------


def test_grids_of_two_machines_become_one_report(tmp_path, capsys):
    write_grid(tmp_path / "one", {("pre", 1e-2): [2.0, 2.1], ("siamese", 1e-2): [1.9, 2.0]})
    write_run(tmp_path / "two", "pre", 1e-2, 1, 2.1)
    write_run(tmp_path / "two", "pre", 1e-2, 2, 2.2)
    write_run(tmp_path / "two", "siamese", 1e-2, 2, 2.1)
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert main(["report", *folders, "--out", str(tmp_path / "out"), "--title", "Both"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert len(report["runs"]) == 6
    assert report["analysis"]["best_lr"][0]["difference"]["count"] == 3
    assert any("was there twice and counts once; their losses lie 0 apart" in note for note in report["notes"])
    assert "counts once" in " ".join(capsys.readouterr().out.split())


def test_pre_is_the_baseline_of_loose_runs(tmp_path):
    write_grid(tmp_path, {("deepnorm", 1e-2): [2.0], ("pre", 1e-2): [2.1]})
    assert main(["report", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["analysis"]["baseline"] == "pre"


def test_a_presets_grid_shows_what_was_published(tmp_path):
    folder = write_run(tmp_path / "cells", "pre", 4e-3)
    (tmp_path / "grid.json").write_text(json.dumps({"preset": "lr", "cells": [folder.name]}))
    assert main(["report", str(tmp_path)]) == 0
    text = " ".join(Reader((tmp_path / "report.html").read_text(encoding="utf-8")).texts)
    assert "Published beside measured" in text
    assert "11.21" in text
    assert len(json.loads((tmp_path / "report.json").read_text())["published"]) == len(PRESETS["lr"].published)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is not a folder"),
        (["."], "holds no run"),
        (["{run}", "--metric", "beauty"], "--metric: 'beauty' is not known"),
        (["{run}", "--baseline", "post"], "is not among the runs"),
        (["{run}", "--figures", "gif"], "--figures: 'gif' is not known; it takes one of png, svg, pdf"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["report", *(part.format(run=run) for part in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(run.glob("report.*"))


# Plots for papers ----------------------------------------------------------------------------------------


def test_plots_are_drawn_as_png_and_svg(grid, tmp_path):
    _, records, analysis, _ = grid
    written = export_figures(Comparison(records, analysis, tmp_path), parse_formats("png,svg"))
    assert sorted(path.name for path in written) == sorted(
        f"{name}.{kind}"
        for name in ("curves", "learning_rate", "differences", "heat_map", "cost")
        for kind in ("png", "svg")
    )
    for path in written:
        if path.suffix == ".png":
            assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        else:
            assert xml.etree.ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"siamesenorm\[plot\]"):
        parse_formats("png")


def test_crosses_of_topologies_that_failed_at_one_rate_do_not_hide_each_other(tmp_path):
    write_grid(tmp_path, {**SCORES, ("siamese", 1e-1): [None], ("pre", 1e-1): [None], ("post", 1e-1): [None]})
    records = read_records(find_runs([tmp_path]))
    figure = by_learning_rate(records, analyse(records, baseline="pre"))
    crosses = [line for line in figure["data"] if line["mode"] == "markers"]
    assert len({line["y"][0] for line in crosses}) == 3
    (note,) = figure["layout"]["annotations"]
    assert note["y"] == max(line["y"][0] for line in crosses)
    assert min(line["y"][0] for line in crosses) > figure["layout"]["shapes"][0]["y0"] > 2.9


@pytest.mark.parametrize(("highest", "ticks"), [(9.0, None), (90.0, "D2")])
def test_losses_of_more_than_a_decade_have_ticks_that_cannot_be_misread(tmp_path, highest, ticks):
    write_run(tmp_path, losses=[highest, *[2.0] * 39])
    records = read_records(find_runs([tmp_path]))
    axis = loss_curves(records, analyse(records))["layout"]["yaxis"]
    assert axis["type"] == "log"
    assert axis.get("dtick") == ticks


def test_long_names_may_be_broken_between_options():
    assert breakable("siamese:x=a,y=<b>") == "siamese:<wbr>x=a,<wbr>y=&lt;b&gt;"


@pytest.mark.parametrize("width", [60, 80])
def test_no_number_of_the_table_is_cut_off_on_a_narrow_terminal(tmp_path, width):
    rates = {("siamese:depth_scaling=none,input_norm=false", lr): [2.5, None, 2.25] for lr in (1e-3, 1e-2)}
    write_grid(tmp_path, rates)
    records = read_records(find_runs([tmp_path]))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(scores(records, analyse(records)))
    text = console.export_text()
    assert "…" not in text
    assert text.count("2.3750 ± 0.1768") == text.count("diverged)") == 2
    assert max(map(len, text.splitlines())) <= width


def test_the_page_says_what_all_runs_were(grid, tmp_path):
    _, records, *_ = grid
    size = "Language, 12 blocks, width 64, init mitchell, 40 steps, 16 samples per step"
    assert what_ran(records) == f"{size}, trained on python-code"
    write_run(tmp_path, overrides=("model.blocks=2", "data.train=/some where/corpus"), loss=2.0)
    write_run(tmp_path, overrides=("model.blocks=3", "data.train=/some where/corpus"), loss=2.0)
    told = what_ran(read_records(find_runs([tmp_path])))
    assert "blocks" not in told
    assert told.endswith("trained on corpus")


def test_terminal_and_page_say_by_which_rule_weights_started(grid, tmp_path):
    """A comparison's baseline is the one its authors know only where first logits are left to the published rule."""

    def said(records):
        console = Console(width=120, record=True, file=io.StringIO())
        show(console, Comparison(records, analyse(records), tmp_path))
        return " ".join(console.export_text().split()), what_ran(records)

    _, records, *_ = grid
    for text in said(records):
        assert re.search("init.mitchell", text)
        assert "small" not in text
    assert not any("first_logits" in note for note in notes(records))
    for seed in (0, 1):
        write_run(tmp_path, seed=seed, overrides=("first_logits=small",))
    small = read_records(find_runs([tmp_path]))
    for text in said(small):
        assert "small" in text
    assert "2 of 2 runs start with small first logits" in said(small)[0]
    assert "first_logits=standard" in notes(small)[0]


def test_of_many_curves_the_best_and_the_failed_are_shown_first(tmp_path):
    write_grid(tmp_path, {**SCORES, ("pre", 1e-1): [2.6], ("siamese", 1e-1): [2.2], ("siamese", 3e-1): [2.9]})
    records = read_records(find_runs([tmp_path]))
    lines = [line for line in loss_curves(records, analyse(records, baseline="pre"))["data"] if "name" in line]
    assert len(lines) == 9
    shown = {line["name"] for line in lines if line["visible"] is True}
    assert shown == {"pre 0.01", "siamese 0.01", "post 0.001", "post 0.01"}


def test_a_grid_of_settings_at_one_learning_rate_is_drawn_over_its_settings(tmp_path):
    for topology, losses in {"pre": (2.5, 2.4, 2.6), "siamese": (2.2, 2.1, None)}.items():
        for blocks, loss in zip((2, 4, 8), losses, strict=True):
            state = "diverged" if loss is None else "finished"
            write_run(tmp_path, topology, loss=loss, state=state, overrides=(f"blocks={blocks}",))
    records = read_records(find_runs([tmp_path]))
    analysis = analyse(records, baseline="pre")
    lines = {
        line["name"]: dict(zip(line["x"], line["y"], strict=True)) for line in by_setting(records, analysis)["data"]
    }
    assert lines == {
        "pre": {"blocks=2": 2.5, "blocks=4": 2.4, "blocks=8": 2.6},
        "siamese": {"blocks=2": 2.2, "blocks=4": 2.1},
    }
    heat = heat_map(records, analysis)["data"][0]
    assert (sorted(heat["x"]), heat["y"]) == (["blocks=2", "blocks=4", "blocks=8"], list(reversed(records.topologies)))
    (points,) = differences(records, analysis)["data"]
    assert len(points["y"]) == 3  # of the only rate, once
    curves = [line for line in loss_curves(records, analysis)["data"] if "name" in line]
    assert len({line["line"]["dash"] for line in curves}) == 3
    page = Comparison(records, analysis, tmp_path).write().read_text(encoding="utf-8")
    assert "Held-out loss by setting" in page
    assert "Held-out loss by learning rate" not in page
    written = {path.name for path in export_figures(Comparison(records, analysis, tmp_path), ["svg"])}
    assert "settings.svg" in written
    assert "learning_rate.svg" not in written


def test_optimizers_have_verdicts_of_their_own(tmp_path):
    """Opposite answers stand under their optimisers, also where another field goes along with them."""
    gains, folders = {"adamw": -0.2, "muon": 0.3}, []
    for kind, gain in gains.items():
        for seed in range(3):
            fields = (f"optimizer.kind={kind}", f"weight_decay={0.1 if kind == 'adamw' else 0.2}")
            for topology, loss in (("pre", 2.0), ("siamese", 2.0 + gain)):
                folders.append(write_run(tmp_path, topology, seed=seed, loss=loss + 0.01 * seed, overrides=fields))
    records = read_records(folders)
    analysis = analyse(records)
    assert records.groups == ["optimizer=adamw", "optimizer=muon"]
    Comparison(records, analysis, tmp_path).write()
    sentences = json.loads((tmp_path / "report.json").read_text())["verdict"]
    sides = [s.partition("siamese is ")[::2] for s in sentences if "siamese is " in s]
    assert [(where, rest.split()[0]) for where, rest in sides] == [
        ("optimizer=adamw: ", "better"),
        ("optimizer=muon: ", "worse"),
    ]
    page = "\n".join(Reader((tmp_path / "report.html").read_text()).texts)
    under_adamw, _, under_muon = page.partition("Verdict under adamw")[2].partition("Verdict under muon")
    assert "optimizer=muon" not in under_adamw
    assert "0.300 worse than pre" in under_muon.partition("Training loss")[0]
    console = Console(width=120, record=True, file=io.StringIO())
    show(console, Comparison(records, analysis, tmp_path))
    text = console.export_text()
    assert text.index("Under adamw") < text.index("optimizer=adamw: siamese is") < text.index("Under muon")


def test_digits_can_be_read_on_what_they_stand_on(tmp_path):
    """WCAG's 4.5 on every cell of the heat map and every bar, whichever way is better; known contrasts first."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # the well-known grey that just fails
    for step in range(256):
        grey = f"#{step:02x}{step:02x}{step:02x}"
        assert contrast(ink(grey), grey) >= READABLE
    rates = [10.0**-power for power in range(1, 9)]
    write_grid(tmp_path, {("pre", lr): [2.0 + number / 7] for number, lr in enumerate(rates)})
    records = read_records(find_runs([tmp_path]))
    for metric in ("loss", "perplexity"):
        analysis = analyse(records, metric=metric)
        figure = heat_map(records, analysis)
        (heat,) = figure["data"]
        assert "texttemplate" not in heat  # plotly's own choice is grey on green
        low, high = min(heat["z"][0]), max(heat["z"][0])
        notes = {note["x"]: note for note in figure["layout"]["annotations"]}
        assert len(notes) == len(rates)
        for column, value in enumerate(heat["z"][0]):
            share = (value - low) / (high - low)
            shown = on_scale(1 - share if heat["reversescale"] else share)
            assert contrast(notes[column]["font"]["color"], shown) >= READABLE
            assert notes[column]["text"] == heat["text"][0][column] != ""
        for bar in cost(records, analysis)["data"]:
            assert contrast(bar["insidetextfont"]["color"], bar["marker"]["color"]) >= READABLE


def test_a_model_that_does_not_use_its_topology_is_found_out(tmp_path):
    """Two names for the same runs have the same numbers to the last digit, which no two topologies have."""
    same = {("pre", 1e-3): [2.5, 2.4], ("siamese", 1e-3): [2.5, 2.4], ("post", 1e-3): [2.5, 2.3]}
    write_grid(tmp_path, same)
    records = read_records(find_runs([tmp_path]))
    said = [sentence for sentence in verdict(analyse(records, baseline="pre")) if "does not seem to depend" in sentence]
    assert said == [
        "Every run of siamese ended with the very number of pre's: the model does not seem to depend on the topology "
        "that it is given."
    ]


def test_page_files_and_terminal_share_one_verdict(grid, tmp_path, monkeypatch):
    """What runs say is computed once, however many ways it is shown."""
    calls = []
    monkeypatch.setattr(findings, "verdict", lambda analysis: calls.append(analysis) or verdict(analysis))
    _, records, *_ = grid
    found = Comparison(records, analyse(records), tmp_path)
    found.write()
    show(Console(file=io.StringIO()), found)
    assert found.verdict
    assert found._repr_html_()
    assert len(calls) == 1
