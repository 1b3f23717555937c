"""``siamesenorm data``: what people type, and one sentence with exit code 2 for what is wrong."""

import json

import pytest
from typer.testing import CliRunner

from siamesenorm.cli import main
from siamesenorm.commands.data import app


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text [b]{n}[/b]"}) + "\n" for n in range(99)))
    done = run("prepare", tmp_path / "a.jsonl", "-o", tmp_path / "out", "--validation", "0.2", "--workers", "1")
    assert done.exit_code == 0, done.output
    assert {"train", "validation", "tokenizer"} <= set(done.output.split())
    return tmp_path / "out"


def test_show_has_counts_and_decoded_text(folder):
    done = run("show", folder, "--tokens", "40")
    assert done.exit_code == 0, done.output
    assert "text [b]0[/b]" in done.output
    assert "validation" in done.output
    assert run("show", folder, "--split", "validation").exit_code == 0


def test_verify_ends_with_one_on_damage(folder):
    assert run("verify", folder).exit_code == 0
    path = folder / "train-00000.npy"
    path.write_bytes(path.read_bytes()[:-2])
    done = run("verify", folder)
    assert done.exit_code == 1
    assert "damaged or missing: train-00000.npy" in done.output


def test_train_a_tokenizer_and_prepare_with_it(tmp_path):
    pytest.importorskip("tokenizers")
    done = run("tokenizer", "python-docs", "-o", tmp_path / "t.json", "--vocab-size", "400", "--megabytes", "0.05")
    assert done.exit_code == 0, done.output
    done = run(
        "prepare", "python-docs", "-o", tmp_path / "out", "--tokenizer", tmp_path / "t.json", "--validation", "0.1"
    )
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "index.json").read_text())["tokenizer"]["vocab_size"] == 400


def test_a_note_when_too_little_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("one document")
    done = run("prepare", tmp_path / "a.txt", "-o", tmp_path / "out", "--validation", "0.0001")
    assert done.exit_code == 0
    assert "0 tokens are held out, too few to measure on: it takes 4,096, from 20,480 or more" in told(done.output)
    (tmp_path / "b.txt").write_text("".join(f"line {number} of many\n" for number in range(1500)))
    done = run("prepare", tmp_path / "b.txt", "-o", tmp_path / "other", "--validation", "0.05")
    assert "too few" not in done.output


def told(output):
    return " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "nowhere", "-o", "{out}"], "source: 'nowhere' is neither a file nor a folder"),
        (["prepare", "python-docs", "-o", "{out}", "--validation", "2"], "validation: 2.0 is not allowed"),
        (["prepare", "python-docs", "-o", "{out}", "--unit", "word"], "unit: 'word' is not allowed"),
        (["prepare", "python-docs", "-o", "{out}", "--tokenizer", "bpe"], "tokenizer: 'bpe' is not known"),
        (["show", "{out}"], "is not a prepared folder"),
        (["verify", "{out}"], "is not a prepared folder"),
        (["tokenizer", "python-docs", "-o", "{out}/x/y.json"], "out: "),
        (["tokenizer", "python-docs", "-o", "{out}.json", "--vocab-size", "3"], "vocab_size: 3 is not allowed"),
        (["tokenizer", "python-docs", "-o", "{out}.json", "--megabytes", "0"], "megabytes: 0.0 is not allowed"),
    ],
)
def test_bad_input_is_one_sentence_and_two(tmp_path, arguments, message, capsys):
    assert main(["data", *(argument.replace("{out}", str(tmp_path / "out")) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("siamesenorm: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_failing_machine_is_one_sentence_and_one(tmp_path, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("siamesenorm.data.preparation.prepare", full)
    assert main(["data", "prepare", "python-docs", "-o", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "siamesenorm: [Errno 28] No space left on device\n"
