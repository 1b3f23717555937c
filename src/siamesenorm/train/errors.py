"""The one exception of the training room for what a person can put right."""

from __future__ import annotations

from siamesenorm.suggestion import Suggesting


class ConfigError(Suggesting):
    """A recipe, override or run folder that cannot be used; the message is one sentence."""
