"""The common ground of all spec models: strict about names, silent about nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


class SpecModel(BaseModel):
    """Unknown fields are errors, numbers are finite, values never change after validation.

    Attribute docstrings become the field descriptions of OpenAPI and of docs/spec.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


def short_form(expand: Callable[[str], dict[str, Any]]) -> BeforeValidator:
    """Let a plain string stand for an axis: `"method": "lora"` for `{"type": "lora"}`."""

    def validate(value: Any) -> Any:
        return expand(value) if isinstance(value, str) else value

    return BeforeValidator(validate, json_schema_input_type=Any)


def by_type(value: str) -> dict[str, Any]:
    """The usual short form: the string is the discriminator."""
    return {"type": value}


__all__ = ["SpecModel", "WithJsonSchema", "by_type", "short_form"]
