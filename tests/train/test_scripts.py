"""The scripts that start training on clusters: sound shell, and what they do where all that they call is faked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FAKES = {
    "scontrol": 'if [[ $1 == show ]]; then printf "node1\\nnode2\\n"; else echo "scontrol $*" >>"$LOG"; fi',
    "srun": 'echo "srun $*" >>"$LOG"; exec "$@"',
    "torchrun": 'echo "torchrun $*" >>"$LOG"; env | grep ^TORCH_ >>"$LOG"; $WRITES; exit "$CODE"',
}
ARGUMENTS = ["lm-1.3b", "topology=siamese", "about=two words", "--run"]


@pytest.fixture
def start(tmp_path):
    """Calls a script with fakes of all it calls; its exit code, and what it called."""
    fakes = tmp_path / "bin"
    fakes.mkdir()
    for name, body in FAKES.items():
        (fakes / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (fakes / name).chmod(0o755)

    def call(script: str, *arguments: str, code: int = 0, **variables: str) -> tuple[int, str]:
        log = tmp_path / "log"
        log.write_text("")
        path = f"{fakes}{os.pathsep}{os.environ['PATH']}"
        environment = {"PATH": path, "LOG": str(log), "CODE": str(code), "HOME": str(tmp_path), **variables}
        command = ["bash", str(SCRIPTS / script), *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert ended.stderr == ""
        return ended.returncode, log.read_text()

    return call


@pytest.mark.parametrize("script", ["slurm.sbatch", "torchrun-elastic.sh"])
def test_scripts_are_sound(script):
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)
    if checker := shutil.which("shellcheck"):
        subprocess.run([checker, str(SCRIPTS / script)], check=True)


def test_machines_that_come_and_go(start, tmp_path):
    run = tmp_path / "a run"
    code, log = start("torchrun-elastic.sh", *ARGUMENTS, str(run), code=3, HEAD="host1:29501", NODES="1:4", WORKERS="8")
    assert code == 3
    assert log.startswith("torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 --rdzv-backend c10d")
    assert "--rdzv-endpoint host1:29501 --rdzv-id siamesenorm" in log
    assert f"-m -- siamesenorm train lm-1.3b topology=siamese about=two words --run {run}\n" in log
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in log


STATES = {
    "interrupted": (1, True),
    "running": (137, True),
    "finished": (0, False),
    "diverged": (1, False),
    "refused": (1, False),
    "nowhere": (2, False),
}
"""How a run stands when torchrun has ended, its exit code, and whether the job is put back into the queue."""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("option", ["--run", "--out="])
def test_a_job_comes_back_until_its_run_has_ended(start, tmp_path, state, option):
    run, (code, again) = tmp_path / "run", STATES[state]
    run.mkdir()
    if state != "nowhere":
        said = {"state": "interrupted" if state == "refused" else state, "step": 3}
        (run / "status.json").write_text(json.dumps(said, indent=1))
        os.utime(run / "status.json", (0, 0))  # of the job before
    place = [f"{option}{run}"] if option.endswith("=") else [option, str(run)]
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_GPUS_PER_NODE": "8"}
    writes = "true" if state in ("refused", "nowhere") else f"touch {run / 'status.json'}"
    found, log = start("slurm.sbatch", *ARGUMENTS[:-1], *place, code=code, WRITES=writes, **job)
    assert found == code
    assert "srun torchrun --nnodes 2 --nproc-per-node 8" in log
    assert "--rdzv-endpoint node1:29500 --rdzv-id 77" in log
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90" in log
    assert ("scontrol requeue 77\n" in log) == again
