"""Held-out numbers: every one that a task gives is declared by it, with its direction and what it is measured on."""

import numpy as np
import pytest

from siamesenorm.data import ValidationData
from siamesenorm.data.packing import IGNORED
from siamesenorm.tasks import TASKS, find_task
from siamesenorm.tasks.base import Ranks
from siamesenorm.tasks.metrics import DECIDED_BY, HARNESS, LEAST, harness_metric
from siamesenorm.train.recipes import resolve

SMALL = ["dim=16", "blocks=2", "heads=2", "ffn_dim=32", "evaluation.every=1", "train.batch_size=4"]
TEXT = [*SMALL, "sequence_length=16", "evaluation.at_once=64"]
RUNS = {
    "text": ("lm-tiny", [*TEXT, "sequences=8", "data.train=[python-docs]"]),
    "whole text": ("lm-tiny", [*TEXT, "evaluation.sequences=null", "data.train=[arithmetic:problems=2400]"]),
    "texts": ("lm-tiny", [*TEXT, "sequences=8", "data.train=[python-docs,arithmetic]"]),
    "masked": ("lm-tiny", [*TEXT, "sequences=40", "data.train=[arithmetic]", "document_masking=true"]),
    "questions": ("lm-tiny", [*TEXT, "sequences=8", "data.train=[arithmetic]", "evaluation.arithmetic=12"]),
    "classes": ("deit-digits", [*SMALL, "images=40"]),
    "noise": ("dit-digits", [*SMALL, "images=40", "samples=0"]),
    "variances": ("dit-digits", [*SMALL, "images=40", "samples=0", "learn_sigma=false"]),
}


@pytest.mark.parametrize("kind", RUNS)
def test_what_is_measured_is_declared_and_known_before_training(kind):
    recipe, overrides = RUNS[kind]
    config = resolve(recipe, overrides)
    task = find_task(config.task)(config)
    found = task.evaluate(task.build_model().eval(), Ranks(final=True))
    assert set(found) == set(task.measures())
    sizes = task.held_out_sizes()
    for name, metric in task.measures().items():
        assert task.metric(name) == metric
        assert sizes[metric.of] > 0
    assert task.directions(found) == {n: m.higher for n, m in task.measures().items() if m.higher is not None}


@pytest.mark.parametrize("kind", [kind for kind, (recipe, _) in RUNS.items() if recipe == "lm-tiny"])
def test_the_tokens_that_are_said_are_those_that_are_scored(kind):
    recipe, overrides = RUNS[kind]
    config = resolve(recipe, overrides)
    task = find_task(config.task)(config)
    scored = [batch["labels"].numpy() != IGNORED for data in task.held_out.values() for batch in data.batches(64)]
    assert task.held_out_sizes()["tokens"] == sum(int(part.sum()) for part in scored)


def test_of_an_array_without_ends_the_first_token_is_not_scored(tmp_path):
    from siamesenorm.data import open_tokens

    (np.arange(100, dtype="<u2") % 50).tofile(tmp_path / "a.npy")
    data = ValidationData(open_tokens(tmp_path / "a.npy"), 16)
    scored = [batch["labels"].numpy() != IGNORED for batch in data.batches(4)]
    assert data.scored() == sum(int(part.sum()) for part in scored) == 99


def test_every_metric_is_measured_on_something_that_has_a_least():
    for task in TASKS.values():
        assert {metric.of for metric in task.metrics.values()} <= set(LEAST)
    assert set(DECIDED_BY) == set(LEAST)


def test_directions_of_the_harness_are_its_own():
    registry = pytest.importorskip("lm_eval.api.registry")
    pytest.importorskip("lm_eval.api.metrics")
    known = {name: higher for name, higher in registry.HIGHER_IS_BETTER_REGISTRY.items() if name in HARNESS}
    assert known == {name: HARNESS[name] for name in known}
    assert set(registry.HIGHER_IS_BETTER_REGISTRY) - set(HARNESS) <= {"bypass"}
    assert harness_metric("lm_eval/piqa/acc").higher is True
    assert harness_metric("lm_eval/piqa/acc (first)").higher is True
    assert harness_metric("lm_eval/piqa/acc_stderr").higher is None
