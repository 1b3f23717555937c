"""Whether the lower bounds of pyproject.toml are true: tests in an environment of exactly these versions.

    python scripts/lowest_versions.py [--folder .venv-lowest] [--python python3.11] [tests and options of pytest]

The environment holds every dependency and every extra at once, each at its lowest version, and the package as built
from this source. It takes some 8 GB: older versions of torch come with CUDA. A second run uses it again.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = {"mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python", "mypy", "ruff", "setuptools"}
"""What no test imports: checked by their pins in constraints.txt alone."""
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src")
SMOKE = (
    *("tests/residual", "tests/layers", "tests/models", "tests/test_package.py", "tests/test_private_torch.py"),
    *("tests/test_cli.py", "tests/data", "tests/tasks", "tests/interop", "tests/commands"),
    *("tests/train/test_recipes.py", "tests/train/test_engine.py"),
    *("tests/train/test_checkpoint.py", "tests/train/test_distributed.py", "tests/train/test_trackers.py"),
    *("tests/lab/test_report.py", "tests/lab/test_inspect.py", "tests/lab/test_ray.py"),
)


def lowest(project: dict[str, object]) -> dict[str, str]:
    """The lowest version of every requirement, by name; a requirement must say ``name>=version`` and nothing else."""
    found: dict[str, str] = {}
    extras: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    groups: list[Iterable[str]] = [project["dependencies"], *extras.values()]  # type: ignore[list-item]
    for text in (text for group in groups for text in group):
        if text.startswith(f"{project['name']}["):
            continue
        matched = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)(?:; .+)?", text)
        if matched is None:
            raise SystemExit(f"pyproject.toml: {text!r} is not allowed; a requirement takes the form name>=version")
        name, version = matched.groups()
        if found.setdefault(name, version) != version:
            raise SystemExit(f"pyproject.toml: {name} stands there with {found[name]} and with {version}")
    return {name: version for name, version in found.items() if name not in TOOLS}


def install(folder: Path, interpreter: str, versions: dict[str, str]) -> Path:
    """Make the environment, with uv: it solves in seconds what takes pip an hour. Returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "uv"], check=True)
    uv = [folder / "bin" / "uv", "pip", "install", "-q", "--python", python]
    subprocess.run([*uv, *(f"{name}=={version}" for name, version in versions.items())], check=True)
    with tempfile.TemporaryDirectory() as copy:  # a build leaves files in its source
        for name in BUILT_FROM:
            source, target = ROOT / name, Path(copy) / name
            without = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            shutil.copytree(source, target, ignore=without) if source.is_dir() else shutil.copy(source, target)
        subprocess.run([*uv, "--no-deps", "--reinstall", copy], check=True)
    return python


def main() -> int:
    """Make the environment and run the tests in it; their exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-lowest", help="the environment, kept between runs")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make it with")
    options, for_pytest = parser.parse_known_args()
    versions = lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"])
    print(" ".join(f"{name}=={version}" for name, version in versions.items()), flush=True)
    python = install(options.folder.absolute(), options.python, versions)
    tests = for_pytest if any(not text.startswith("-") for text in for_pytest) else [*SMOKE, *for_pytest]
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not this source
    return subprocess.run([python, "-m", "pytest", "-n", "2", *tests], cwd=ROOT, env=surroundings).returncode


if __name__ == "__main__":
    sys.exit(main())
