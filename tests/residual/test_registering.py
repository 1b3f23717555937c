"""A topology from outside: one file, known everywhere by its name, and refused in one sentence where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from siamesenorm.catalogue import catalogue
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES, Residual, Topology, TopologyError, register
from siamesenorm.residual.pre import Pre, PreLink

OUTSIDE = '''
"""Halved Pre-Norm: a topology as a user would write it."""
from siamesenorm.residual import Link, Place, Topology


class HalfLink(Link):
    """Half of the output."""

    equation = "x = x + F(N x)/2"

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def read(self, x):
        return x, self.norm(x)

    def write(self, x, output, keep=None):
        return x + self.dropped(output, keep) / 2


class Half(Topology):
    """Pre-Norm with halved updates."""

    name = "half"
    about = "Pre-Norm whose updates are halved."
    equation = "x = x + F(N x)/2"
    end = "N x"
    kind = "pre"

    def link(self, place: Place) -> Link:
        return HalfLink(self.norm("input"))
'''


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """The environment of a process where a package with a topology of its own is installed."""
    (tmp_path / "half_norm.py").write_text(OUTSIDE)
    facts = tmp_path / "half_norm-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: half-norm\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[siamesenorm.topologies]\nhalf = half_norm:Half\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_package_brings_its_topology_to_commands_models_and_pairs(plugin, tmp_path: Path):
    """Described by its fields, carried by models, a part of a siamese pair; an export says that it cannot carry it."""
    script = tmp_path / "use.py"
    script.write_text(
        "import torch\n"
        "from siamesenorm import Residual\n"
        "from siamesenorm.models.lm import LanguageModel, LMConfig\n"
        "x, W = torch.randn(2, 3, 8), torch.randn(8, 8)\n"
        "half = Residual('half', 8, [('ffn',)])\n"
        "n = torch.nn.functional.rms_norm\n"
        "expected = x + n(x, (8,), eps=1e-5) @ W / 2\n"
        "torch.testing.assert_close(half(x, [lambda h: h @ W]), n(expected, (8,), eps=1e-5))\n"
        "assert Residual('siamese:y=half', 8, 1)(x, [torch.tanh] * 2).shape == x.shape\n"
        "config = LMConfig(vocab_size=16, dim=8, blocks=1, heads=2, ffn_dim=16, topology='half')\n"
        "model = LanguageModel(config, seed=0)\n"
        "model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()\n"
        "from siamesenorm.errors import InteropError\n"
        "from siamesenorm.interop.huggingface.exporter import export\n"
        "try:\n    export(model, 'out')\n"
        "except InteropError as error:\n    print(error)\n"
        "from siamesenorm.cli import main\n"
        "main(['topologies', 'half', '--json'])\n"
    )
    refusal, _, facts = run(plugin, str(script)).partition("\n")
    assert "'half' comes from half_norm" in refusal
    facts = json.loads(facts)
    assert facts["about"] == "Pre-Norm whose updates are halved."
    assert facts["links"][0]["equation"] == "x = x + F(N x)/2"


def test_a_package_that_is_imported_first_is_known_too(plugin, tmp_path: Path):
    """It is half there while it imports this one, which looks for it at that moment."""
    script = tmp_path / "use.py"
    script.write_text(
        "import half_norm\n"
        "from siamesenorm.catalogue import catalogue\n"
        "from siamesenorm.residual import TOPOLOGIES, Residual, registry\n"
        "waiting = [*registry._waiting]\n"
        "assert type(Residual('half', 8, 1)) is half_norm.Half\n"
        "del TOPOLOGIES['half']\n"
        "registry._waiting += waiting\n"
        "assert 'half' in [facts.name for facts in catalogue()]\n"
    )
    run(plugin, "-W", "error", str(script))


def test_a_broken_package_is_left_out_with_a_warning(plugin, tmp_path: Path):
    (tmp_path / "half_norm.py").write_text("raise RuntimeError('no such luck')")
    shown = subprocess.run(
        [sys.executable, "-c", "import siamesenorm.residual as r; assert 'pre' in r.TOPOLOGIES"],
        env=plugin, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert shown.returncode == 0
    assert "half_norm:Half is left out: no such luck" in shown.stderr


def test_a_class_that_is_registered_is_found_and_replaces_itself_alone(monkeypatch):
    monkeypatch.setattr("siamesenorm.residual.registry.TOPOLOGIES", {**TOPOLOGIES})

    class Twice(Pre):
        name = "twice"
        about = "Pre-Norm under another name."

    assert register(register(Twice)) is Twice
    x = torch.randn(2, 8, dtype=torch.float64)
    twice, pre = (Residual(name, 8, 1, dtype=torch.float64) for name in ("twice", "pre"))
    assert isinstance(twice.links[0], PreLink)
    torch.testing.assert_close(twice(x, [torch.tanh] * 2), pre(x, [torch.tanh] * 2))
    LanguageModel(LMConfig(vocab_size=16, dim=8, blocks=1, heads=2, ffn_dim=16, topology="twice"), seed=0)

    class SecondPre(Topology):
        name = "pre"
        about = equation = end = "-"
        kind = "pre"

    with pytest.raises(TopologyError, match=r"name = 'pre' is taken by siamesenorm\.residual\.pre\.Pre"):
        register(SecondPre)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (int, "it takes a subclass of Topology"),
        ("pre", "it takes a subclass of Topology"),
        (type("Nameless", (Topology,), {}), "Nameless has no name"),
        (type("Odd", (Pre,), {"name": "a:b"}), "name = 'a:b' is not allowed"),
        (type("Number", (Pre,), {"name": 3}), "name = 3 is not allowed; it takes a-z"),
        (type("Listed", (Pre,), {"name": ["a"]}), r"name = \['a'\] is not allowed; it takes a-z"),
    ],
)
def test_what_is_no_topology_is_refused(given, sentence: str):
    with pytest.raises(TopologyError, match=sentence):
        register(given)


def test_facts_are_fields_and_outlive_docstrings(monkeypatch):
    """``python -OO`` drops docstrings; the catalogue stays as it is."""
    before = [facts.as_json() for facts in catalogue()]
    for kind in {*TOPOLOGIES.values(), *(type(link) for name in TOPOLOGIES for link in Residual(name, 8, 3).links)}:
        monkeypatch.setattr(kind, "__doc__", None)
        assert kind.equation
    assert [facts.as_json() for facts in catalogue()] == before
    assert all(facts.about and facts.drawing and facts.start for facts in catalogue())
