"""torchvision beside a torch it was not built for: one sentence everywhere, mended only where it was asked for."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from siamesenorm.errors import DataError, check_torchvision

SCRIPT = Path(__file__).parents[1] / "scripts" / "mend_torchvision.py"
spec = importlib.util.spec_from_file_location("mend_torchvision", SCRIPT)
mending = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mending)
ADDED, main, mend = mending.ADDED, mending.main, mending.mend

WANTING = (
    "importlib.import_module('siamesenorm.interop.huggingface')",
    "importlib.import_module('siamesenorm.interop.diffusers')",
    "importlib.import_module('siamesenorm.interop.timm')",
    "importlib.import_module('siamesenorm.interop.folder_harness').require_eval(tasks=False)",
    "importlib.import_module('siamesenorm.interop.autoencoder').load_autoencoder('vae')",
    "importlib.import_module('siamesenorm.data.images.timm_transforms').import_timm('timm.data', 'it')",
)


def run(code, *path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.fixture
def mismatched(tmp_path):
    """A torchvision whose operators are missing, as far as its import goes."""
    folder = tmp_path / "torchvision"
    folder.mkdir()
    (folder / "extension.py").write_text("import torch\n\n\ndef _has_ops():\n    return False\n")
    (folder / "__init__.py").write_text(
        "import torch\nfrom . import extension\n"
        "for name in ('nms', 'qnms'):\n    torch.library.register_fake(f'torchvision::{name}')(lambda *_: None)\n"
    )
    return folder


def test_transformers_and_timm_import_on_their_own():
    pytest.importorskip("transformers")
    pytest.importorskip("timm")
    assert run("from transformers import LlamaConfig\nimport timm\nprint(LlamaConfig.model_type)").strip() == "llama"


def test_whoever_wants_torchvision_says_what_is_wrong_with_it(mismatched):
    code = f"import importlib\nfrom siamesenorm.errors import DataError\nfor each in {WANTING!r}:\n"
    code += "    try:\n        eval(each)\n    except DataError as error:\n        print(error)\n"
    sentence = "torchvision was built for another torch (operator torchvision::nms does not exist); "
    sentence += "install both from the same place"
    assert run(code, mismatched.parent).splitlines() == [sentence] * len(WANTING)


def found_first(folder, monkeypatch):
    """The torchvision of a folder in place of the installed one, here and in processes started from here."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_the_command_mends_what_is_installed_and_nothing_else(mismatched, tmp_path, monkeypatch, capsys):
    file, linked = mismatched / "extension.py", tmp_path / "linked.py"
    before = file.read_text()
    os.link(file, linked)  # as installers do with files of one cache
    found_first(tmp_path, monkeypatch)
    assert main() == 0
    assert capsys.readouterr().out == f"nms and qnms are declared in {file}: torchvision imports\n"
    assert file.read_text() == before + ADDED
    assert linked.read_text() == before


def test_what_imports_or_cannot_be_mended_is_left_alone(mismatched, monkeypatch, capsys):
    found_first(mismatched.parent, monkeypatch)
    monkeypatch.setattr(mending, "_imports", lambda: True)
    assert main() == 0
    assert capsys.readouterr().out == "torchvision goes with torch: nothing to do\n"
    assert ADDED not in (mismatched / "extension.py").read_text()
    monkeypatch.setattr(mending, "_imports", lambda: False)
    (mismatched / "extension.py").unlink()
    assert main() == 1
    assert capsys.readouterr().err.startswith("torchvision cannot be mended: ")


def test_mending_twice_adds_once(mismatched):
    mend(mismatched)
    mended = (mismatched / "extension.py").read_text()
    mend(mismatched)
    assert (mismatched / "extension.py").read_text() == mended
    assert [path.name for path in mismatched.glob("*.partial")] == []


def test_without_torchvision_nothing_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_torchvision()


def test_a_failed_import_is_said_with_its_own_words(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('other words')")
    found_first(tmp_path, monkeypatch)
    with pytest.raises(DataError, match=r"another torch \(other words\)"):
        check_torchvision()


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "siamesenorm.interop.timm", raising=False)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"^timm is needed here: pip install 'siamesenorm\[vision\]'$"):
        importlib.import_module("siamesenorm.interop.timm")
