"""A test that lacks a package is skipped on a person's machine and fails in CI, where everything is to be installed."""

import os

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return missing_fails_in_ci((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return missing_fails_in_ci((yield))


def missing_fails_in_ci(report):
    """The report of a test or of a file, as it counts; the words are those of `pytest.importorskip`."""
    if os.environ.get("CI") and report.skipped and "could not import" in str(report.longrepr):
        report.outcome, report.longrepr = "failed", str(report.longrepr[-1])
    return report
