"""Generated problems: right, graded, and nothing that is held out is ever written for training."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import Arithmetic, DataError, Problem
from siamesenorm.data.arithmetic import LINES, ArithmeticCorpus
from siamesenorm.data.documents import Reading

SMALL = Arithmetic(problems=12_000, digits=3)
LINE = re.compile(r"(\d+) ([+*-]) (\d+) = (-?\d+)")


def lines_of(settings, split):
    return [line for text in settings.documents(split) for line in text.splitlines()]


def problems_of(settings, split):
    found = (LINE.fullmatch(line) for line in lines_of(settings, split))
    return [(Problem(int(m[1]), m[2], int(m[3])), int(m[4])) for m in found]


TRAIN, HELD = problems_of(SMALL, "train"), problems_of(SMALL, "validation")


def test_every_answer_is_right():
    count = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    for problem, answer in TRAIN + HELD:
        assert count[problem.operation](problem.left, problem.right) == answer == problem.answer


def test_held_out_problems_are_never_trained_on_in_either_order():
    both = set()
    for problem, _ in TRAIN:
        both.add((problem.left, problem.operation, problem.right))
        if problem.operation != "-":
            both.add((problem.right, problem.operation, problem.left))
    assert HELD
    assert not both & {tuple(problem) for problem, _ in HELD}


def test_grades_and_operations_are_even():
    operations = Counter(problem.operation for problem, _ in TRAIN)
    grades = Counter(problem.digits for problem, _ in TRAIN if problem.operation == "+")
    assert all(0.30 < operations[sign] / len(TRAIN) < 0.37 for sign in "+-*")
    assert all(0.28 < grades[digits] / grades.total() < 0.38 for digits in (1, 2, 3))
    assert max(problem.digits for problem, _ in TRAIN if problem.operation == "*") == 2


def test_share_of_held_out_lines():
    assert len(HELD) / (len(HELD) + len(TRAIN)) == pytest.approx(SMALL.held_out, abs=0.01)
    assert len(TRAIN) + len(HELD) == SMALL.problems


def test_a_document_depends_on_nothing_but_its_number():
    assert list(SMALL.documents("train"))[7] == SMALL.document("train", 7)
    assert SMALL.document("train", 7).count("\n") == LINES
    assert SMALL.document("train", 7) != Arithmetic(seed=1).document("train", 7)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from("+*"))
def test_order_of_numbers_does_not_change_the_split(left, right, sign):
    assert SMALL.split_of(Problem(left, sign, right)) == SMALL.split_of(Problem(right, sign, left))


@pytest.mark.parametrize("target", [1, 5_000, 1 << 30])
def test_pieces_hold_every_document_once_with_its_split(target):
    corpus = ArithmeticCorpus("arithmetic", Arithmetic(problems=480))
    found = [
        (document.split, document.text)
        for piece in corpus.pieces(target, Reading())
        for document in corpus.read(piece, Reading(), Counter())
    ]
    settings = corpus.settings
    expected = [(split, text) for split in ("train", "validation") for text in settings.documents(split)]
    assert found == expected


def test_an_empty_split_is_said_instead_of_sought_for_ever(monkeypatch):
    monkeypatch.setattr("siamesenorm.data.arithmetic.DRAWS", 500)
    monkeypatch.setattr(Arithmetic, "split_of", lambda self, problem: "train")
    with pytest.raises(DataError, match="no problem of 1 digits is in the validation split"):
        Arithmetic(digits=1).document("validation", 0)
