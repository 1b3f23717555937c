"""torchvision beside a torch it was not built for, in processes of their own: a declaration cannot be undone."""

import subprocess
import sys

import pytest

from siamesenorm.interop import torchvision_ops

pytest.importorskip("siamesenorm.interop.timm", exc_type=ImportError)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout


def test_torchvision_imports_and_only_what_is_missing_is_declared():
    out = run(
        "from siamesenorm.interop.torchvision_ops import declare_missing_ops\n"
        "needed = declare_missing_ops()\n"
        "import torchvision\n"
        "print(needed, torchvision.extension._has_ops(), declare_missing_ops() == needed)"
    )
    needed, whole, same = out.split()
    assert needed != whole  # declared exactly where torchvision's own extension did not load
    assert same == "True"


def test_a_whole_torchvision_is_left_alone(monkeypatch):
    monkeypatch.setattr(torchvision_ops, "_loads_extension", lambda folder: True)
    monkeypatch.setattr(torchvision_ops.torch.library, "Library", None)  # declaring anything would fail
    assert torchvision_ops.declare_missing_ops.__wrapped__() is False


def test_without_torchvision_nothing_happens(monkeypatch):
    monkeypatch.setattr(torchvision_ops.importlib.util, "find_spec", lambda name: None)
    assert torchvision_ops.declare_missing_ops.__wrapped__() is False


def test_without_timm_the_extra_is_named():
    out = run(
        "import sys\nsys.modules['timm'] = None\n"
        "try:\n    import siamesenorm.interop.timm\n"
        "except ImportError as error:\n    print(error)"
    )
    assert out.strip() == "timm is needed here: pip install 'siamesenorm[vision]'"
