"""Four-choice arithmetic, chance 25 %, and the score of any model that gives log-likelihoods.

questions = arithmetic_choices(1000)
score = score_choices(questions, log_likelihoods)       # a function of [(context, continuation), …]
print(score.accuracy, score.by_digits)
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from siamesenorm.data.arithmetic import DRAWS, Arithmetic, Problem
from siamesenorm.errors import DataError

LogLikelihoods = Callable[[Sequence[tuple[str, str]]], Sequence[float]]
"""Sum of the log-probabilities of each continuation after its context."""

OPTIONS = 4


@dataclass(frozen=True)
class Choice:
    """A question with four continuations, of which one is right.

    A continuation ends with the line, so that ``4`` gets no credit for being the start of ``46``.
    """

    context: str
    options: tuple[str, ...]
    answer: int
    problem: Problem


@dataclass(frozen=True)
class ChoiceScore:
    """Share of right choices, overall and by part."""

    accuracy: float
    questions: int
    standard_error: float
    by_digits: dict[int, float]
    by_operation: dict[str, float]


def arithmetic_choices(
    count: int, settings: Arithmetic | None = None, *, seed: int = 0, shots: int = 0, split: str = "validation"
) -> list[Choice]:
    """Different problems of a split, each with its answer and three near-misses.

    Neither the place of the answer nor its rank among the options by size tells which one is right.
    shots: solved problems of the training split that stand before every question.
    """
    if count < 1 or shots < 0:
        raise DataError(
            f"choices: count = {count}, shots = {shots} is not allowed; count is 1 or more, shots 0 or more"
        )
    settings = settings or Arithmetic()
    chance = random.Random(f"choices {settings.seed} {seed} {split}")
    seen: set[str] = set()
    questions: list[Choice] = []
    fruitless = 0
    while len(questions) < count:
        problem = settings.draw(chance, split)
        fruitless = fruitless + 1 if problem.key in seen else 0
        if fruitless > DRAWS:
            there = f"the {split} split has about {len(seen)} different problems of up to {settings.digits} digits"
            raise DataError.refused("choices: count =", count, there)
        if fruitless:
            continue
        seen.add(problem.key)
        options = [*near_misses(problem, chance), problem.answer]
        chance.shuffle(options)
        before = "".join(f"{settings.draw(chance, 'train').line}\n" for _ in range(shots))
        texts = tuple(f" {option}\n" for option in options)
        questions.append(Choice(before + problem.question, texts, options.index(problem.answer), problem))
    return questions


def near_misses(problem: Problem, chance: random.Random) -> list[int]:
    """Three wrong answers as slips give them: a unit, a carry, a ten or a hundred off.

    Four numbers are laid out first and the answer is then any of them, so the four alone do not tell which it is;
    only where a result would fall below 0, as none of a sum or product can, is the answer among the lower ones.
    """
    right = problem.answer
    steps = {1, 2, 9, 10, 11, *(10**place for place in range(len(str(abs(right)))))}
    layout = [0, *chance.sample(sorted(steps), OPTIONS - 1)]
    own = chance.choice([step for step in layout if problem.operation == "-" or step <= right])
    return [right - own + step for step in layout if step != own]


def score_choices(questions: Sequence[Choice], log_likelihoods: LogLikelihoods, *, batch_size: int = 64) -> ChoiceScore:
    """Accuracy of choosing the likeliest option; a tie counts for its share, so a constant model scores 25 %.

    batch_size: questions, of four continuations each, that are given to the function at a time.
    """
    if not questions or batch_size < 1:
        raise DataError(f"choices: {len(questions)} questions, batch_size = {batch_size}; both must be 1 or more")
    credits: list[float] = []
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        pairs = [(question.context, option) for question in batch for option in question.options]
        given = [float(value) for value in log_likelihoods(pairs)]
        if len(given) != len(pairs):
            raise DataError(f"log_likelihoods: {len(given)} values for {len(pairs)} continuations; one each is needed")
        for number, question in enumerate(batch):
            credits.append(_credit(given[number * OPTIONS : (number + 1) * OPTIONS], question.answer))
    accuracy = sum(credits) / len(credits)
    by_digits: defaultdict[int, list[float]] = defaultdict(list)
    by_operation: defaultdict[str, list[float]] = defaultdict(list)
    for question, credit in zip(questions, credits, strict=True):
        by_digits[question.problem.digits].append(credit)
        by_operation[question.problem.operation].append(credit)
    return ChoiceScore(
        accuracy=accuracy,
        questions=len(credits),
        standard_error=math.sqrt(accuracy * (1 - accuracy) / len(credits)),
        by_digits={key: sum(part) / len(part) for key, part in sorted(by_digits.items())},
        by_operation={key: sum(part) / len(part) for key, part in sorted(by_operation.items())},
    )


def _credit(values: Sequence[float], answer: int) -> float:
    sound = [-math.inf if math.isnan(value) else value for value in values]
    best = max(sound)
    return 1 / sound.count(best) if sound[answer] == best else 0.0
