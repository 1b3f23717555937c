"""timm's own model tests on our models, as timm's registry has them.

::

    git clone --depth 1 https://github.com/huggingface/pytorch-image-models
    python scripts/timm_tests.py pytorch-image-models/tests --names 'deit_tiny_patch16_224*' -q -rs

The file test_models.py is run as it is, on our names in place of timm's. Where timm keeps a list of models that a kind
of test leaves out, ours are added to it by `LEFT_OUT`, with the reason. Further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LEFT_OUT = {
    "EXCLUDE_FX_FILTERS": "symbolic traces follow no checks of shapes, nor operators that choose a kernel by them",
    "EXCLUDE_JIT_FILTERS": "TorchScript compiles no blocks that take streams of any kind, nor operators from Python",
}
OTHERS = ("-k", "not naflexvit and not gemma4 and not regnetx")
"""Not about models of the registry."""
CONFTEST = '''
import fnmatch
import os

import timm

import siamesenorm.interop.timm as ours

PATTERNS = os.environ["TIMM_TESTS_NAMES"].split(",")
NAMES = [name for name in ours.model_names() if any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS)]


def list_models(filter=(), module="", pretrained=False, exclude_filters=(), **more):
    """Ours, by timm's own rules: none is pretrained, none is of another input than images."""
    if pretrained:
        return []
    wanted, excluded = ([given] if isinstance(given, str) else list(given) for given in (filter, exclude_filters))
    return [name for name in NAMES if fits(name, wanted or ["*"]) and not fits(name, excluded)]


def fits(name, patterns):
    return any(fnmatch.fnmatch(name, pattern or "*") for pattern in patterns)


timm.list_models = list_models
timm.list_pretrained = lambda *_, **__: []
'''


def main() -> int:
    """Run them; pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=Path, help="folder tests/ of a checkout of timm")
    parser.add_argument("--names", default="deit_tiny_patch16_224*", help="patterns of our models' names, with commas")
    arguments, further = parser.parse_known_args()
    source = (arguments.tests / "test_models.py").read_text(encoding="utf-8")
    for name, reason in LEFT_OUT.items():
        if f"{name} = [\n" not in source:
            parser.error(f"test_models.py has no {name}")
        source = source.replace(f"{name} = [\n", f"{name} = [\n    '*',  # {reason}\n", 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_models.py").write_text(source, encoding="utf-8")
        (Path(folder) / "conftest.py").write_text(CONFTEST, encoding="utf-8")
        environment = {**os.environ, "TIMM_TESTS_NAMES": arguments.names}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore",
            "test_models.py",
            *OTHERS,
            *further,
        ]
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
