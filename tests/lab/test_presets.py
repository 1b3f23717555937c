"""The presets: their published figures are the paper's, and every one of their cells can be run."""

import io
from statistics import fmean

import pytest
from rich.console import Console

import siamesenorm
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.axes import make_grid
from siamesenorm.lab.compare.presets import PRESETS, SIAMESE, find_preset
from siamesenorm.lab.inspection.looking import inspection_of
from siamesenorm.lab.report.outcome import Comparison
from siamesenorm.lab.report.published import published_rows
from siamesenorm.lab.report.records import find_runs, read_records
from siamesenorm.lab.report.statistics import analyse
from siamesenorm.lab.report.terminal import show

from .folders import write_run

X = "diverged"
# Perplexities of arXiv 2602.08064, as the paper's tables have them.
RATES = {
    "lr 0.0004": {"pre": 11.21, "hybrid": 10.91, "span": 11.00, SIAMESE: 10.57},
    "lr 0.001": {
        "pre": 10.84, "post": X, "deepnorm": 11.47, "hybrid": X, "span": 10.86, "hyper": 10.73, SIAMESE: 10.43,
    },
    "lr 0.002": {
        "pre": 10.89, "post": X, "deepnorm": X, "residual_dual": 13.66, "hybrid": X, "span": X, "hyper": 10.77,
        SIAMESE: 10.48,
    },
    "lr 0.002, 350B tokens": {"pre": 9.67, "hyper": 9.57, SIAMESE: 9.42},
    "mixture of experts, lr 0.001": {"pre": 7.92, SIAMESE: 7.76},
}  # fmt: skip
DEPTHS = {
    "10 blocks": {"pre": 17.47, SIAMESE: 16.15},
    "17 blocks": {"pre": 17.23, SIAMESE: 15.69},
    "33 blocks": {"pre": 17.29, SIAMESE: 15.64},
    "80 blocks": {"pre": 18.02, SIAMESE: 15.98},
}
ABLATION = {
    "input norm no, depth scaling no": 10.88,
    "input norm yes, depth scaling no": 10.68,
    "input norm no, depth scaling yes": 10.51,
    "input norm yes, depth scaling yes": 10.43,
    "ResiDual with input norm": 11.68,
    "one HybridNorm stream with both": 10.65,
    "one HybridNorm stream without depth scaling": X,
}
ARITHMETIC = {
    "lr 0.001": {"pre": 0.270, SIAMESE: 0.294},
    "lr 0.002": {"pre": 0.281, SIAMESE: 0.396},
    "lr 0.002, 350B tokens": {"pre": 0.362, SIAMESE: 0.434},
}

STREAMS = {"final gain of X": 1.05, "final gain of Y": 0.42, "logit lens of X": 0.426, "logit lens of Y": 0.162}


def table_of(name):
    found = {}
    for figure in PRESETS[name].published:
        found.setdefault(figure.where, {})[figure.topology] = figure.value
    return found


def test_published_figures_are_the_papers():
    assert table_of("lr") == RATES
    assert table_of("depth") == DEPTHS
    assert {figure.where: figure.value for figure in PRESETS["ablation"].published} == ABLATION
    assert table_of("arithmetic") == ARITHMETIC
    assert {figure.where: figure.value for figure in PRESETS["streams"].published} == STREAMS
    assert table_of("warmup") == {"no warm-up": {SIAMESE: "trains"}, "300 steps": {"hybrid": X}}


def test_ablation_switches_what_its_rows_say():
    specs = {figure.where: figure.topology for figure in PRESETS["ablation"].published}
    assert specs["input norm no, depth scaling no"] == f"{SIAMESE},input_norm=false,depth_scaling=none"
    assert specs["input norm yes, depth scaling yes"] == SIAMESE
    assert specs["ResiDual with input norm"] == "residual_dual:input_norm=true"
    assert specs["one HybridNorm stream with both"] == "hybrid:input_norm=true,depth_scaling=sqrt(2(l+1))"
    assert specs["one HybridNorm stream without depth scaling"] == "hybrid:input_norm=true"


def test_a_preset_may_have_a_recipe_and_a_metric_of_its_own():
    preset = find_preset("arithmetic")
    assert preset.metric == "arithmetic"
    assert {cell.config.evaluation.arithmetic for cell in make_grid(preset=preset).cells()} == {400}
    assert make_grid(preset=preset, recipe="lm-tiny").recipe == "lm-tiny"


@pytest.mark.parametrize("name", PRESETS)
def test_every_cell_is_valid_and_every_figure_has_its_cell(name):
    preset = find_preset(name)
    cells = make_grid(preset=preset).cells()
    there = {(cell.topology, cell.lr, *cell.settings) for cell in cells}
    for figure in preset.published:
        if figure.lr is not None:
            assert (figure.topology, figure.lr, *filter(None, [figure.setting])) in there


def test_options_of_the_user_go_before_the_presets():
    cells = make_grid(preset=find_preset("lr"), topologies=["pre"], seeds=["3,4"]).cells()
    assert {(c.topology, c.seed) for c in cells} == {("pre", 3), ("pre", 4)}
    assert {c.lr for c in cells} == {4e-3, 1e-2, 2e-2}
    cells = make_grid(preset=find_preset("warmup"), topologies=["pre"], sets=["schedule.warmup=1,2"]).cells()
    assert {c.config.schedule.warmup for c in cells} == {1, 2}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_three_seeds(name):
    assert {cell.seed for cell in make_grid(preset=find_preset(name)).cells()} == {0, 1, 2}


def test_measured_stands_beside_published(tmp_path):
    for warmup, topology, loss in ((0, SIAMESE, 1.5), (3, "hybrid", None), (3, SIAMESE, 1.6)):
        state = "diverged" if loss is None else "finished"
        write_run(tmp_path, topology, 1e-2, loss=loss, state=state, overrides=(f"warmup={warmup}",))
    records = read_records(find_runs([tmp_path]))
    rows = published_rows(Comparison(records, analyse(records), tmp_path, preset=find_preset("warmup")))
    assert [(row["published"], row["ours"]) for row in rows] == [("trains", "1.5000"), (X, "diverged")]


def test_a_preset_shows_published_figures_on_the_terminal_too(tmp_path):
    write_run(tmp_path, SIAMESE, 1e-2, loss=1.5, overrides=("warmup=0",))
    write_run(tmp_path, SIAMESE, 1e-2, loss=1.6, overrides=("warmup=3",))
    console = Console(file=io.StringIO(), width=120)
    records = read_records(find_runs([tmp_path]))
    show(console, Comparison(records, analyse(records), tmp_path, preset=find_preset("warmup")))
    lines = console.file.getvalue().splitlines()
    assert next(line for line in lines if line.startswith("no warm-up")).split()[-5:-2] == ["trains", "1.5000", "lr"]
    assert next(line for line in lines if line.startswith("300 steps")).split()[3:5] == [X, "–"]


def test_the_streams_of_every_run_stand_beside_the_papers(tmp_path):
    tiny = {"dim": 16, "blocks": 2, "heads": 2, "ffn_dim": 32, "warmup": 1, "sequence_length": 16, "sequences": 256}
    found = siamesenorm.compare(
        preset="streams", seeds=2, steps=2, batch_size=2, folder=tmp_path, jobs=1, quiet=True, **tiny
    )
    inside = [inspection_of(run.folder) for run in found.records.runs]
    expected = {
        "final gain of X": fmean(one.fusion.gains["x"] for one in inside),
        "final gain of Y": fmean(one.fusion.gains["y"] for one in inside),
        "logit lens of X": fmean(one.lens.alone["x"][-1] for one in inside),
        "logit lens of Y": fmean(one.lens.alone["y"][-1] for one in inside),
    }
    rows = {row["where"]: row["ours"] for row in published_rows(found)}
    assert {where: text.split(" ± ")[0] for where, text in rows.items()} == {
        where: f"{value:.4f}" for where, value in expected.items()
    }


def test_unknown_preset_is_one_sentence():
    with pytest.raises(
        ConfigError, match="--preset: 'depht' is not known; it takes one of lr, depth, warmup, ablation, arithmetic"
    ):
        find_preset("depht")
