"""Copies for checkpoints: of the moment they were asked for, read when they have arrived, waited for by nobody else."""

from __future__ import annotations

import threading

import pytest
import torch

from siamesenorm.train.checkpoint import store as module
from siamesenorm.train.checkpoint.state import Staged
from siamesenorm.train.checkpoint.store import CheckpointStore

from .tiny import TinyRun, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_copies_are_of_the_moment_they_were_asked_for(dtype):
    tensor = torch.arange(6).to(dtype).view(2, 3).t()  # not contiguous
    staged = Staged({"a": tensor, "parameter": torch.nn.Parameter(torch.ones(2))})
    expected = tensor.clone()
    tensor.zero_()
    found = staged.arrived()
    assert torch.equal(found["a"], expected)
    assert not found["parameter"].requires_grad


class OnGPU:
    """A tensor of a device whose copies take their time, as far as `Staged` sees it."""

    device = torch.device("cuda", 0)

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def detach(self) -> OnGPU:
        return self

    def to(self, device: str, *, non_blocking: bool, copy: bool) -> torch.Tensor:
        self.happened.append(f"copy to {device}, waiting: {not non_blocking}")
        return torch.ones(1)

    def record_event(self) -> OnGPU:
        self.happened.append("record")
        return self

    def synchronize(self) -> None:
        self.happened.append("wait")


def test_a_gpu_is_waited_for_behind_all_copies_and_only_by_who_reads(monkeypatch):
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: OnGPU(happened))
    staged = Staged({"a": OnGPU(happened), "b": OnGPU(happened), "c": torch.ones(1)})
    copied = ["copy to cpu, waiting: False"] * 2
    assert happened == [*copied, "record"]
    assert staged.arrived().keys() == {"a", "b", "c"}
    assert happened == [*copied, "record", "wait"]


def test_the_writing_thread_waits_for_copies_that_arrive_late(tmp_path, monkeypatch):
    waited = []

    class Late(Staged):
        def __init__(self, tensors):
            self.right = Staged(tensors).arrived()

        def arrived(self):
            waited.append(threading.current_thread().name)
            return self.right

    monkeypatch.setattr(module, "Staged", Late)
    run, store = TinyRun(tiny_model()), CheckpointStore(tmp_path / "checkpoints", 2)
    run.steps(1)
    expected = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    store.save(1, run.state)
    run.steps(1)
    assert store.finish()
    store.load(store.latest(), run.state)
    assert waited == ["checkpoint"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in run.model.state_dict().items())
