"""``siamesenorm generate``: from runs and exported folders, several prompts at once, texts that end an answer."""

import pytest
import torch

from siamesenorm.cli import main
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.lm.generation import before

from .refusals import one_sentence

GREEDY = ["--temperature", "0", "--tokens", "12"]


def said(arguments, capsys):
    capsys.readouterr()
    assert main(["generate", *map(str, arguments)]) == 0
    return capsys.readouterr().out[:-1]


def test_prompts_of_unequal_length_are_answered_as_if_alone(language_run, capsys):
    prompts = ["The list", "A", "Python is a language"]
    alone = [said([language_run, prompt, *GREEDY], capsys) for prompt in prompts]
    together = said([language_run, *prompts, *GREEDY], capsys).split("\n········\n")
    assert together == alone
    assert all(text.startswith(prompt) and len(text) > len(prompt) for text, prompt in zip(alone, prompts, strict=True))


def test_samples_are_made_of_every_prompt(language_run, capsys):
    texts = said([language_run, "ab", "cd", "--samples", "2", "--seed", "1"], capsys).split("\n········\n")
    assert [text[:2] for text in texts] == ["ab", "ab", "cd", "cd"]


def test_an_exported_folder_says_what_its_run_says(language_run, tmp_path, capsys):
    assert main(["export", str(language_run), str(tmp_path / "hf"), "--to", "hf", "--no-remote-code"]) == 0
    assert said([tmp_path / "hf", "The ", *GREEDY], capsys) == said([language_run, "The ", *GREEDY], capsys)


def test_a_stop_ends_the_answer_and_is_left_out(language_run, capsys):
    whole = said([language_run, "The ", *GREEDY], capsys).removeprefix("The ")
    for stop in (whole[3], whole[3:6]):  # one token, and several
        expected = "The " + whole[: whole.index(stop)]
        assert said([language_run, "The ", *GREEDY, "--stop", stop, "--stop", "not there"], capsys) == expected


def test_the_first_of_several_stops_counts():
    assert before("one two three", ["three", "two"]) == "one "
    assert before("one two three", []) == "one two three"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--stop", ""], "stop: an empty text is not allowed"),
        (["--temperature", "inf"], "temperature: inf is not allowed"),
        (["x" * 48], "48 tokens are not allowed; with the answer it takes up to model.max_length = 48"),
    ],
)
def test_bad_input_is_one_sentence(language_run, arguments, part, capsys):
    assert part in one_sentence(["generate", str(language_run), *arguments], capsys)


def test_a_folder_that_is_neither_run_nor_exported_is_refused(tmp_path, capsys):
    assert "neither a run" in one_sentence(["generate", str(tmp_path)], capsys)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "nor an exported model" in one_sentence(["generate", str(tmp_path)], capsys)


def test_a_run_whose_weights_are_no_numbers_says_so(language_run, monkeypatch, capsys):
    forward = LanguageModel.logits
    monkeypatch.setattr(LanguageModel, "logits", lambda *arguments: forward(*arguments) * torch.nan)
    assert "logits: the model's are not finite numbers" in one_sentence(["generate", str(language_run), "a"], capsys)
