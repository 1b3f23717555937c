"""What a study computes, on records with an effect that was put there, and on records with none."""

import math
from itertools import combinations

import numpy as np
import pytest

from siamesenorm.lab.report.statistics import SeedScores
from siamesenorm.lab.study.analysis import (
    ArmResult,
    analyse_study,
    compared_with_baseline,
    expected_best,
    sensitivity_of,
)
from siamesenorm.lab.study.cells import cells_of
from siamesenorm.lab.study.law import fit_law, left_out, speedup
from siamesenorm.lab.study.plan import parse_plan
from siamesenorm.lab.study.record import spikes_of
from siamesenorm.lab.study.sections import main_table, speedups

from .study_records import fill, noise, plan_file, plan_values

ARMS, SEEDS = 11, 6
STUDIES = 600


def arm(name, scores, failed=()):
    scored = {seed: float(score) for seed, score in enumerate(scores) if seed not in failed}
    place = SeedScores(name, "", 1e-2, scored, dict.fromkeys(failed, "diverged"))
    return ArmResult(name, name, 0, 0, None, (), place)


PLAN = parse_plan(plan_values())


def one_family(chance, effects):
    """A part's comparisons: seeds move all arms together by .05, each run by .01 more."""
    seeds = chance.normal(2, 0.05, SEEDS)
    found = [arm("pre", seeds + chance.normal(0, 0.01, SEEDS))]
    found += [arm(f"a{n}", seeds + effect + chance.normal(0, 0.01, SEEDS)) for n, effect in enumerate(effects)]
    return compared_with_baseline(PLAN, found, 3.2).values()


def test_of_studies_without_an_effect_at_most_one_in_twenty_has_a_false_find():
    chance = noise(0)
    wrong = missed = 0
    for _ in range(STUDIES):
        found = one_family(chance, [0.0] * ARMS)
        wrong += any(c.clear for c in found)
        missed += any(not c.difference.low <= 0 <= c.difference.high for c in found)
    allowed = 0.05 * STUDIES + 3 * math.sqrt(0.05 * 0.95 * STUDIES)
    assert wrong <= allowed
    assert missed <= allowed  # intervals hold for all arms of a part at once
    assert wrong > 0  # and the rule is no rule of never


def test_an_effect_that_was_put_there_is_found_and_its_interval_holds():
    chance, effects = noise(1), [-0.06, 0.06, *[0.0] * (ARMS - 2)]
    found = covered = wrong = 0
    for _ in range(STUDIES // 2):
        comparisons = list(one_family(chance, effects))
        found += comparisons[0].clear and comparisons[0].difference.mean < 0
        found += comparisons[1].clear and comparisons[1].difference.mean > 0
        wrong += any(c.clear for c in comparisons[2:])
        pairs = zip(comparisons, effects, strict=True)
        covered += all(c.difference.low <= effect <= c.difference.high for c, effect in pairs)
    assert found >= 0.9 * STUDIES
    assert wrong <= 0.05 * STUDIES / 2 + 3 * math.sqrt(0.05 * 0.95 * STUDIES / 2)
    assert covered >= 0.95 * STUDIES / 2 - 3 * math.sqrt(0.05 * 0.95 * STUDIES / 2)


def test_comparisons_that_are_still_to_come_count_in_the_correction():
    scores = {"pre": [2.0, 2.1, 2.05, 2.02], "a": [1.95, 2.06, 2.0, 1.96]}
    alone = compared_with_baseline(PLAN, [arm(name, values) for name, values in scores.items()], 3.2)["a"]
    waiting = [arm(f"w{n}", []) for n in range(10)]
    among = compared_with_baseline(PLAN, [*(arm(name, v) for name, v in scores.items()), *waiting], 3.2)["a"]
    assert among.family == 11
    assert among.corrected_p == pytest.approx(11 * alone.corrected_p)
    assert among.difference.low < alone.difference.low


def test_a_seed_that_diverged_counts_as_the_worst_and_is_not_dropped():
    found = compared_with_baseline(PLAN, [arm("pre", [2.0] * 6), arm("a", [1.9] * 6, failed=(5,))], 3.2)["a"]
    assert found.difference.count == 6
    assert found.difference.mean == pytest.approx((5 * -0.1 + 1.2) / 6)


def test_luck_in_the_search_is_not_taken_for_an_effect():
    """An arm whose search is all noise wins it by far; its fresh seeds bring it back."""
    file, wrong = plan_file(), 0
    for study in range(20):
        chance = noise(study)

        def score(cell, chance=chance):
            spread = 0.3 if cell.stage == "search" and cell.arm == "siamese" else 0.01
            return float(2 + chance.normal(0, spread))

        (part,) = analyse_study(file, fill(file, score)).parts
        wrong += part.arm("siamese").comparison.clear
    assert wrong <= 3


def test_a_whole_study_recovers_what_was_put_into_it():
    chance = noise(3)
    gains = {"pre": 0.0, "siamese": -0.08, "post": 0.1}

    def score(cell):
        if cell.arm == "post" and cell.lr > 0.05:
            return None
        return float(2 + gains[cell.arm] + abs(math.log(cell.lr / 0.01)) / 10 + chance.normal(0, 0.005))

    file = plan_file(configurations=8)
    (part,) = analyse_study(file, fill(file, score)).parts
    assert part.done == part.of
    siamese, post = part.arm("siamese"), part.arm("post")
    assert siamese.comparison.clear
    assert siamese.comparison.difference.mean == pytest.approx(-0.08, abs=0.02)
    assert post.comparison.clear
    assert post.comparison.difference.mean > 0
    high = sum(file.plan.search.draw(k)["optimizer.lr"] > 0.05 for k in range(8))
    assert post.lost == high > 0
    best = min((file.plan.search.draw(k)["optimizer.lr"] for k in range(8)), key=lambda lr: abs(math.log(lr / 0.01)))
    assert siamese.best["optimizer.lr"] == best


def test_a_study_that_has_just_begun_says_nothing():
    file = plan_file()
    (part,) = analyse_study(file, {}).parts
    assert (part.done, part.worst) == (0, None)
    assert all(found.comparison is None and found.best is None for found in part.arms)


# What stands beside the comparison ------------------------------------------------------------------------


def test_expected_best_is_the_mean_over_all_choices():
    scores = [2.5, 1.9, 3.2, 2.1, 2.1]
    for k, found in enumerate(expected_best(scores), 1):
        assert found == pytest.approx(np.mean([min(chosen) for chosen in combinations(scores, k)]))
    assert expected_best([1.0, 3.0], higher=True) == (2.0, 3.0)


def test_sensitivity_is_the_mean_rise_over_the_rates_cut_at_the_first_loss():
    values = plan_values(sensitivity={"rates": [1e-4, 1e-3, 1e-2, 1e-1]})
    values["parts"][0]["sensitivity"] = True
    file = plan_file(**values)
    losses = {1e-4: 9.0, 1e-3: 2.5, 1e-2: 2.0, 1e-1: None}
    records = fill(file, lambda cell: losses[cell.lr] if cell.stage == "sensitivity" else 2.0)
    (part,) = analyse_study(file, records).parts
    assert part.arm("pre").sensitivity == pytest.approx((3.5 + 0.5 + 0 + 3.5) / 4)  # 5.5 is the first loss
    assert part.worst == 3.2  # rates that are far too low do not make a lost run worse
    cells = [c for c in cells_of(file, file.plan.parts[0], records) if (c.arm, c.stage) == ("pre", "sensitivity")]
    assert sensitivity_of([records[cell.key] for cell in cells], "loss") == part.arm("pre").sensitivity


def test_sensitivity_and_laws_are_of_losses_alone():
    """The first loss is no level of a perplexity, and a perplexity falls by no such law."""
    values = plan_values(sensitivity={"rates": [1e-3, 1e-2]}, metric="perplexity")
    values["parts"][0]["sensitivity"] = True
    file = plan_file(**values)
    result = analyse_study(file, fill(file, lambda cell: 9.0 + cell.lr))
    assert result.parts[0].arm("pre").sensitivity is None
    assert result.parts[0].arm("pre").rates == pytest.approx({1e-3: 9.001, 1e-2: 9.01})
    assert result.laws == ()
    assert "the law is one of losses" in speedups(file.plan, result)[0]


def test_the_plan_says_which_chance_is_small_enough():
    arms = [arm("pre", [2.0, 2.1, 2.05, 2.02]), arm("a", [1.97, 2.09, 2.0, 1.96])]
    usual = compared_with_baseline(PLAN, arms, 3.2)["a"]
    assert 0.01 < usual.corrected_p < 0.05
    assert usual.clear
    strict = parse_plan(plan_values(statistics={"confidence": 0.99}))
    found = compared_with_baseline(strict, arms, 3.2)["a"]
    assert found.corrected_p == usual.corrected_p
    assert not found.clear
    assert found.difference.high > 0  # the interval says the same


def test_times_are_compared_on_one_machine_with_the_same_versions_and_threads():
    """Of an arm that ran on a slow machine and a baseline that ran on a fast one there is no ratio."""
    file = plan_file()
    known = fill(file, lambda cell: 2.0)

    def ratio(change):
        """Of records of siamese, `change` put into each."""
        some = {key: r.model_copy(update=change(r)) if r.arm == "siamese" else r for key, r in known.items()}
        (part,) = analyse_study(file, some).parts
        row = next(line for line in main_table(file.plan, part) if line.startswith("| `siamese`"))
        return part.arm("siamese").step_ratio, row.split(" | ")[6]

    assert ratio(lambda r: {"processor_seconds": 6.0}) == (pytest.approx(1.5), "1.50×")
    for other in ({"machine": "two"}, {"versions": {"torch": "2"}}, {"threads": 8}):
        assert ratio(lambda r, other=other: {"processor_seconds": 40.0, **other}) == (None, "–")
        mixed = ratio(lambda r, other=other: {"processor_seconds": 40.0, **other} if r.stage == "fresh" else {})
        assert mixed == (pytest.approx(1), "1.00×")


def test_times_are_those_of_the_last_version_that_both_ran_with():
    """A faster kernel shows at once; what was measured before it is not mixed in."""
    file = plan_file()
    newer = {"versions": {"torch": "2"}, "when": "2026-12-01T00:00:00+00:00"}

    def changed(record):
        later = newer if record.stage == "fresh" else {}
        return record.model_copy(
            update={"processor_seconds": 9.0 if record.arm == "siamese" and not later else 6.0, **later}
        )

    (part,) = analyse_study(file, {key: changed(r) for key, r in fill(file, lambda cell: 2.0).items()}).parts
    assert part.arm("siamese").step_ratio == pytest.approx(1)


def test_spikes_are_counted_behind_the_first_hundred_steps():
    losses = [6 - step / 25 if step < 100 else 2.0 for step in range(300)]
    assert spikes_of(losses) == 0
    losses[200] = 2.2
    losses[201] = None
    assert spikes_of(losses) == 10_000 * 2 / 200
    assert spikes_of(losses[:100]) is None


# The law --------------------------------------------------------------------------------------------------

COMPUTE = [1e11, 4e11, 1e12, 5e12, 2e13]


def law(compute):
    return 1.4 + 300 * compute**-0.25


def test_the_law_is_recovered_from_points_on_it_and_predicts_the_one_left_out():
    found = fit_law(COMPUTE, [law(c) for c in COMPUTE])
    assert (found.limit, found.power) == pytest.approx((1.4, 0.25), rel=1e-3)
    assert found.needed(law(3e12)) == pytest.approx(3e12, rel=1e-3)
    assert found.needed(1.3) == math.inf
    errors = left_out([(c, [law(c)] * 2) for c in COMPUTE])
    assert [c for c, _ in errors] == COMPUTE
    assert all(abs(error) < 5e-3 for _, error in errors)


def test_there_is_no_law_of_two_sizes_nor_of_losses_that_rise():
    assert fit_law(COMPUTE[:2], [2.0, 1.9]) is None
    assert fit_law(COMPUTE[:3], [1.0, 1.1, 1.2]) is None
    assert left_out([(c, [law(c)]) for c in COMPUTE[:3]]) == []


def test_a_speedup_that_was_put_there_is_recovered_and_its_interval_holds():
    """An arm as good as the baseline with 1.5 times the compute, at four fifths of its speed: 1.2."""
    chance, at, held = noise(5), 1e12, 0
    gain = law(1.5 * at) - law(at)
    for _ in range(30):
        points = [(c, law(c) + chance.normal(0, 0.004, 6)) for c in COMPUTE]
        found = speedup(points, at, gain + chance.normal(0, 0.004, 6), 0.8, resamples=200, confidence=0.95)
        held += found.low <= 1.2 <= found.high
    assert found.steps * 0.8 == found.time
    assert held >= 24  # six seeds drawn anew give somewhat less than they promise: nine in ten
    exact = speedup([(c, [law(c)] * 2) for c in COMPUTE], at, [gain, gain], 1.0, resamples=100, confidence=0.95)
    assert exact.time == pytest.approx(1.5, rel=5e-3)


def test_no_difference_is_a_speedup_of_the_throughput_alone():
    points = [(c, [law(c)] * 3) for c in COMPUTE]
    assert speedup(points, 1e12, [0.0] * 3, 0.9, resamples=100, confidence=0.95).time == pytest.approx(0.9)
    beyond = speedup(points, 2e13, [-0.2] * 3, 1.0, resamples=100, confidence=0.95)
    assert beyond.time == beyond.high == math.inf


def test_a_speedup_of_few_seeds_has_no_interval_and_draws_without_a_law_are_unknown():
    how = {"resamples": 400, "confidence": 0.95}
    exact = [(c, [law(c)] * 3) for c in COMPUTE]
    assert speedup(exact, 1e12, [-0.01] * 3, 1.0, **how).low is not None
    for points, pairs in ((exact, [-0.01] * 2), ([*exact[:-1], (COMPUTE[-1], [law(COMPUTE[-1])] * 2)], [-0.01] * 3)):
        found = speedup(points, 1e12, pairs, 1.0, **how)
        assert found.time > 1
        assert (found.low, found.high) == (None, None)
    noisy = [(1e12, [2.0, 2.2, 1.8]), (2e12, [1.95, 2.2, 1.75]), (4e12, [1.9, 2.1, 1.7])]
    found = speedup(noisy, 1e12, [-0.01] * 3, 1.0, **how)
    assert 0.025 < found.unknown / 400 < 0.9  # many draws rise with compute
    assert (found.low, found.high) == (None, None)
    nowhere = speedup(exact, 1e12, [-0.01] * 3, None, **how)
    assert nowhere.steps > 1
    assert (nowhere.time, nowhere.low) == (None, None)


def test_speedups_need_three_sizes_with_all_their_seeds():
    sizes = {name: {"set": {"train.steps": steps}} for name, steps in (("s", 40), ("m", 80), ("l", 160))}
    parts = [{"name": name, "corpus": "code", "size": name, "configurations": 1, "seeds": 4} for name in sizes]
    file = plan_file(sizes=sizes, parts=parts, statistics={"resamples": 100})

    def score(cell):
        worth = {"pre": 1.0, "siamese": 2.0, "post": 0.5}[cell.arm]
        return law(6 * 150_000 * cell.config.steps * 1024 * worth)

    records = fill(file, score)
    result = analyse_study(file, records)
    assert [part.arm("siamese").speedup.steps for part in result.parts] == pytest.approx([2, 2, 2], rel=0.05)
    assert result.parts[0].arm("pre").speedup is None
    # a longer run of another plan, at the same place and the first on record, is none of its points
    stray = next(r for r in records.values() if (r.arm, r.stage, r.size) == ("pre", "fresh", "s"))
    with_stray = {"f" * 16: stray.model_copy(update={"key": "f" * 16, "samples": 1000 * stray.samples}), **records}
    assert analyse_study(file, with_stray).laws == result.laws
    last = next(key for key, record in reversed(records.items()) if record.arm == "pre" and record.stage == "fresh")
    del records[last]
    assert all(found.speedup is None for part in analyse_study(file, records).parts for found in part.arms)


def test_a_record_counts_where_the_plan_has_its_cell_whatever_the_record_says():
    """Names may be changed in a plan, and what was run stays the same: laws and speed-ups do too."""
    sizes = {name: {"set": {"train.steps": steps}} for name, steps in (("s", 40), ("m", 80), ("l", 160))}
    parts = [{"name": name, "corpus": "code", "size": name, "configurations": 1, "seeds": 4} for name in sizes]
    file = plan_file(sizes=sizes, parts=parts, statistics={"resamples": 100})

    def score(cell):
        return law(6 * 150_000 * cell.config.steps * 1024 * {"pre": 1.0, "siamese": 2.0, "post": 0.5}[cell.arm])

    records = fill(file, score)
    planned = analyse_study(file, records)
    renamed = analyse_study(
        plan_file(
            arms={"one": "pre", "two": "siamese", "three": "post"},
            baseline="one",
            sizes=sizes,
            parts=parts,
            statistics={"resamples": 100},
        ),
        records,
    )
    assert [found.law for found in renamed.laws] == [found.law for found in planned.laws] != [None]
    assert [p.arm("two").speedup for p in renamed.parts] == [p.arm("siamese").speedup for p in planned.parts]
    elsewhere = {"arm": "post", "stage": "stress", "seed": 4, "lr": 1.0, "number": 9, "factor": 3.0}
    moved = {key: record.model_copy(update=elsewhere) for key, record in records.items()}
    assert analyse_study(file, moved) == planned
