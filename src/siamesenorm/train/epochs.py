"""Runs counted in epochs, counted in steps: how many these are is known when the data are open."""

from __future__ import annotations

from pydantic import ValidationError

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.fields import explain


def in_steps(config: RunConfig) -> RunConfig:
    """The same run with steps instead of epochs; one that has no epochs comes back as it is, its data unopened."""
    if config.train.epochs is None:
        return config
    samples = find_task(config.task)(config).epoch_samples
    try:
        return config.in_steps(samples)
    except ValidationError as error:
        raise ConfigError(explain(error, type(config))) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
