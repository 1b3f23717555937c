"""The exception of the rooms that meet other people's tools, for what a person can put right."""

from __future__ import annotations


class InteropError(ValueError):
    """A folder, file, task or missing package; the message is one sentence."""


class OfficialError(ValueError):
    """A config or state dict that is not a known official model; the message is one sentence."""
