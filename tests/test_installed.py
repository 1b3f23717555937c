"""What tests need: missing packages, programs and kernels are skipped over on a person's machine, never in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MARKED = "import pytest\n\n\n@pytest.mark.skipif(True, reason={!r})\ndef test_it(): pass\n"
FILES = {
    "test_whole_file.py": 'import pytest\npytest.importorskip("nothing_of_this_name")\n\n\ndef test_it(): pass\n',
    "test_one.py": 'import pytest\n\n\ndef test_it(): pytest.importorskip("nothing_of_this_name")\n',
    "test_program.py": MARKED.format("nothing_of_this_name is not installed"),
    "test_kernels.py": MARKED.format("installed without nothing_of_this_name"),
    "test_gpu.py": 'import pytest\n\n\ndef test_it(): pytest.skip("no GPU")\n',
}


@pytest.mark.parametrize(
    ("ci", "name", "code", "said"),
    [
        ("", "test_one.py", 0, "1 skipped"),
        ("true", "test_one.py", 1, "1 failed"),
        ("true", "test_whole_file.py", 2, "1 error"),
        ("true", "test_program.py", 1, "1 error"),
        ("true", "test_kernels.py", 1, "1 error"),
        ("true", "test_gpu.py", 0, "1 skipped"),
    ],
)
def test_what_is_missing_is_a_failure_in_ci_alone(ci, name, code, said, tmp_path):
    (tmp_path / name).write_text(FILES[name])
    command = [sys.executable, "-m", "pytest", "-p", "installed", "-p", "no:cacheprovider", name]
    settings = {"CI": ci, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout
    assert ("nothing_of_this_name" in done.stdout) == (code != 0)
