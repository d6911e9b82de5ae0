"""The common ground of all spec models: strict about names, silent about nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from core.base.attribute_docs import AttributeDocsModel


class SpecModel(AttributeDocsModel):
    """Unknown fields are errors, numbers are finite (and no strings or booleans), values never change.

    Attribute docstrings become the field descriptions of OpenAPI and of docs/spec.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _default_arms(cls, written: Any) -> Any:
        """An object without `type` is the default arm of its axis, if that arm has all of its fields: `method.r=8`
        needs no `method.type=lora` beside it."""
        if not isinstance(written, dict):
            return written
        added: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            value, arm = written.get(name), type(field.default)
            if isinstance(value, dict) and "type" not in value and issubclass(arm, SpecModel):
                known = arm.model_fields
                if "type" in known and value.keys() <= known.keys():
                    added[name] = {"type": known["type"].default, **value}
        return {**written, **added}


@dataclass(frozen=True, slots=True)
class short_form:  # noqa: N801 -- reads as a word inside Annotated[…]
    """Let a plain string stand for an axis: `"method": "lora"` for `{"type": "lora"}`.

    The JSON schema of the input says so: the string, or the object.
    """

    expand: Callable[[str], dict[str, Any] | list[str]]
    example: str | None = None
    """For strings that are not simply a discriminator."""
    otherwise: str | None = None
    """Discriminator of an object that has none."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        expand, otherwise = self.expand, self.otherwise

        def validate(value: Any) -> Any:
            if otherwise is not None and isinstance(value, dict) and "type" not in value:
                return {"type": otherwise, **value}
            return expand(value) if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler(schema)
        if handler.mode == "serialization":
            return whole
        short: dict[str, Any] = {"type": "string", "description": "Short form."}
        if self.expand is by_type:
            short["enum"] = _discriminators(whole, handler)
        elif self.example is not None:
            short["examples"] = [self.example]
        return {"anyOf": [short, whole]}


def _discriminators(schema: dict[str, Any], handler: GetJsonSchemaHandler) -> list[str]:
    if "discriminator" in schema:
        return sorted(schema["discriminator"]["mapping"])
    return [handler.resolve_ref_schema(schema)["properties"]["type"]["const"]]


@dataclass(frozen=True, slots=True)
class yes_or_no:  # noqa: N801 -- as above
    """Let a boolean stand for one of two discriminators: `true` for the first, `false` for the second."""

    yes: str
    no: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def validate(value: Any) -> Any:
            return by_type(self.yes if value else self.no) if isinstance(value, bool) else value

        return core_schema.no_info_before_validator_function(validate, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler(schema)
        if handler.mode == "serialization":
            return whole
        short = {"type": "boolean", "description": f"Short form: `true` is `{self.yes}`, `false` is `{self.no}`."}
        return {"anyOf": [short, whole]}


def by_type(value: str) -> dict[str, Any]:
    """The usual short form: the string is the discriminator."""
    return {"type": value}
