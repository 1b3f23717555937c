"""The compiled kernels read and write no byte beyond their tensors, whatever the shapes: a fuzz under sanitizers."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from siamesenorm.residual.kernels import native

SOURCE = Path(native.__file__).parents[2]
KERNELS = [*sorted(SOURCE.glob("residual/kernels/*.c")), *sorted(SOURCE.glob("layers/kernels/*.c"))]
FOUND = ("address", "undefined", "float-cast-overflow")
FLAGS = ["-shared", "-fPIC", "-fopenmp", "-g", "-O1", f"-fsanitize={','.join(FOUND)}", "-fno-sanitize-recover=all"]
TESTS = Path(__file__).parents[1]


def runtime(name):
    """Where gcc keeps a sanitizer's library, or None."""
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return found if Path(found).is_absolute() else None


def exported():
    return {
        name
        for file in KERNELS
        for name in re.findall(r"^int siamesenorm_(\w+)\(const", file.read_text(), re.MULTILINE)
    }


@pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY,
    reason="a limit of address space leaves no room for the sanitizer's map of it",
)
def test_no_kernel_leaves_its_tensors(tmp_path):
    loaded = [runtime(name) for name in ("libasan.so", "libubsan.so")]
    if None in loaded:
        pytest.skip("gcc's sanitizer library is not installed")
    library = tmp_path / "kernels.so"
    subprocess.run(["gcc", *FLAGS, *map(str, KERNELS), "-lm", "-o", str(library)], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(str, loaded)),
        "ASAN_OPTIONS": "detect_leaks=0:hard_rss_limit_mb=4000",  # Python and torch leave much to the end of a process
        "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), str(TESTS)]),
        "OMP_NUM_THREADS": "2",
    }
    fuzz = [sys.executable, str(Path(__file__).parent / "fuzz_kernels.py"), str(library)]
    done = subprocess.run(fuzz, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[:5000]
    assert set(done.stdout.split()) == exported()
