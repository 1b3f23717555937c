"""The lower bounds of pyproject.toml: of one form, below the pins, and what the code itself asks for."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNPINNED = {"wandb", "trackio"}  # trackers that tests stand in for


@pytest.fixture(scope="module")
def lowest():
    spec = importlib.util.spec_from_file_location("lowest_versions", ROOT / "scripts" / "lowest_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.lowest


def test_every_requirement_has_a_lowest_version_that_its_pin_is_not_below(lowest):
    versions = lowest(PROJECT)
    assert {"torch", "transformers", "timm", "wandb"} <= versions.keys()
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-"): Version(version) for name, version in pins}
    assert versions.keys() - pinned.keys() == UNPINNED
    assert [name for name in versions.keys() & pinned.keys() if pinned[name] < Version(versions[name])] == []


@pytest.mark.parametrize("texts", [["torch"], ["torch~=2.8"], ["torch>=2.8,<3"], ["torch>=2.8", "torch>=2.9"]])
def test_what_has_no_one_lowest_version_is_refused(texts, lowest):
    with pytest.raises(SystemExit, match=r"pyproject\.toml: .*torch"):
        lowest({"name": "siamesenorm", "dependencies": texts, "optional-dependencies": {}})


def test_an_older_transformers_is_refused_by_the_version_that_is_declared(lowest, tmp_path):
    needed = Version(lowest(PROJECT)["transformers"])
    old = f"{needed.major}.{needed.minor - 1}.9"
    (tmp_path / "transformers.py").write_text(f"__version__ = {old!r}\n")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nsys.modules['torchvision'] = None\n"
    code += "import siamesenorm.interop.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert f"transformers {old} is installed, {needed} or newer is needed" in done.stderr
