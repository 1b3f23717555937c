"""The four-choice test measures arithmetic and nothing that shines through the options."""

import math
from collections import Counter

import pytest

from siamesenorm.data import Arithmetic, DataError, Problem, arithmetic_choices, score_choices

QUESTIONS = arithmetic_choices(2000)


def right(pairs):
    return [0.0 if _right(context, option) else -1.0 for context, option in pairs]


def _right(context, option):
    left, sign, number, _ = context.splitlines()[-1].split()
    value = {"+": int(left) + int(number), "-": int(left) - int(number), "*": int(left) * int(number)}[sign]
    return int(option) == value


def test_the_answer_and_only_the_answer_is_right():
    for question in QUESTIONS:
        assert [_right(question.context, option) for option in question.options].count(True) == 1
        assert _right(question.context, question.options[question.answer])
        assert len(set(question.options)) == 4


def test_one_who_knows_scores_all_and_one_who_does_not_scores_a_quarter():
    assert score_choices(QUESTIONS, right).accuracy == 1
    for value in (0.0, -3.5, math.nan, -math.inf):
        assert score_choices(QUESTIONS, lambda pairs, value=value: [value] * len(pairs)).accuracy == 0.25
    assert score_choices(QUESTIONS, lambda pairs: [-value for value in right(pairs)]).accuracy == 0


def test_place_and_rank_of_the_answer_tell_nothing():
    places = Counter(question.answer for question in QUESTIONS)
    ranks = Counter(
        sorted(map(int, question.options)).index(question.problem.answer)
        for question in QUESTIONS
        if abs(question.problem.answer) > 12
    )
    for counts in (places, ranks):
        assert all(abs(counts[k] / counts.total() - 0.25) < 0.04 for k in range(4)), counts


@pytest.mark.parametrize(
    "guess",
    [
        lambda context, option: -len(option),
        lambda context, option: len(option),
        lambda context, option: -abs(int(option)),
        lambda context, option: -(int(option) % 2),
        lambda context, option: -(int(option) % 10),
        lambda context, option: int(option) % 10,
    ],
)
def test_simple_guesses_stay_near_chance(guess):
    score = score_choices(QUESTIONS, lambda pairs: [guess(*pair) for pair in pairs])
    assert 0.22 < score.accuracy < 0.29


def test_wrong_answers_are_near():
    for question in QUESTIONS:
        for option in map(int, question.options):
            assert abs(option - question.problem.answer) <= max(11, abs(question.problem.answer))
            assert option >= 0 or question.problem.operation == "-"


def test_questions_are_held_out_and_different():
    settings = Arithmetic()
    assert all(settings.split_of(question.problem) == "validation" for question in QUESTIONS)
    assert len({question.problem.key for question in QUESTIONS}) == len(QUESTIONS)


def test_same_seed_same_questions():
    assert arithmetic_choices(50, seed=5) == arithmetic_choices(50, seed=5)
    assert arithmetic_choices(50, seed=5) != arithmetic_choices(50, seed=6)


def test_shots_come_from_training():
    settings = Arithmetic()
    for question in arithmetic_choices(20, shots=3):
        *before, last = question.context.splitlines()
        assert len(before) == 3
        assert last == question.problem.question
        for line in before:
            left, sign, number, _, answer = line.split()
            shown = Problem(int(left), sign, int(number))
            assert shown.answer == int(answer)
            assert settings.split_of(shown) == "train"


def test_score_by_digits_and_operation_and_batches():
    def only_sums(pairs):
        return [value if " + " in context else 0.0 for (context, _), value in zip(pairs, right(pairs), strict=True)]

    score = score_choices(QUESTIONS, only_sums)
    assert score.by_operation == {"*": 0.25, "+": 1.0, "-": 0.25}
    assert set(score.by_digits) == {1, 2, 3}
    assert score_choices(QUESTIONS, only_sums, batch_size=7) == score
    assert score.questions == 2000


def test_too_many_questions_and_wrong_counts_are_said(monkeypatch):
    monkeypatch.setattr("siamesenorm.data.choices.DRAWS", 2000)
    with pytest.raises(DataError, match="count = 5000 is not allowed; the validation split has about"):
        arithmetic_choices(5000, Arithmetic(digits=1, product_digits=1))
    with pytest.raises(DataError, match="3 values for 8 continuations"):
        score_choices(QUESTIONS[:2], lambda pairs: [0.0] * 3)
    with pytest.raises(DataError, match="count = 0"):
        arithmetic_choices(0)
