"""What no command takes: text that is no UTF-8, numbers without end, names that no file can have."""

from pathlib import Path

import pytest

from siamesenorm.commands.arguments import LARGEST, check, checked
from siamesenorm.errors import DataError
from siamesenorm.refusal import LONGEST, one_line, refusal

from .refusals import one_sentence


@pytest.mark.parametrize("value", ["", "é😀", 0, -LARGEST, LARGEST, 1.5, True, None, Path("nowhere/at/all"), Path(".")])
def test_what_may_make_sense_is_left_to_the_command(value):
    check("x", value)


def test_a_path_may_have_any_bytes():
    check("x", Path("\udcff"))


@pytest.mark.parametrize(
    "value",
    [
        *("a\udcffb", "\ud800", "a\0b", float("nan"), float("inf"), -float("inf"), LARGEST + 1, -LARGEST - 1),
        *(Path("a" * 300), Path("b/" * 3000), Path("a\0b"), Path("\ud800")),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_makes_no_sense_is_refused_with_name_and_value(value):
    with pytest.raises(DataError, match=r"^run: .* is not allowed; it takes ") as caught:
        check("run", value)
    assert repr(str(value))[1:100].rstrip("'") in str(caught.value)  # long ones are cut


def test_lists_are_checked_part_by_part():
    seen = []
    command = checked(lambda **values: seen.append(values))
    command(some_prompts=["a", "b"], x=None)
    assert seen == [{"some_prompts": ["a", "b"], "x": None}]
    with pytest.raises(DataError, match="some-prompts"):
        command(some_prompts=["a", "\udcff"])
    assert len(seen) == 1


def test_an_unreadable_prompt_is_one_sentence(language_run, capsys):
    said = one_sentence(["generate", str(language_run), "a\udcff"], capsys)
    assert r"prompts: 'a\udcff' is not allowed; it takes UTF-8 text, see character 1" in said


@pytest.mark.parametrize("length", [300, 5000])
@pytest.mark.parametrize(
    "command",
    [
        "generate NAME", "inspect NAME", "evaluate NAME", "predict NAME x.png", "sample NAME", "report NAME",
        "data show NAME", "data verify NAME", "data prepare NAME -o out", "data tokenizer NAME -o out", "train NAME",
        "train lm-tiny --run NAME", "train lm-tiny data.train=NAME", "recipes NAME", "models NAME", "topologies NAME",
        "fid NAME digits", "compare --recipe NAME", "compare --text NAME", "compare --out NAME",
        "export NAME x --to hf",
        "train dit-digits data.train=NAME", "train deit-digits loss.teacher=NAME distillation=hard",
    ],
)  # fmt: skip
def test_a_name_of_any_length_is_one_short_sentence(command, length, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = one_sentence(command.replace("NAME", "a" * length).split(), capsys)
    assert len(said) < LONGEST + 100
    assert "aaaa…" in said
    assert list(tmp_path.iterdir()) == []


# The sentence ------------------------------------------------------------------------------------------


def test_a_sentence_is_one_line_of_signs_that_print():
    assert one_line("a\nb\tc\x1b[31m") == "a b c\\x1b[31m"
    assert one_line("'\udcff'") == "'\\udcff'"
    assert one_line("é…·") == "é…·"
    word, many = "w" * 500, "word " * 500
    assert one_line(f"run: '{word}' is") == f"run: '{'w' * 69}…{'w' * 29}' is"
    assert len(one_line(many)) == LONGEST + 1


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(28, "No space left on device", "file"), ("'file' cannot be used: No space left on device", 2)),
        (OSError("disk full"), ("disk full", 2)),
        (FileNotFoundError(2, "No such file", "a", None, "b"), ("'a' and 'b' cannot be used: No such file", 2)),
        (MemoryError(), ("memory: there is not enough of it for what was asked", 1)),
        (DataError("data: is wrong"), ("data: is wrong", 2)),
        (ValueError("a defect"), None),
        (RuntimeError("a defect"), None),
        (KeyError("a defect"), None),
    ],
)
def test_what_people_can_put_right_is_a_sentence_and_a_defect_is_none(error, sentence):
    assert refusal(error) == sentence


def test_memory_that_torch_does_not_get_is_said():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert refusal(caught.value) == ("memory: there is not enough of it for what was asked", 1)
