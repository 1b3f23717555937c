"""The Triton kernels: right in Triton's interpreter, compiled for real GPUs, and left alone where they cannot run."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm.residual.kernels import devices, native, siamese_step
from siamesenorm.residual.kernels.layer_norm import layer_norm
from siamesenorm.residual.kernels.siamese_step import ABSENT, LAYER, RMS

HERE = Path(__file__).parent
if importlib.util.find_spec("triton") is None:
    pytest.skip("could not import 'triton'", allow_module_level=True)


def test_in_the_interpreter():
    """In a process of its own: the interpreter is chosen when Triton is first imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE / "triton_interpreted.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


STEPS = {
    "post_pre": ([RMS, RMS, RMS], (True, False, True, False, True, False, False), torch.bfloat16),
    "hybrid_pre's attention": ([ABSENT, RMS, ABSENT], (False, False, True, False, False, False, True), torch.float16),
    "LayerNorm": ([LAYER, LAYER, LAYER], (True,) * 7, torch.float32),
}


@pytest.mark.parametrize("form", ["norm", *STEPS])
def test_they_compile_for_gpus(monkeypatch, tmp_path, form):
    """The interpreter is Python and lets pass what the compiler would not; NVIDIA's assembler has the last word."""
    from siamesenorm.residual.kernels import triton_norm, triton_rows, triton_siamese

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    started = []
    monkeypatch.setattr(
        triton_rows.Launch, "run", lambda self, *call, **constants: started.append((self, call, constants))
    )
    # Triton makes constants of integers that are 1
    width = 1 if form == "norm" else 100
    rows = functools.partial(torch.randn, 1 if form == "hybrid_pre's attention" else 6, width)
    if form == "norm":
        _, rstd = triton_norm.forward(rows(dtype=torch.bfloat16), torch.randn(width), torch.randn(width), 1e-5)
        triton_norm.backward(rows(dtype=torch.bfloat16), rows(dtype=torch.bfloat16), torch.randn(width), None, rstd)
    else:
        kinds, present, dtype = STEPS[form]
        streams = [rows(dtype=dtype) for _ in range(3)]
        parameters = [torch.randn(width) if there else None for there in present]
        *_, stats = triton_siamese.forward(*streams, 0.5, *parameters, kinds, [1e-5] * 3)
        triton_siamese.backward(*streams, *streams[:2], stats, 0.5, *parameters, kinds)
    assert len(started) == 2
    for launch, (kernel, _, *arguments), constants in started:
        compiled = compile_for(80, kernel, launch, arguments, constants)
        assert {"ptx", "cubin"} <= set(compiled.asm)


def compile_for(capability, kernel, launch, arguments, constants):
    """What Triton would make of a launch on an NVIDIA GPU of this compute capability (80: 8.0)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
    given = dict(zip(kernel.arg_names, [*arguments, launch.rows, launch.width], strict=False))
    given |= {**constants, "ROWS": launch.tile_rows, "BLOCK": launch.block}
    fixed = {
        name: value
        for name, value in given.items()
        if value is None or (type(value) is int and value == 1) or name.isupper()
    }
    types = {float: "fp32", int: "i32"}
    signature = {
        name: "constexpr" if name in fixed else types.get(type(value)) or pointers[value.dtype]
        for name, value in given.items()
    }
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, signature, fixed), target=target, options={"num_warps": launch.warps})


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that Triton compiles for, as far as its shapes and dtypes go."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    devices._has_triton.cache_clear()
    with FakeTensorMode():
        yield functools.partial(torch.empty, device="cuda")
    devices._has_triton.cache_clear()


def test_what_they_take(gpu, monkeypatch):
    x = gpu(4, 8)
    assert devices.takes(x, None, gpu(8, dtype=torch.bfloat16), gpu(4, 8, dtype=torch.float16))
    assert devices.takes(gpu(2, devices.WIDEST_ROW))
    for other in (gpu(8, dtype=torch.float64), gpu(0), gpu(8, device="cuda:1"), torch.empty(8)):
        assert not devices.takes(x, other)
    assert not devices.takes(gpu(2, devices.WIDEST_ROW + 1))
    with native.disabled():
        assert not devices.takes(x)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    devices._has_triton.cache_clear()
    assert not devices.takes(x)


def test_without_triton_the_plain_form_runs(gpu, monkeypatch):
    for name in ("triton_norm", "triton_siamese"):
        monkeypatch.delitem(sys.modules, f"siamesenorm.residual.kernels.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    devices._module.cache_clear()
    assert not devices.takes(gpu(4, 8))


def test_streams_that_a_step_takes(gpu):
    """Their dtype and shape must be the result's: neither O, its gate nor g may bring a wider one."""
    low, x = functools.partial(gpu, dtype=torch.bfloat16), gpu(4, 8)
    norms, rows = (gpu(8), None, low(8), None, None, None), low(4, 8)
    assert siamese_step.takes(x, x, x, [*norms, gpu(8)], gpu(1, 8))
    assert siamese_step.takes(x, x, rows, [*norms, low(8)], low(4, 1))
    assert siamese_step.takes(rows, rows, rows, [*norms, None])
    assert not siamese_step.takes(rows, rows, x, [*norms, None])
    assert not siamese_step.takes(rows, rows, rows, [*norms, gpu(8)])
    assert not siamese_step.takes(rows, rows, rows, [*norms, None], gpu(1, 8))
    assert not siamese_step.takes(x, rows, x, [*norms, None])
    for other in (gpu(1, 8), gpu(8)):
        assert not siamese_step.takes(x, other, x, [*norms, None])
        assert not siamese_step.takes(x, x, other, [*norms, None])
    assert not siamese_step.takes(x, x, x, [*norms, None], gpu(3, 4, 8))


def test_a_low_precision_layer_norm_is_one_kernel_on_a_gpu(gpu):
    low = functools.partial(gpu, dtype=torch.bfloat16)
    called = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            called.append(operator)
            return operator(*args, **(kwargs or {}))

    x, weight = low(4, 8), low(8)
    with Recorded():
        assert layer_norm(x, (8,), weight, weight, 1e-5).dtype is torch.bfloat16
    assert [operator for operator in called if operator.namespace == "aten"] == [
        torch.ops.aten.native_layer_norm.default
    ]
    assert layer_norm(x, (8,), gpu(8), None, 1e-5).dtype is torch.bfloat16
