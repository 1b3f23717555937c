"""The page of a study."""

from __future__ import annotations

from pathlib import Path

from siamesenorm.lab.study.running import Study


def write_results(study: Study) -> Path:
    """Write the results folder's page."""
    return study.folder
