"""A test that lacks something is skipped on a person's machine and fails in CI, where everything is to be installed."""

import os

import pytest

MISSING = ("could not import", "is not installed", "installed without")
"""In the words of `pytest.importorskip` and of the tests' own reasons: a package, a program, the compiled kernels."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return missing_fails_in_ci((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return missing_fails_in_ci((yield), collector.config)


def missing_fails_in_ci(report, config):
    """The report of a test or of a file, as it counts. Kernels that were switched off are not missing."""
    words = MISSING[:2] if config.getoption("--no-kernels", default=False) else MISSING
    if os.environ.get("CI") and report.skipped and any(word in str(report.longrepr) for word in words):
        report.outcome, report.longrepr = "failed", str(report.longrepr[-1])
    return report
