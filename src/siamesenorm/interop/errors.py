"""The exceptions of the rooms that meet other people's tools, for what a person can put right."""

from siamesenorm.suggestion import Suggesting


class InteropError(Suggesting):
    """A folder, file, task or missing package; the message is one sentence."""


class OfficialError(Suggesting):
    """A config or state dict that is not a known official model; the message is one sentence."""
