"""One training engine for every task: configuration, optimiser, schedule, loop, checkpoints, distribution, logging.

siamesenorm.train("lm-tiny", topology="siamese", steps=200)        # the package itself can be called
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siamesenorm.train.progress import Result


class _Train(ModuleType):
    """``siamesenorm.train`` is this package as soon as anything of it is imported, so the package trains."""

    def __call__(self, *arguments: Any, **fields: Any) -> Result:
        """See `siamesenorm.train.session.train_recipe`."""
        from siamesenorm.train.session import train_recipe

        return train_recipe(*arguments, **fields)


sys.modules[__name__].__class__ = _Train
