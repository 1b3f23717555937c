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

from .damage import copied, damaged
from .senseless import bad_invocations, command_of, parameters
from .sound_inputs import INVOCATIONS, Invocation, make_inputs, make_surroundings
from .verdict import snapshot, verdict

VALUES = 3
"""Senseless values of each parameter, of about fifteen."""
SLOW = ("tasks",)
"""Reads thousands of files of the lm-evaluation-harness before it can refuse a name."""
COMMANDS = sorted({parameter.command for parameter in parameters()} - {("data", "encode-images")})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What is trained on the way is of no interest here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("siamesenorm.lab.runner.LocalEngine.run", lambda *arguments: True)
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
    for invocation, parameter, value in bad_invocations([i for i in INVOCATIONS if command_of(i) == command]):
        if parameter.name not in SLOW:
            by_name.setdefault((parameter.name, parameter.option), []).append((invocation, value))
    for (name, _), cases in by_name.items():
        for invocation, value in chance.sample(cases, min(VALUES, len(cases))):
            folder = free(tmp_path / "case")
            places = dict(inputs)
            places |= {n: copied(inputs[n], folder / n) for n in ("half", "grid") if n in invocation.inputs}
            wrong = ended(invocation, places, folder, monkeypatch)
            assert not wrong, (name, value[:200], wrong)


@pytest.mark.parametrize(
    "sound", [i for i in INVOCATIONS if {*i.inputs} - {"cache"}], ids=lambda i: " ".join(i.arguments[:4])
)
def test_damaged_files_end_in_one_sentence(sound, inputs, tmp_path, monkeypatch):
    chance = random.Random(" ".join(sound.arguments))
    for name in sorted({*sound.inputs} - {"cache"}):
        files = [path for path in inputs[name].rglob("*") if path.is_file()] or [inputs[name]]
        for file in chance.sample(sorted(files), min(3, len(files))):
            folder = free(tmp_path / "case")
            folder.mkdir()
            copy = copied(inputs[name], folder / inputs[name].name)
            target = copy / file.relative_to(inputs[name]) if copy.is_dir() else copy
            said = damaged(target, chance)
            wrong = ended(sound, {**inputs, name: copy}, folder, monkeypatch, spoilt=True)
            assert not wrong, (str(file.relative_to(inputs[name].parent)), said, wrong)
