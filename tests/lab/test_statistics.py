"""What a grid says: pairs by seed, best learning rates, stable ranges, cost, and the words for all that."""

import pytest

from siamesenorm.lab.records import find_runs, read_records
from siamesenorm.lab.statistics import analyse
from siamesenorm.lab.student import paired
from siamesenorm.lab.verdict import verdict
from siamesenorm.train.errors import ConfigError

from .folders import FACTS, write_grid, write_run

THREE = {
    ("pre", 1e-3): [2.50, 2.52, 2.48],
    ("pre", 1e-2): [2.10, 2.12, 2.09],
    ("siamese", 1e-3): [2.40, 2.42, 2.39],
    ("siamese", 1e-2): [2.00, 2.03, 1.98],
    ("post", 1e-3): [2.30, 2.33, 2.29],
    ("post", 1e-2): [None, 2.9, None],
}


def analysed(tmp_path, scores, **wanted):
    records = read_records(write_grid(tmp_path, scores))
    return analyse(records, **wanted)


def test_differences_are_taken_seed_by_seed(tmp_path):
    analysis = analysed(tmp_path, THREE)
    found = {(c.topology, c.lr): c.difference for c in analysis.same_lr}
    assert found["siamese", 1e-2] == paired([2.00 - 2.10, 2.03 - 2.12, 1.98 - 2.09])
    assert found["post", 1e-2].count == 1  # the one seed that both finished
    assert analysis.baseline == "pre"


def test_seeds_that_only_one_side_has_make_no_pair(tmp_path):
    analysis = analysed(tmp_path, {("pre", 1e-2): [2.0, 2.5], ("siamese", 1e-2): [1.9]})
    (found,) = analysis.same_lr
    assert (found.difference.count, found.difference.mean) == (1, pytest.approx(-0.1))


def test_best_learning_rate_takes_only_what_every_seed_finished(tmp_path):
    best = {r.topology: r.best for r in analysed(tmp_path, {**THREE, ("post", 1e-2): [None, 1.0, None]}).ranges}
    assert best == {"pre": 1e-2, "siamese": 1e-2, "post": 1e-3}


def test_each_at_its_own_best_learning_rate(tmp_path):
    found = {c.topology: c for c in analysed(tmp_path, THREE).best_lr}
    assert (found["post"].lr, found["post"].baseline_lr) == (1e-3, 1e-2)
    assert found["post"].difference.mean == pytest.approx((2.30 - 2.10 + 2.33 - 2.12 + 2.29 - 2.09) / 3)


def test_ranges(tmp_path):
    ranges = {r.topology: r for r in analysed(tmp_path, THREE).ranges}
    assert ranges["post"].stable == (1e-3,)
    assert ranges["post"].failing == (1e-2,)
    assert ranges["siamese"].stable == (1e-3, 1e-2)
    assert ranges["siamese"].near == (1e-2,)
    assert ranges["siamese"].failing == ()


def test_a_metric_that_should_be_high_is_compared_the_other_way(tmp_path):
    analysis = analysed(tmp_path, {("pre", 1e-3): [2.0], ("pre", 1e-2): [3.0], ("siamese", 1e-2): [2.5]})
    assert {r.topology: r.best for r in analysis.ranges}["pre"] == 1e-3
    for folder in find_runs([tmp_path]):
        text = (folder / "status.json").read_text().replace('"perplexity"', '"arithmetic"')
        (folder / "status.json").write_text(text)
    analysis = analyse(read_records(find_runs([tmp_path])), metric="arithmetic", baseline="pre")
    assert {r.topology: r.best for r in analysis.ranges}["pre"] == 1e-2
    assert "worse than pre" in verdict(analysis)[0]


def test_cost_is_a_median_against_the_baseline(tmp_path):
    for seed, seconds in enumerate((20.0, 22.0, 100.0)):
        write_run(tmp_path, "pre", seed=seed, facts={**FACTS, "processor_seconds": 20.0})
        write_run(tmp_path, "siamese", seed=seed, facts={**FACTS, "processor_seconds": seconds, "memory_bytes": 2**21})
    costs = {c.topology: c for c in analyse(read_records(find_runs([tmp_path])), baseline="pre").costs}
    assert costs["siamese"].processor_ratio == pytest.approx(1.1)
    assert costs["siamese"].memory_ratio == pytest.approx(2)
    assert costs["siamese"].processor_seconds == pytest.approx(22 / 40)
    assert costs["pre"].step_ratio == 1


def test_unknown_metric_and_baseline_are_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="--metric: 'accuracy' is not known; it takes one of loss, perplexity"):
        analysed(tmp_path / "a", THREE, metric="accuracy")
    with pytest.raises(ConfigError, match="--baseline: 'span' is not among the runs"):
        analysed(tmp_path / "b", THREE, baseline="span")


# The verdict -------------------------------------------------------------------------------------------


def test_a_clear_difference_is_called_one(tmp_path):
    sentences = verdict(analysed(tmp_path, THREE))
    first = next(s for s in sentences if s.startswith("siamese is"))
    assert "siamese is better than pre by 0.1 nats (95% interval 0.0752 to 0.1248, 3 seeds)" in first
    assert "both at their best learning rate 0.01" in first
    assert any(s.startswith("post is worse than pre by") for s in sentences)


def test_with_one_seed_it_says_that_it_cannot_tell(tmp_path):
    text = " ".join(verdict(analysed(tmp_path, {("pre", 1e-2): [2.1], ("siamese", 1e-2): [1.5]})))
    assert "One seed cannot tell an effect from noise" in text
    assert "siamese ends 0.6 nats better than pre" in text
    assert "is better" not in text
    assert "interval" not in text.replace("for intervals", "")


def test_an_unclear_difference_is_not_called_better(tmp_path):
    text = " ".join(verdict(analysed(tmp_path, {("pre", 1e-2): [2.1, 2.0, 2.2], ("siamese", 1e-2): [1.9, 2.1, 2.15]})))
    assert "siamese and pre cannot be told apart" in text
    assert "is better" not in text


def test_it_says_how_far_the_learning_rate_goes(tmp_path):
    sentences = verdict(analysed(tmp_path, THREE))
    assert "post was stable at 0.001, and not at 0.01 (diverged in 2 of 3); best 0.001." in sentences
    assert any(s.startswith("siamese was stable at every learning rate tried, 0.001 to 0.01") for s in sentences)
    assert any("its best is the highest tried" in s for s in sentences)


def test_a_topology_that_is_stable_nowhere(tmp_path):
    sentences = verdict(analysed(tmp_path, {("pre", 1e-2): [2.0], ("hybrid", 1e-2): [None]}))
    assert "hybrid was stable at none of 0.01." in sentences


def test_a_baseline_that_diverged_everywhere(tmp_path):
    sentences = verdict(analysed(tmp_path, {("post", 1e-2): [None, None], ("siamese", 1e-2): [2.0, 2.1]}))
    assert "post was stable at none of 0.01." in sentences


def test_settings_are_named(tmp_path):
    for warmup in (0, 4):
        for seed in range(2):
            write_run(tmp_path, "pre", seed=seed, loss=2.0 + seed / 100, overrides=(f"warmup={warmup}",))
            write_run(tmp_path, "siamese", seed=seed, loss=1.9 + seed / 100, overrides=(f"warmup={warmup}",))
    sentences = verdict(analyse(read_records(find_runs([tmp_path])), baseline="pre"))
    assert sum(s.startswith(("warmup=0: siamese is better", "warmup=4: siamese is better")) for s in sentences) == 2
