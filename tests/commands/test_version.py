"""``siamesenorm --version`` says what runs here, and why the kernels are missing where they are."""

import pytest
import torch
from typer.testing import CliRunner

from siamesenorm.cli import app
from siamesenorm.residual.kernels import native
from siamesenorm.version import __version__


def shown():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def loaded_from(folder, monkeypatch):
    monkeypatch.setattr(native, "__file__", str(folder / "native.py"))
    return native._load.__wrapped__()


def test_the_package_torch_threads_and_the_cpu(monkeypatch):
    monkeypatch.setattr(native, "absence", lambda: "")
    assert shown() == [
        f"siamesenorm {__version__}",
        f"torch {torch.__version__}",
        "kernels compiled",
        f"threads {torch.get_num_threads()}",
        f"CPU capability {torch.backends.cpu.get_cpu_capability()}",
    ]


def test_missing_kernels_are_said_with_the_reason(tmp_path, monkeypatch):
    nothing, reason = loaded_from(tmp_path, monkeypatch)
    assert nothing is None
    monkeypatch.setattr(native, "absence", lambda: reason)
    said = "kernels absent: the package was installed without a C compiler; PyTorch's operators do their work"
    assert said in shown()


def test_kernels_that_do_not_load_or_are_of_other_sources(tmp_path, monkeypatch):
    (tmp_path / "_kernels.so").write_text("no library")
    nothing, reason = loaded_from(tmp_path, monkeypatch)
    assert nothing is None
    assert reason.startswith("_kernels.so does not load: ")
    monkeypatch.undo()
    if native.absence():
        pytest.skip("installed without the compiled kernels")
    monkeypatch.setattr(native, "VERSION", 0)
    assert native._load.__wrapped__()[1].endswith(", not 0; install the package again")


def test_without_an_openmp_runtime_there_are_none(tmp_path, monkeypatch):
    (tmp_path / "_kernels.so").touch()
    monkeypatch.setattr(native.torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert loaded_from(tmp_path, monkeypatch) == (None, "torch brings no OpenMP runtime to share")
