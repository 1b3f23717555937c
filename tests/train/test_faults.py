"""Runs that are killed, again and again, at random moments, end with bitwise the weights of a run left alone."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from siamesenorm.train.loop import train

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults.py"


@pytest.fixture(scope="module")
def faults():
    spec = importlib.util.spec_from_file_location("faults", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ten_kills():
    """SIGKILL after steps and at the touch of files, SIGTERM; the script does the same for hundreds."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "10", "--seed", "0"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["problems"] == []
    assert summary["kills"] == 10
    assert {end.partition(":")[0] for end in summary["ends"]} == {"alone", "file", "step", "term"}


def test_the_campaign_sees_what_is_lost(faults, tmp_path, monkeypatch):
    """A resume that forgets the optimiser's moments is found out."""
    from siamesenorm.train.checkpoint import state

    restore = state.Restoring.done

    def forgetful(restoring):
        restore(restoring)
        restoring.state["optimizer"].state.clear()

    monkeypatch.setattr(state.Restoring, "done", forgetful)
    problems = faults.campaign(tmp_path, kills=2, seed=3)["problems"]
    assert any("other weights than the run that was left alone" in problem for problem in problems)


def test_training_goes_on_when_the_disk_is_full_and_says_so(faults, tmp_path, monkeypatch):
    """Saves of step 6 to 12 find no room; the run ends as it would have, and every failure is on record."""
    config, folder = faults.tiny_run(tmp_path, "siamese"), tmp_path / "run"
    real, full = os.fsync, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if any(f".step-000000{step:02d}.partial" in path for step in (6, 9, 12)):
            raise full
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert train(config, folder).state == "finished"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    failures = [event["message"] for event in events if event["event"] == "checkpoint"]
    assert len(failures) == 3
    for step, message in zip((6, 9, 12), failures, strict=True):
        assert message.startswith(f"checkpoint of step {step} was not saved: ")
        assert "no space left on device" in message
    assert train(config, tmp_path / "other").state == "finished"
    assert faults.outcome(folder) == faults.outcome(tmp_path / "other")
