"""Every command with senseless values for each of its parameters, and with damaged files in the place of sound ones.

scripts/fuzz_commands.py does the same thousands of times, by chance; here are some hundred cases that never change.
"""

import contextlib
import io
import random
import shutil
from pathlib import Path

import pytest

from siamesenorm.cli import main

from .damage import copied, damaged, folder, nested
from .senseless import bad_invocations, command_of, parameters
from .sound_inputs import INVOCATIONS, Invocation, make_inputs, make_surroundings, of
from .verdict import snapshot, verdict

VALUES = 2
"""Senseless values of each parameter, of about fifteen."""
DAMAGES = 2
"""Files of each input that are damaged in turn, each in one of about ten ways."""
SLOW = ("tasks",)
"""Reads thousands of files of the lm-evaluation-harness before it can refuse a name."""
COMMANDS = sorted({parameter.command for parameter in parameters()} - {("data", "encode-images")})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What is trained on the way is of no interest here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("siamesenorm.lab.compare.runner.LocalEngine.run", lambda *arguments: True)
        patch.setattr("siamesenorm.tasks.fidelity.classifier.MOST_STEPS", 2)
        yield make_inputs(tmp_path_factory.mktemp("sound"))


def ended(
    invocation: Invocation, places: dict[str, Path], folder: Path, monkeypatch, spoilt: bool = False
) -> list[str]:
    """What is wrong with how a command ended."""
    monkeypatch.chdir(make_surroundings(folder))
    arguments, before = invocation.filled(places, folder / "out"), snapshot(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return verdict(code, out.getvalue(), err.getvalue(), before, snapshot(folder), arguments if spoilt else ())


def free(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_senseless_values_end_in_one_sentence(command, inputs, tmp_path, monkeypatch):
    chance, by_name = random.Random(f"{command}"), {}
    sound = [i for i in INVOCATIONS if command_of(i) == command]
    assert sound, "no sound invocation"
    for invocation, parameter, value in bad_invocations(sound):
        if parameter.name not in SLOW:
            by_name.setdefault((parameter.name, parameter.option), []).append((invocation, value))
    for (name, _), cases in by_name.items():
        for invocation, value in chance.sample(cases, min(VALUES, len(cases))):
            folder = free(tmp_path / "case")
            places = dict(inputs)
            places |= {n: copied(inputs[n], folder / n) for n in ("half", "grid") if n in invocation.inputs}
            wrong = ended(invocation, places, folder, monkeypatch)
            assert not wrong, (name, value[:200], wrong)


def spoilt_ending(sound, name, file, damage, inputs, folder, monkeypatch) -> tuple[str, list[str]]:
    """How a file of an input was damaged in a copy of it, and what is wrong with how the command then ended."""
    free(folder).mkdir()
    copy = copied(inputs[name], folder / inputs[name].name)
    said = damage(copy / file.relative_to(inputs[name]) if copy.is_dir() else copy)
    return said, ended(sound, {**inputs, name: copy}, folder, monkeypatch, spoilt=True)


def files_of(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file()) or [place]


@pytest.mark.parametrize(
    "sound", [i for i in INVOCATIONS if {*i.inputs} - {"cache"}], ids=lambda i: " ".join(i.arguments[:4])
)
def test_damaged_files_end_in_one_sentence(sound, inputs, tmp_path, monkeypatch):
    chance = random.Random(" ".join(sound.arguments))
    for name in sorted({*sound.inputs} - {"cache"}):
        for _ in range(DAMAGES):
            file = chance.choice(files_of(inputs[name]))
            said, wrong = spoilt_ending(
                sound, name, file, lambda path: damaged(path, chance), inputs, tmp_path / "case", monkeypatch
            )
            assert not wrong, (str(file.relative_to(inputs[name].parent)), said, wrong)


@pytest.mark.parametrize("damage", [nested, folder], ids=["nested without end", "a folder in its place"])
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("generate {lm} a --tokens 2", "lm"),
        ("generate {half} a --tokens 2", "half"),
        ("generate {hf} a --tokens 2", "hf"),
        ("predict {cls} {npy}", "cls"),
        ("report {grid} --out {out}", "grid"),
        ("data show {tokens}", "tokens"),
        ("data verify {latents}", "latents"),
    ],
)
def test_every_file_that_is_text(command, name, damage, inputs, tmp_path, monkeypatch):
    found = [file for file in files_of(inputs[name]) if file.suffix in (".json", ".jsonl", ".yaml")]
    assert found
    for file in found:
        _, wrong = spoilt_ending(
            of(command), name, file, lambda path: damage(path, None), inputs, tmp_path / "case", monkeypatch
        )
        assert not wrong, (str(file.relative_to(inputs[name].parent)), wrong)


def test_the_verdict_sees_what_is_wrong():
    fine = "siamesenorm: run: is wrong\n"
    assert verdict(2, "", fine, {}, {}) == []
    assert verdict(0, "text", "anything", {}, {"out": (1, 1)}) == []
    for code, out, err, after in (
        (70, "", fine, {}),
        (-9, "", "", {}),
        (2, "", "Traceback (most recent call last):\n", {}),
        (2, "", "", {}),
        (2, "", fine * 2, {}),
        (2, "", f"a warning\n{fine}", {}),
        (2, "", f"siamesenorm: {'a' * 2000}\n", {}),
        (2, "", "siamesenorm: \x1b[31m\n", {}),
        (2, "a table", fine, {}),
        (2, "", fine, {"out": (1, 1)}),
    ):
        assert verdict(code, out, err, {}, after), (code, out, err, after)


def test_the_cases_are_some_hundred():
    values = sum(1 for _ in bad_invocations(INVOCATIONS))
    parameters_with_values = [parameter for parameter in parameters() if parameter.kind is not bool]
    assert values > 750
    assert VALUES * len(parameters_with_values) > 200
    assert DAMAGES * sum(len({*i.inputs} - {"cache"}) for i in INVOCATIONS) > 75
