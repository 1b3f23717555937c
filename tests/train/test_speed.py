"""How much of the machine is used: never more than all of it, and measured where other programs disturb least."""

import pytest
import torch

from siamesenorm.train import speed
from siamesenorm.train.distributed import World
from siamesenorm.train.speed import Peak, measure_cpu


def test_a_measured_peak_is_at_least_what_a_run_was_seen_to_do():
    peak = Peak(1e9, measured=True)
    assert peak.share(5e8) == 0.5
    assert peak.share(4e9) == 1.0
    assert peak.share(1e9) == 0.25


def test_a_given_peak_stays():
    peak = Peak.of(World(size=2, mode="none"), None, given=1e9)
    assert peak.share(4e9) == 2.0
    assert peak.share(2e9) == 1.0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_cpu_is_measured_on_one_thread_and_counts_for_all(monkeypatch, threads):
    seen = []
    before = torch.get_num_threads()
    monkeypatch.setattr(speed, "_fastest", lambda dtype: seen.append((dtype, torch.get_num_threads())) or 1e9)
    torch.set_num_threads(threads)
    try:
        assert measure_cpu(torch.bfloat16) == threads * 1e9
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert seen == [(torch.bfloat16, 1)]


def test_measuring_gives_a_number():
    assert Peak.of(World(), None).flops > 1e6
