"""Settings for every test: threads and kernels as asked, one seed, hypothesis without chance or clock."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from installed import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  # hooks
from machine import pytest_addoption, pytest_configure  # noqa: F401  # hooks
from order import pytest_collection_modifyitems  # noqa: F401  # hook

settings.register_profile(
    "siamesenorm",
    derandomize=True,
    deadline=None,
    max_examples=25,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("siamesenorm")
# Hypothesis also tries constants of whatever modules are loaded by then, which depends on the order of the tests.
providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: the collector need not look through it again and again, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _seed():
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes the whole stack down, for GPUs to come
