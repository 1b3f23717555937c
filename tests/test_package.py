"""The package as installed: light to import, with a version and everything it names."""

import importlib.metadata
import subprocess
import sys

import pytest

import siamesenorm


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.split())


def test_version_is_the_distributions():
    assert importlib.metadata.version("siamesenorm") == siamesenorm.__version__


def test_import_is_light():
    assert not {"torch", "typer", "rich", "matplotlib", "numpy"} & modules_after("import siamesenorm")


def test_library_needs_torch_only():
    loaded = modules_after("from siamesenorm import Residual\nResidual('siamese', 8, 2)")
    assert "torch" in loaded
    assert not {"typer", "rich", "matplotlib", "triton"} & loaded


def test_models_and_commands_need_no_extra():
    loaded = modules_after("import siamesenorm.cli, siamesenorm.models.lm, siamesenorm.models.vit")
    assert not {"transformers", "lm_eval", "datasets", "peft", "timm"} & loaded


def test_help_does_not_wait_for_torch():
    assert "torch" not in modules_after("from siamesenorm.cli import main\nmain(['-h'])\nmain(['topologies', '-h'])")


def test_every_public_name_is_there():
    for name in siamesenorm.__all__:
        assert getattr(siamesenorm, name) is not None
        assert name in dir(siamesenorm)
    assert siamesenorm.residual.Residual is siamesenorm.Residual
    with pytest.raises(AttributeError, match="nothing_here"):
        siamesenorm.nothing_here  # noqa: B018
