"""Configurations that are made in Python say what is wrong with them in one sentence, as recipes do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from siamesenorm.suggestion import Suggesting

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)  # pydantic gives it no public name


class FieldError(Suggesting):
    """A field that a configuration has not, or a value that it does not take; the message is one sentence."""


class PlainErrors(ModelMetaclass):
    """The class of configurations that people make by calling them; what reads files has its own words."""

    if not TYPE_CHECKING:  # which knows what a class takes from its fields

        def __call__(cls, *arguments: Any, **fields: Any) -> Any:
            """A checked configuration, or a `FieldError`."""
            try:
                return super().__call__(*arguments, **fields)
            except ValidationError as error:
                from siamesenorm.train.fields import explain

                raise FieldError(explain(error, cls)) from None
