"""How the tests' own processes compute: on how many threads, with compiled kernels or without, waiting for no disk."""

import os
from dataclasses import dataclass

import torch

from siamesenorm.residual.kernels import native


@dataclass(frozen=True)
class Machine:
    threads: int = 1
    kernels: bool = True

    def settle(self):
        """Make this process compute so; before test modules ask whether there are kernels."""
        torch.set_num_threads(self.threads)
        os.fsync = lambda descriptor: None  # processes are killed here, machines are not
        if not self.kernels:
            native.library = lambda: None


current = Machine()


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=1, metavar="N", help="threads of every process (default: 1)")
    parser.addoption("--no-kernels", action="store_true", help="PyTorch's operators in place of the compiled kernels")


def pytest_configure(config):
    global current
    current = Machine(config.getoption("--threads"), not config.getoption("--no-kernels"))
    current.settle()
