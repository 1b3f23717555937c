"""The exception of an inspection."""

from __future__ import annotations

from siamesenorm.train.errors import ConfigError


class InspectionError(ConfigError):
    """A model, batch, folder or text that cannot be inspected; the message is one sentence."""
