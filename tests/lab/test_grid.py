"""From what users write to cells: every combination once, equal data for equal seeds, errors in one sentence."""

import re

import numpy as np
import pytest

from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare import grid as grid_module
from siamesenorm.lab.compare.axes import (
    depth_axis,
    make_grid,
    parse_numbers,
    parse_setting,
    parse_topologies,
    split_values,
)
from siamesenorm.lab.compare.grid import Grid
from siamesenorm.tasks import find_task
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.tasks.metrics import LEAST
from siamesenorm.train.recipes import recipe_names, resolve

SMALL = ("train.steps=40", "schedule.warmup=4")


def cells_of(**wanted):
    return Grid("lm-tiny", **{"topologies": ("pre",), "lrs": (1e-2,), "overrides": SMALL, **wanted}).cells()


def test_every_combination_is_a_cell_once():
    axis = parse_setting("lm-tiny", "warmup=0,3")
    cells = cells_of(topologies=("pre", "siamese"), lrs=(1e-3, 1e-2, 3e-2), seeds=(0, 7), axes=(axis,))
    found = {(c.topology, c.lr, c.seed, c.config.schedule.warmup) for c in cells}
    assert len(cells) == len(found) == 2 * 3 * 2 * 2
    assert found == {
        (t, lr, s, w) for t in ("pre", "siamese") for lr in (1e-3, 1e-2, 3e-2) for s in (0, 7) for w in (0, 3)
    }


def test_pairs_stand_next_to_each_other_and_a_seed_is_whole_before_the_next():
    cells = cells_of(topologies=("pre", "siamese"), lrs=(1e-3, 1e-2), seeds=(0, 1))
    assert [c.seed for c in cells] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [c.topology for c in cells] == ["pre", "siamese"] * 4


def test_names_are_plain_and_of_one_configuration():
    specs = ("siamese", "siamese:depth_scaling=none", "siamese:x=deepnorm,y=sandwich")
    names = [c.name for c in cells_of(topologies=specs)]
    names += [c.name for c in cells_of(topologies=specs, overrides=(*SMALL, "model.dim=32"))]
    assert len(set(names)) == 6
    assert all(re.fullmatch(r"[\w.=+-]{1,100}", name) for name in names)


def test_a_name_does_not_depend_on_what_is_only_shown():
    (one,), (other,) = cells_of(), cells_of(overrides=(*SMALL, "logging.every=3", "checkpoint.keep=5"))
    assert one.name == other.name


def test_the_same_seed_gives_every_topology_the_same_data():
    orders = {}
    for cell in cells_of(topologies=("pre", "post", "siamese"), seeds=(0, 1)):
        loader = find_task("language")(cell.config).loader(rank=0, world_size=1, sample=0, pin_memory=False)
        orders[cell.topology, cell.seed] = np.stack([next(loader)["input_ids"].numpy() for _ in range(3)])
        loader.close()
    for seed in (0, 1):
        assert np.array_equal(orders["pre", seed], orders["siamese", seed])
        assert np.array_equal(orders["pre", seed], orders["post", seed])
    assert not np.array_equal(orders["pre", 0], orders["pre", 1])


def test_default_grid_is_pre_post_and_siamese_over_rates_and_seeds():
    cells = make_grid().cells()
    assert {c.topology for c in cells} == {"pre", "post", "siamese"}
    assert len({c.lr for c in cells}) == 3
    assert len({c.seed for c in cells}) == 3


def test_another_recipe_is_compared_at_its_own_rate():
    cells = make_grid(recipe="dit-digits", topologies=["pre,siamese"]).cells()
    assert {c.lr for c in cells} == {2e-3}
    assert len(cells) == 2 * 3
    assert {c.lr for c in make_grid(recipe="lm-tiny", lrs=["1e-3,2e-3"]).cells()} == {1e-3, 2e-3}


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_measures_on_enough_to_be_compared(name):
    config = resolve(name, [])
    evaluation = config.evaluation
    if config.task == "language":
        tokens = None if evaluation.sequences is None else evaluation.sequences * config.data.sequence_length
        sizes = {"tokens": tokens, "questions": evaluation.arithmetic or None}
    else:
        sizes = {"images": evaluation.images, "samples": getattr(evaluation, "samples", 0) or None}
    assert not [of for of, size in sizes.items() if size is not None and size < LEAST[of]]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("pre,post", ["pre", "post"]),
        ("pre, siamese:depth_scaling=none", ["pre", "siamese:depth_scaling=none"]),
        ("siamese:form=plain,input_norm=true,pre", ["siamese:form=plain,input_norm=true", "pre"]),
        (
            "siamese:input_norm=false,x=post:norm_at=end,hyper:rate=4",
            ["siamese:input_norm=false,x=post:norm_at=end", "hyper:rate=4"],
        ),
    ],
)
def test_commas_between_topologies_and_between_their_options(text, parts):
    assert list(parse_topologies([text])) == parts


def test_commas_inside_brackets_do_not_separate():
    assert split_values("[a,b],[c]") == ["[a,b]", "[c]"]
    assert split_values("0, 30") == ["0", "30"]


def test_depths_keep_the_number_of_parameters():
    def parameters(cell):
        m = cell.config.model
        return m.blocks * (4 * m.dim**2 + 3 * m.dim * m.ffn_dim) + 2 * m.vocab_size * m.dim

    axis = depth_axis("lm-tiny", (), (4, 12, 24, 48))
    cells = cells_of(axes=(axis,))
    assert [c.config.model.blocks for c in cells] == [4, 12, 24, 48]
    assert cells[1].config.model.dim == 64  # the recipe's own
    for cell in cells:
        assert parameters(cell) == pytest.approx(parameters(cells[1]), rel=0.15)
        assert cell.config.model.ffn_dim / cell.config.model.dim == pytest.approx(3, rel=0.02)


def test_optimizers_are_an_axis():
    asked = {"topologies": ["pre,siamese"], "lrs": ["1e-3"], "seeds": ["0"]}
    cells = make_grid(**asked, optimizers=["adamw,muon"]).cells()
    found = [(cell.settings, cell.config.optimizer.kind, cell.topology) for cell in cells]
    assert found == [((f"optimizer={o}",), o, t) for o in ("adamw", "muon") for t in ("pre", "siamese")]
    (one, _) = make_grid(**asked, optimizers=["muon"]).cells()
    assert (one.settings, one.config.optimizer.kind) == ((), "muon")


BAD = {
    "--topologies": ({"topologies": ["pre,siamse"]}, "siamse"),
    "empty topology": ({"topologies": ["pre,"]}, "unknown name ''"),
    "--lrs": ({"lrs": ["1e-3,fast"]}, "--lrs: 'fast' is not allowed"),
    "--lrs zero": ({"lrs": ["0"]}, "optimizer.lr"),
    "--lrs infinite": ({"lrs": ["inf"]}, "--lrs: 'inf'"),
    "--seeds": ({"seeds": ["0,1.5"]}, "--seeds: '1.5' is not allowed; it takes whole numbers"),
    "twice": ({"seeds": ["0,0"]}, "is there twice"),
    "--set": ({"sets": ["warmup"]}, "it takes field=value"),
    "--set unknown": ({"sets": ["warmpu=3"]}, "did you mean schedule.warmup?"),
    "--set topology": ({"sets": ["topology=pre,post"]}, "use --topologies"),
    "--set lr": ({"sets": ["optimizer.lr=1"]}, "use --lrs"),
    "--set twice": ({"sets": ["warmup=1,2", "schedule.warmup=3"]}, "schedule.warmup is given twice"),
    "--set value": ({"sets": ["warmup=-1,3"]}, "schedule.warmup"),
    "--optimizers": ({"optimizers": ["adamw,sgd"]}, "optimizer.kind: 'sgd' is not allowed"),
    "--optimizers twice": ({"optimizers": ["adamw"], "sets": ["optimizer.kind=muon"]}, "optimizer.kind is given twice"),
    "nothing measured": ({"sets": ["evaluation.every=null"]}, "evaluation.every: null is not allowed in a comparison"),
    "--depths": ({"depths": ["0,4"]}, "--depths: 0 is not allowed"),
    "recipe": ({"recipe": "nothing"}, "unknown name 'nothing'"),
    "too many": ({"seeds": [",".join(map(str, range(5000)))]}, "cells are not allowed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case):
    wanted, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make_grid(**wanted).cells()
    assert "\n" not in str(caught.value)


def test_numbers_may_stand_in_several_options():
    assert parse_numbers(["1e-3,2e-3", "4e-3"], "--lrs", float) == (1e-3, 2e-3, 4e-3)


def test_negative_numbers_are_refused():
    with pytest.raises(ConfigError, match="--seeds: '-1'"):
        parse_numbers(["-1"], "--seeds", int)


def test_a_grid_counted_in_epochs_opens_its_data_once(monkeypatch):
    opened = []
    monkeypatch.setattr(ClassificationTask, "epoch_samples", property(lambda task: opened.append(task) or 640))
    sets = ["epochs=3", "warmup_epochs=0.5", "batch_size=64"]
    cells = make_grid(recipe="deit-digits", topologies=["pre,siamese"], lrs=["1e-3"], seeds=["0,1"], sets=sets).cells()
    assert [cell.config.steps for cell in cells] == [30] * 4
    assert len(opened) == 1


def test_a_grid_resolves_its_cells_once(monkeypatch):
    calls = []
    monkeypatch.setattr(grid_module, "resolve", lambda *given: calls.append(given) or resolve(*given))
    grid = Grid("lm-tiny", ("pre", "post"), (1e-3,), seeds=(0, 1))
    assert grid.cells() == grid.cells()
    assert len(calls) == 4
