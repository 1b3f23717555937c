"""TF32: asked for on GPUs that have it and nowhere else, set for the run alone, and counted in what a GPU can do."""

from __future__ import annotations

import pytest
import torch

from siamesenorm.train import precision, speed
from siamesenorm.train.config import StepsConfig
from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.precision import Precision

from .small_runs import engine, tiny

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def before():
    """What the process had, whatever a test leaves."""
    chosen = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(chosen)


@pytest.mark.parametrize(
    ("wish", "capability", "chosen"), [(True, (8, 0), "high"), (False, (9, 0), "highest"), (True, (7, 5), "highest")]
)
def test_a_gpu_has_it_for_the_run_alone(monkeypatch, wish, capability, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    made = Precision(StepsConfig(steps=1, batch_size=1, tf32=wish), CUDA)
    torch.set_float32_matmul_precision("medium")
    made.open()
    assert torch.get_float32_matmul_precision() == chosen
    assert made.tf32 == (chosen == "high")
    made.close()
    made.close()
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_program_that_chose_by_the_newer_setting_keeps_its_choice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: (_ for _ in ()).throw(RuntimeError("mix")))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda chosen: pytest.fail("set"))
    made = Precision(StepsConfig(steps=1, batch_size=1), CUDA)
    made.open()
    made.close()


def test_a_cpu_is_left_alone():
    torch.set_float32_matmul_precision("medium")
    made = engine("tf32=true")
    assert (torch.get_float32_matmul_precision(), made.precision.tf32) == ("medium", False)
    made.close()
    assert torch.get_float32_matmul_precision() == "medium"


def test_a_run_says_so_and_puts_it_back(monkeypatch, tmp_path):
    """As on a GPU, but for where it is computed."""
    monkeypatch.setattr(precision, "has_tf32", lambda device: True)
    monkeypatch.setattr(Precision, "open", lambda self: setattr(self, "_before", "medium"))
    train(tiny("steps=3"), tmp_path / "run")
    assert "train.tf32=false" in (tmp_path / "run" / "events.jsonl").read_text()
    assert torch.get_float32_matmul_precision() == "medium"
    assert len(read_metrics(tmp_path / "run")) >= 2


def test_what_a_gpu_can_do_depends_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert speed.known_gpu(None) == 1.95e13
    assert speed.known_gpu(None, tf32=True) == 1.56e14
    assert speed.known_gpu(torch.bfloat16, tf32=True) == 3.12e14
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "unknown")
    assert speed.known_gpu(None, tf32=True) is None
