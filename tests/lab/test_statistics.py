"""What a grid says: pairs by seed, best learning rates, stable ranges, cost, and the words for all that."""

import json

import pytest

from siamesenorm.errors import ConfigError
from siamesenorm.lab.report.records import find_runs, read_records
from siamesenorm.lab.report.sentences import place_text
from siamesenorm.lab.report.statistics import analyse
from siamesenorm.lab.report.student import paired
from siamesenorm.lab.report.verdict import in_few_words, verdict

from .folders import FACTS, SCORES, write_grid, write_run


def analysed(tmp_path, scores, **wanted):
    records = read_records(write_grid(tmp_path, scores))
    return analyse(records, **wanted)


def test_differences_are_taken_seed_by_seed(tmp_path):
    analysis = analysed(tmp_path, SCORES)
    found = {(c.topology, c.lr): c.difference for c in analysis.same_lr}
    assert found["siamese", 1e-2] == paired([2.00 - 2.10, 2.03 - 2.12, 1.98 - 2.09])
    assert analysis.baseline == "pre"


# What diverged -------------------------------------------------------------------------------------------


def test_a_seed_that_diverged_counts_as_the_worst_and_not_as_absent(tmp_path):
    scores = {("pre", 1e-2): [2.1, 2.2, 2.3, 2.4], ("siamese", 1e-2): [2.0, 2.1, 2.2, None]}
    (found,) = analysed(tmp_path, scores).same_lr
    # 3.2 is what frequencies alone give, more than any run's loss
    assert found.difference == paired([2.0 - 2.1, 2.1 - 2.2, 2.2 - 2.3, 3.2 - 2.4])
    assert (found.lost, found.baseline_lost, found.worst) == (1, 0, 3.2)
    assert not found.clear
    text = " ".join(verdict(analysed(tmp_path / "again", scores)))
    assert "siamese is better" not in text  # as its three other seeds are, each by the same tenth
    assert (
        "siamese diverged in 1 of 4 seeds, pre in none; with 3.2, the worst, for such a run it ends 0.125 nats" in text
    )
    assert "cannot be told apart" not in text  # it is less stable, whatever its loss is


def test_what_counts_as_the_worst_is_no_better_than_any_run(tmp_path):
    analysis = analysed(tmp_path, {("pre", 1e-2): [2.0, 4.5], ("post", 1e-2): [None, 2.0], ("span", 1e-2): [3.0, 3.5]})
    (found,) = [c for c in analysis.same_lr if c.topology == "post"]
    assert found.worst == 4.5
    assert found.difference.mean == pytest.approx(((4.5 - 2.0) + (2.0 - 4.5)) / 2)


def test_a_topology_that_diverges_everywhere_is_judged_worse(tmp_path):
    analysis = analysed(tmp_path, {("pre", 1e-2): [2.0, 2.01, 1.99], ("hybrid", 1e-2): [None, None, None]})
    sentences = verdict(analysis)
    assert sentences[0].startswith("hybrid is worse than pre by 1.2 nats")
    assert "hybrid diverged in 3 of 3" in sentences[0]
    assert "their best learning rate" not in sentences[0]
    assert "hybrid was stable at none of 0.01." in sentences


def test_a_baseline_that_diverges_is_no_better_either(tmp_path):
    analysis = analysed(tmp_path, {("post", 1e-2): [None, None, None], ("siamese", 1e-2): [2.0, 2.01, 1.99]})
    assert verdict(analysis)[0].startswith("siamese is better than post by 1.2 nats")


def test_where_both_diverged_there_is_no_difference(tmp_path):
    scores = {("pre", 1e-2): [None, None], ("post", 1e-2): [None, None], ("pre", 1e-3): [2.0, 2.1]}
    analysis = analysed(tmp_path, {**scores, ("post", 1e-3): [2.0, 2.2]})
    assert {c.lr for c in analysis.same_lr} == {1e-3}


def test_a_number_that_was_not_measured_is_absent_and_not_the_worst(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "pre", seed=seed, evaluation={"arithmetic": 0.5}, held_out={"questions": 200})
        more = {"arithmetic": 0.6} if seed < 2 else {}
        write_run(tmp_path, "siamese", seed=seed, evaluation=more, held_out={"questions": 200})
    (found,) = analyse(read_records(find_runs([tmp_path])), metric="arithmetic", baseline="pre").same_lr
    assert (found.difference.count, found.lost) == (2, 0)
    assert found.difference.mean == pytest.approx(0.1)


def test_a_run_that_ends_with_no_number_has_diverged(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "pre", seed=seed, loss=2.0 + seed / 10)
        folder = write_run(tmp_path, "siamese", seed=seed, loss=1.9 + seed / 10)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "evaluation": {"loss": None, "perplexity": None}}))
    (found,) = analyse(read_records(find_runs([tmp_path])), baseline="pre").same_lr
    assert found.difference == paired([1.9 - 2.0, 2.0 - 2.1, 3.2 - 2.2])
    assert found.lost == 1


def test_of_a_metric_that_should_be_high_the_lowest_is_the_worst(tmp_path):
    for seed, (mine, theirs) in enumerate([(0.9, 0.5), (0.9, 0.6), (None, 0.55)]):
        write_run(tmp_path, "pre", seed=seed, evaluation={"arithmetic": theirs})
        state = "diverged" if mine is None else "finished"
        write_run(tmp_path, "siamese", seed=seed, state=state, evaluation={"arithmetic": mine})
    (found,) = analyse(read_records(find_runs([tmp_path])), metric="arithmetic", baseline="pre").same_lr
    assert found.worst == 0.5
    assert found.difference == paired([0.9 - 0.5, 0.9 - 0.6, 0.5 - 0.55])


def test_seeds_that_only_one_side_has_make_no_pair(tmp_path):
    analysis = analysed(tmp_path, {("pre", 1e-2): [2.0, 2.5], ("siamese", 1e-2): [1.9]})
    (found,) = analysis.same_lr
    assert (found.difference.count, found.difference.mean) == (1, pytest.approx(-0.1))


def test_a_table_says_where_seeds_are_missing(tmp_path):
    analysis = analysed(tmp_path, {("pre", 1e-2): [2.0, 2.2, 2.1], ("siamese", 1e-2): [2.0, 2.2]})
    assert [place_text(place) for place in analysis.places] == ["2.1000 ± 0.1000", "2.1000 ± 0.1414 (2 of 3 seeds)"]


def test_best_learning_rate_takes_only_what_every_seed_finished(tmp_path):
    best = {r.topology: r.best for r in analysed(tmp_path, {**SCORES, ("post", 1e-2): [None, 1.0, None]}).ranges}
    assert best == {"pre": 1e-2, "siamese": 1e-2, "post": 1e-3}


def test_each_at_its_own_best_learning_rate(tmp_path):
    found = {c.topology: c for c in analysed(tmp_path, SCORES).best_lr}
    assert (found["post"].lr, found["post"].baseline_lr) == (1e-3, 1e-2)
    assert found["post"].difference.mean == pytest.approx((2.30 - 2.10 + 2.33 - 2.12 + 2.29 - 2.09) / 3)


def test_ranges(tmp_path):
    ranges = {r.topology: r for r in analysed(tmp_path, SCORES).ranges}
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


@pytest.mark.parametrize(
    ("metric", "recipe", "higher"),
    [
        ("loss", "lm-tiny", False),
        ("perplexity", "lm-tiny", False),
        ("perplexity/a (validation)", "lm-tiny", False),
        ("bits_per_byte", "lm-tiny", False),
        ("arithmetic", "lm-tiny", True),
        ("arithmetic/2_digits", "lm-tiny", True),
        ("lm_eval/piqa/acc", "lm-tiny", True),
        ("lm_eval/piqa/acc_norm", "lm-tiny", True),
        ("lm_eval/gsm8k/exact_match (strict-match)", "lm-tiny", True),
        ("lm_eval/wikitext/word_perplexity", "lm-tiny", False),
        ("accuracy", "deit-digits", True),
        ("top5", "deit-digits", True),
        ("loss", "deit-digits", False),
        ("frechet", "dit-digits", False),
        ("sample_accuracy", "dit-digits", True),
        ("mse/quarter_1", "dit-digits", False),
    ],
)
def test_a_planted_difference_is_called_by_its_right_name(tmp_path, metric, recipe, higher):
    more = () if recipe == "lm-tiny" else ("evaluation.every=40",)
    for seed in range(3):
        for topology, value in (("pre", 0.5), ("siamese", 0.8)):
            measured = {metric: value + seed / 100}
            write_run(
                tmp_path, topology, seed=seed, evaluation=measured, recipe=recipe, overrides=more, losses=[2.0] * 40
            )
    analysis = analyse(read_records(find_runs([tmp_path])), metric=metric, baseline="pre")
    assert analysis.higher_is_better is higher
    told = verdict(analysis)[0]
    assert told.startswith(f"siamese is {'better' if higher else 'worse'} than pre by 0.3")


def test_the_harness_own_word_on_a_metrics_direction_is_kept_by_the_run(tmp_path):
    for seed in range(3):
        for topology, value in (("pre", 0.5), ("siamese", 0.8)):
            folder = write_run(tmp_path, topology, seed=seed, evaluation={"lm_eval/x/odd": value})
            status = json.loads((folder / "status.json").read_text())
            (folder / "status.json").write_text(json.dumps({**status, "higher_is_better": {"lm_eval/x/odd": seed < 9}}))
    records = read_records(find_runs([tmp_path]))
    assert verdict(analyse(records, metric="lm_eval/x/odd", baseline="pre"))[0].startswith("siamese is better than pre")


@pytest.mark.parametrize("name", ["arithmetic_error", "lm_eval/piqa/acc_stderr", "lm_eval/piqa/samples"])
def test_error_bars_and_counts_are_no_metrics(tmp_path, name):
    write_run(tmp_path, evaluation={name: 0.5})
    with pytest.raises(ConfigError, match=rf"--metric: '{name}' is not known; it takes one of loss, perplexity$"):
        analyse(read_records(find_runs([tmp_path])), metric=name)


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
        analysed(tmp_path / "a", SCORES, metric="accuracy")
    with pytest.raises(ConfigError, match="--baseline: 'span' is not among the runs"):
        analysed(tmp_path / "b", SCORES, baseline="span")


# The verdict -------------------------------------------------------------------------------------------


def test_a_clear_difference_is_called_one(tmp_path):
    sentences = verdict(analysed(tmp_path, SCORES))
    first = next(s for s in sentences if s.startswith("siamese is"))
    assert "siamese is better than pre by 0.1 nats (95% interval 0.0752 to 0.1248, 3 seeds, p = 0.0033" in first
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


def test_among_many_alike_the_one_that_stands_out_by_chance_is_not_called_better(tmp_path):
    # Alone, this difference would be clear: its interval is 0.003 to 0.097.
    scores = {("pre", 1e-2): [2.10, 2.20, 2.30], ("siamese", 1e-2): [2.07, 2.13, 2.25]}
    alone = verdict(analysed(tmp_path / "alone", scores))
    assert alone[0].startswith("siamese is better than pre by 0.05 nats")
    many = ("post", "span", "hyper", "deepnorm", "hybrid", "keel")
    crowd = {**scores, **{(name, 1e-2): [2.15, 2.18, 2.27 + n / 100] for n, name in enumerate(many)}}
    analysis = analysed(tmp_path / "crowd", crowd)
    (found,) = [c for c in analysis.best_lr if c.topology == "siamese"]
    assert (found.difference.high < 0, found.clear, found.family) == (True, False, 7)
    told = next(s for s in verdict(analysis) if s.startswith("siamese and pre"))
    assert "cannot be told apart" in told
    assert "corrected for 7 comparisons" in told


def test_the_caveat_on_chosen_rates_stands_wherever_rates_were_chosen(tmp_path):
    several = {("pre", 1e-3): [2.5], ("pre", 1e-2): [2.1], ("siamese", 1e-3): [2.4], ("siamese", 1e-2): [2.0]}
    one = {("pre", 1e-2): [2.1, 2.0], ("siamese", 1e-2): [2.0, 2.0], ("post", 1e-2): [2.0, 2.1]}
    for name, scores, applies in (("several", several, True), ("one", one, False)):
        told = [
            s for s in verdict(analysed(tmp_path / name, scores)) if s.startswith("Best learning rates were chosen")
        ]
        assert len(told) == applies


def test_every_verdict_says_what_was_held_out_how_many_seeds_and_which_first_weights(tmp_path):
    last = verdict(analysed(tmp_path / "a", SCORES))[-1]
    assert last.startswith("Measured on 16,384 held-out tokens, 3 seeds; first weights: init=")
    assert "init_std" not in last  # which that rule does not look at
    write_run(tmp_path / "b", "pre", held_out={"tokens": 5000})
    write_run(tmp_path / "b", "deepnorm", held_out={"tokens": 9000})
    last = verdict(analyse(read_records(find_runs([tmp_path / "b"]))))[-1]
    assert "Measured on 5,000 to 9,000 held-out tokens, 1 seed" in last
    assert last.endswith("deepnorm with its authors' factors on top.")
    write_run(tmp_path / "c", "pre", held_out={}, overrides=("model.init=normal",))
    last = verdict(analyse(read_records(find_runs([tmp_path / "c"]))))[-1]
    assert "held-out tokens (how many is not recorded), 1 seed; first weights: init=normal, init_std=0.02." in last


def test_a_size_that_is_no_number_is_not_recorded(tmp_path):
    write_run(tmp_path, "pre", held_out={"tokens": float("nan"), "images": "many"})
    assert "(how many is not recorded)" in verdict(analyse(read_records(find_runs([tmp_path]))))[-1]


def test_too_little_held_out_gives_no_verdict(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "pre", seed=seed, loss=2.5, held_out={"tokens": 13})
        write_run(tmp_path, "siamese", seed=seed, loss=2.0 + seed / 100, held_out={"tokens": 13})
    analysis = analyse(read_records(find_runs([tmp_path])), baseline="pre")
    sentences = verdict(analysis)
    assert (
        sentences[0] == "No verdict: 13 held-out tokens are too few to tell topologies apart; it takes 4,096 or more."
    )
    assert not [s for s in sentences if "better" in s or "told apart:" in s]
    assert in_few_words(analysis.best_lr[0], analysis) == "too little was held out to tell"


def test_it_says_how_far_the_learning_rate_goes(tmp_path):
    sentences = verdict(analysed(tmp_path, SCORES))
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
