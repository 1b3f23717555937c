"""Configurations that are made in Python say what is wrong with them in one sentence, as recipes do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from siamesenorm.errors import FieldError

if TYPE_CHECKING:  # which knows what a configuration takes from its fields
    PlainModel = BaseModel
else:

    class _PlainErrors(type(BaseModel)):
        def __call__(cls, *arguments: Any, **fields: Any) -> Any:
            """A checked configuration, or a `FieldError`."""
            try:
                return super().__call__(*arguments, **fields)
            except ValidationError as error:
                from siamesenorm.train.fields import explain

                raise FieldError(explain(error, cls)) from None

    class PlainModel(BaseModel, metaclass=_PlainErrors):
        """A configuration that people make by calling its class; what reads files has its own words."""
