"""The grouped computation: what it runs, allocates and promises to PyTorch."""

import math

import torch

from siamesenorm.layers import grouped

from .experts import DIM, HIDDEN, batch, gradients, make, outputs


def test_experts_nobody_chose_are_not_computed_and_get_a_zero_gradient(monkeypatch):
    moe = make()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[[0, 2], 0] = torch.tensor([4.0, 3.0], dtype=torch.float64)
        moe.w_in[[1, 3, 4]] = math.nan
        moe.w_out[[1, 3, 4]] = math.nan
    h = batch(6)
    with torch.no_grad():
        h[:, 0] = 1.0
    rows = []
    mm = torch.mm
    monkeypatch.setattr(grouped.torch, "mm", lambda a, b, **kw: rows.append(a.shape[0]) or mm(a, b, **kw))
    out, _ = moe(h)
    assert rows == [6] * 4  # 2 experts × 2 projections, each once on its whole slice
    out.sum().backward()
    assert h.grad.isfinite().all()
    for weight in (moe.w_in, moe.w_out):
        assert (weight.grad[[1, 3, 4]] == 0).all()
        assert (weight.grad[[0, 2]].flatten(1).norm(dim=1) > 0).all()


def test_backward_allocates_one_gradient_for_all_experts():
    """Slicing stacked weights under autograd would make one of full size for every expert."""
    moe, h = make(experts=64, top_k=2, dtype=torch.float32), batch(256, dtype=torch.float32)
    out, _ = moe(h)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out.sum().backward()
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    stacked = 4 * (moe.w_in.numel() + moe.w_out.numel())
    slots = 4 * 256 * 2 * (6 * HIDDEN + 6 * DIM)
    assert allocated < 2 * stacked + 3 * slots  # against 64 × stacked


def test_the_one_kernel_path_equals_the_slices(monkeypatch):
    """What CUDA runs in bfloat16, run here in float32."""
    moe, h = make(dtype=torch.float32, dim=DIM, hidden=8, bias=True), batch(24, dtype=torch.float32)
    slices = outputs(moe, h)
    expected = gradients(moe, h, slices)
    monkeypatch.setattr(grouped, "has_grouped_mm", lambda x, weight: True)
    kernel = outputs(moe, h)
    torch.testing.assert_close(kernel, slices)
    torch.testing.assert_close(gradients(moe, h, kernel), expected)


def test_same_input_gives_the_same_bits():
    moe, h = make(dtype=torch.float32), batch(64, dtype=torch.float32)
    first, second = (gradients(moe, h, outputs(moe, h)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
