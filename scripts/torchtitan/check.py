"""Whether torchtitan trains our language model: docs/examples/torchtitan on 1, 2 and 8 fake processes.

    python scripts/torchtitan/check.py            # writes benchmarks/results/torchtitan.json

torchtitan has an environment of its own (``.venv-torchtitan``, made on first use). Two processes under FSDP, HSDP and
our tensor parallelism must give the losses and gradient norms of one, and so must the command of docs/scale.md; eight
fake ranks must build every topology. What runs there is inside.py beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
INSIDE = Path(__file__).parent / "inside.py"
DOOR = ROOT / "docs" / "examples" / "torchtitan"
RESULT = ROOT / "benchmarks" / "results" / "torchtitan.json"
VERSIONS = {"torch": "2.13.0", "torchtitan": "0.3.0", "triton": "3.7.1"}
"""torch first: a looser requirement may resolve to another build. torchtitan imports triton, on CPUs too."""
CLOSE = 1e-5


def environment(folder: Path) -> Path:
    """torchtitan's own environment, with what this package needs; returns its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        for name, version in VERSIONS.items():
            subprocess.run([*pip, f"{name}=={version}"], check=True)
        subprocess.run([*pip, "numpy", "pydantic", "pyyaml", "rich", "typer", "safetensors", "tokenizers"], check=True)
    return python


def run(python: Path, kind: str, processes: int) -> dict[str, Any]:
    """What inside.py prints last, of the main process."""
    with tempfile.TemporaryDirectory() as out:
        surroundings = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TITAN_OUT": out, "OMP_NUM_THREADS": "1"}
        command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", INSIDE, kind]
        if kind == "fake":
            surroundings |= {"NGPU": str(processes), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes)}
            command = [python, INSIDE, kind]
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=3600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{kind} on {processes}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def door(python: Path) -> list[float]:
    """Losses that torchtitan's own command shows of two processes with the example's configuration as it is."""
    launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, DOOR / "cpu.py", "--module", "siamesenorm_titan", "--config", "small"]
    paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{DOOR}", "OMP_NUM_THREADS": "1", "LOG_RANK": "0"}
    with tempfile.TemporaryDirectory() as out:
        done = subprocess.run(
            command, env={**os.environ, **paths}, cwd=out, capture_output=True, text=True, timeout=3600
        )
    if done.returncode:
        raise SystemExit(f"the command: exit code {done.returncode}\n{done.stderr[-3000:]}")
    text = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    found = {int(step): float(loss) for step, loss in re.findall(r"step: *(\d+) +loss: *([\d.]+)", text)}
    return [found[step] for step in sorted(found)]


def report(one: dict[str, Any], two: dict[str, Any], fake: dict[str, Any], shown: list[float]) -> dict[str, Any]:
    """Losses, gradient norms, and how far those of two processes are from those of one, relatively."""
    expected = one["one"]
    own = [loss for loss, _ in expected["siamese"]]
    apart = {
        layout: max(
            abs(mine - theirs) / abs(theirs)
            for topology, steps in found.items()
            for step, other in zip(steps, expected[topology], strict=True)
            for mine, theirs in zip(step, other, strict=True)
        )
        for layout, found in two.items()
    }
    as_documented = len(shown) == len(own) and all(abs(a - b) < 1e-4 for a, b in zip(shown, own, strict=True))
    return {
        "command": "python scripts/torchtitan/check.py",
        "versions": VERSIONS,
        "one process, (loss, gradient norm) of 4 steps": expected,
        "two processes, largest relative difference": apart,
        "eight fake ranks, parameters that the first one holds": fake,
        "two processes by torchtitan's own command, losses shown": shown,
        "passed": all(difference < CLOSE for difference in apart.values()) and as_documented,
    }


def main() -> int:
    """Run all parts, write the file, and say what failed."""
    parser = argparse.ArgumentParser(description="Our language model in torchtitan.")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-torchtitan")
    python = environment(parser.parse_args().environment)
    found = report(run(python, "run", 1), run(python, "run", 2), run(python, "fake", 8), door(python))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["two processes, largest relative difference"]))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
