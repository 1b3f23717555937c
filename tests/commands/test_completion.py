"""What a shell offers when Tab is pressed, asked for as the installed scripts of typer ask."""

import os
import re
import subprocess
import sys

import pytest

from siamesenorm.cli import main


def bash(monkeypatch, capsys, typed):
    """Bash cuts words at = and : and gives the parts on lines of their own."""
    words = [part for word in typed.split(" ") for part in (re.findall(r"[=:]|[^=:]+", word) or [""])]
    monkeypatch.setenv("_SIAMESENORM_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert main([]) == 0
    return capsys.readouterr().out.split()


def fish(monkeypatch, capsys, typed):
    """Fish and zsh give whole words, and show what each means."""
    monkeypatch.setenv("_SIAMESENORM_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", typed)
    assert main([]) == 0
    return [line.partition("\t")[0] for line in capsys.readouterr().out.splitlines() if line]


@pytest.mark.parametrize(
    ("typed", "behind", "offered"),
    [
        ("train lm-ti", "", ["lm-tiny"]),
        ("train lm-tiny topology=sia", "topology=", ["siamese"]),
        ("train lm-tiny topology=siamese:for", "topology=siamese:", ["form="]),
        ("train lm-tiny topology=siamese:form=pl", "topology=siamese:form=", ["plain"]),
        ("train lm-tiny optimizer.ki", "", ["optimizer.kind=adamw", "optimizer.kind=muon"]),
        ("train lm-tiny schedule.kind=w", "schedule.kind=", ["wsd"]),
        ("train lm-tiny qk_no", "", ["qk_norm=none", "qk_norm=head", "qk_norm=projection"]),
        ("train dit-digits diffusion.predic", "", None),
        ("train lm-tiny diffusion.predic", "", []),
        ("train lm-tiny nonsense=", "nonsense=", []),
        ("compare lm-ti", "", ["lm-tiny"]),
        ("compare dit-digits diffusion.predic", "", None),
        ("compare --topologies pre,sia", "", ["pre,siamese"]),
        ("compare --set optimizer.kind=mu", "optimizer.kind=", ["muon"]),
        ("graft a b --to sia", "", ["siamese"]),
        ("export a b --to ll", "", ["llama"]),
        ("export a b --to saf", "", ["safetensors"]),
        ("models lm-na", "", ["lm-nano"]),
        ("recipes lm-ti", "", ["lm-tiny"]),
        ("topologies sia", "", ["siamese"]),
    ],
)
def test_words_are_completed(monkeypatch, capsys, typed, behind, offered):
    """Behind = and :, bash wants what follows, the others the whole word; None: something, whatever it is."""
    whole = fish(monkeypatch, capsys, f"siamesenorm {typed}")
    cut = bash(monkeypatch, capsys, f"siamesenorm {typed}")
    assert cut == [word.removeprefix(behind) for word in whole]
    assert all(word.startswith(typed.rpartition(" ")[2]) for word in whole)
    assert cut == offered if offered is not None else cut


def test_everything_is_offered_where_nothing_is_typed_yet(monkeypatch, capsys):
    from siamesenorm.residual import TOPOLOGIES
    from siamesenorm.train.recipes import recipe_names

    assert bash(monkeypatch, capsys, "siamesenorm train ") == list(recipe_names())
    assert bash(monkeypatch, capsys, "siamesenorm train lm-tiny topology=") == list(TOPOLOGIES)
    fields = bash(monkeypatch, capsys, "siamesenorm train lm-tiny ")
    assert {"topology=", "lr=", "data.train=", "model.blocks="} <= {*fields}


def test_a_whole_name_leads_on_to_its_options(monkeypatch, capsys):
    offered = fish(monkeypatch, capsys, "siamesenorm train lm-tiny topology=siamese")
    assert {"topology=siamese", "topology=siamese:form=", "topology=siamese:x="} <= {*offered}
    further = fish(monkeypatch, capsys, "siamesenorm topologies siamese:form=plain,")
    assert "siamese:form=plain,x=" in further
    assert "siamese:form=plain,form=" not in further


def test_completed_fields_are_fields():
    """Nothing is offered that an override would not take."""
    from siamesenorm.commands.completion import _known
    from siamesenorm.tasks import TASKS
    from siamesenorm.train.fields import fields_of
    from siamesenorm.train.overrides import find_field
    from siamesenorm.train.recipes import config_class

    for task in TASKS:
        fields = {field.path: field for field in fields_of(config_class(task))}
        for path in _known()["fields"][task]:
            assert find_field(path, fields).path == path


def test_a_shell_does_not_wait_for_torch():
    code = "import sys, siamesenorm.cli as cli; cli.main([]); assert not {'torch', 'yaml'} & {*sys.modules}"
    environment = {
        "_SIAMESENORM_COMPLETE": "complete_bash",
        "COMP_WORDS": "siamesenorm\ntrain\nlm-tiny\ntopology\n=\ns",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "COMP_CWORD": "5"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "siamese" in done.stdout.split()
