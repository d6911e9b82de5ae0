"""From bytes to a JobSpec, or to an error that names every wrong field and the nearest right one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from core.errors import Fault, SpecError, TooLarge, plainly
from core.spec import hints
from core.spec.job import JobSpec

MAX_FAULTS = 50
_HALF = re.compile("[\ud800-\udfff]")
MAX_YAML_BYTES = 64 << 10
"""YAML takes a second of work for 100 KB; a job has two."""
MAX_NUMBER = 100
"""Characters of a number in YAML."""


def parse_job(raw: Any) -> JobSpec:
    """Validate a decoded document. Raises SpecError with one fault a wrong field."""
    if not isinstance(raw, dict):
        raise SpecError(f"a job is an object with fields such as `model` and `data`, not {_kind(raw)}")
    try:
        plain = json.loads(json.dumps(raw))
    except (TypeError, ValueError, RecursionError) as error:  # a YAML date or set, an integer of thousands of digits
        raise SpecError(f"the job has a value that JSON cannot express: {error}", code="invalid_value") from error
    try:
        return JobSpec.model_validate(plain)
    except ValidationError as error:
        faults = tuple(_fault(dict(item)) for item in error.errors(include_url=False)[:MAX_FAULTS])
        first = faults[0]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        where = f"{first.field}: " if first.field else ""
        raise SpecError(f"{where}{first.message}{more}", field=first.field, faults=faults) from error


def load_json(text: bytes) -> Any:
    """Decode JSON; a doubled key is an error, since one of the two would be lost in silence."""
    try:
        return json.loads(text, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def load_yaml(text: bytes) -> Any:
    """Decode YAML: no aliases, no doubled keys, and `1e-4` is a number as in JSON (YAML 1.1 calls it a string)."""
    if len(text) > MAX_YAML_BYTES:
        raise TooLarge(f"a job in YAML has at most {MAX_YAML_BYTES >> 10} KiB; this one has {len(text) >> 10} KiB")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 -- _Loader is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, LookupError, AttributeError) as error:
        # The last three are what PyYAML's constructors raise for `!!bool maybe`, `!!float ''` and `!!timestamp x`.
        raise SpecError(f"the body is not valid YAML: {error}", code="invalid_yaml") from error


def storable(document: Any) -> Any:
    """The document. Raises SpecError for what a database, a log or an answer could not hold: NUL and halves of
    surrogate pairs in texts, numbers beyond 63 bits or beyond what a float says."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif (words := _unstorable(value)) is not None:
            field = _place(document, value)
            message = f"{field}: {words}" if field else words
            raise SpecError(message, field=field, faults=(Fault("invalid_value", words, field),), code="invalid_value")
    return document


def _unstorable(value: Any) -> str | None:
    match value:
        case str() if "\0" in value:
            return "a text holds a NUL character"
        case str() if not value.isascii() and _HALF.search(value):
            return "a text holds half of a surrogate pair"
        case int() if not -(2**63) <= value < 2**63:
            return "a number is beyond 63 bits"
        case float() if not math.isfinite(value):
            return "a number is infinite or not a number (NaN)"
        case _:
            return None


def _place(document: Any, wanted: Any) -> str | None:
    """The dotted path of a value; None for the name of a field, which cannot be shown."""
    left: list[tuple[Any, str]] = [(document, "")]
    while left:
        value, path = left.pop()
        if value is wanted:
            return path.removeprefix(".") or None
        if isinstance(value, dict):
            left += [(inner, f"{path}.{_show(str(name))}") for name, inner in value.items()]
        elif isinstance(value, list):
            left += [(inner, f"{path}[{number}]") for number, inner in enumerate(value)]
    return None


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        result[key] = value
    return result


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        # An alias can unfold a small document into an enormous one; a job has no use for it.
        if self.check_event(yaml.AliasEvent):
            raise ValueError("aliases (*name) are not supported in a job")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise ValueError("a key is a plain word, not a list or an object")
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice in one object")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _number(construct: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """PyYAML's, for numbers that one can read: to the base 60 (`1:30:00`) it takes long ones digit by digit."""

    def bounded(loader: _Loader, node: Any) -> Any:
        if len(text := str(node.value)) > MAX_NUMBER and not text.lstrip("+-").startswith(("0x", "0b")):
            raise ValueError(f"a number has at most {MAX_NUMBER} characters")
        return construct(loader, node)

    return bounded


_Loader.add_constructor("tag:yaml.org,2002:int", _number(yaml.SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _number(yaml.SafeLoader.construct_yaml_float))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _fault(error: dict[str, Any]) -> Fault:
    """Turn one pydantic error into ours: the path as the user wrote it, and the way out."""
    path, known, arms = _walk(error["loc"])
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            name = str(error["loc"][-1])
            place = path.removesuffix(_show(name)).removesuffix(".")
            hint = hints.of_field(name, place, known, JobSpec)
            return Fault("unknown_field", f"unknown field `{_show(name)}`{hint}", path)
        case "missing":
            return Fault("missing_field", "this field is required", path)
        case "union_tag_invalid":
            tags = re.findall(r"'([^']*)'", str(context.get("expected_tags", "")))
            tag = str(context.get("tag"))
            hint = hints.of_value(tag, path, tags)
            return Fault("unknown_value", f"unknown type `{_show(tag)}`{hint}", f"{path}.type")
        case "union_tag_not_found":
            return Fault("missing_field", _no_type(path, error.get("input"), arms), path)
        case "literal_error":
            options = re.findall(r"'([^']*)'", str(context.get("expected", ""))) or [str(context.get("expected"))]
            value = str(error.get("input"))
            hint = hints.of_value(value, path, options)
            return Fault("unknown_value", f"unknown value `{_show(value)}`{hint}", path)
        case "string_pattern_mismatch":
            return Fault("invalid_value", _pattern_words(path, error.get("input"), context), path)
        case "value_error":
            return Fault("invalid_value", str(context.get("error", error["msg"])), path)
        case "model_type" | "model_attributes_type" | "dict_type":
            words = f"must be an object, not {_kind(error.get('input'))}{hints.of_object(path)}"
            return Fault("invalid_value", words, path)
        case "list_type":
            words = f"must be a list, not {_kind(error.get('input'))}{hints.of_object(path)}"
            return Fault("invalid_value", words, path)
        case "finite_number":
            return Fault("invalid_value", "must be a finite number, not NaN or infinity", path)
        case _:
            return Fault("invalid_value", plainly(error["msg"]), path)


def _pattern_words(path: str, value: Any, context: dict[str, Any]) -> str:
    shown = _show(str(value))
    if path == "name":
        return f"`{shown}` is not a job name: use letters, digits, space, dot, dash and underscore, up to 100"
    if path.endswith("id") and path.startswith("model"):
        return (
            f"`{shown}` is not a hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`; a folder starts with `/` or `./`"
        )
    if path.endswith("id"):
        return f"`{shown}` is not a file id; `POST /files` returns one such as `file-01k…`"
    return f"`{shown}` does not have the form {context.get('pattern')}"


def _no_type(path: str, written: Any, arms: list[type[BaseModel]]) -> str:
    """An object without `type`: what its fields are called that none of them has, or which types there are."""
    types = [f"`{arm.model_fields['type'].default}`" for arm in arms if "type" in arm.model_fields]
    known = sorted({name for arm in arms for name in arm.model_fields})
    unknown = [name for name in written if isinstance(name, str) and name not in known] if written else []
    faults = [f"unknown field `{_show(name)}`{hints.of_field(name, path, known, JobSpec)}" for name in unknown[:3]]
    return "; ".join(faults) or f"give a `type` here ({', '.join(types)}), or a plain string as its short form"


def _walk(loc: tuple[int | str, ...]) -> tuple[str, list[str], list[type[BaseModel]]]:
    """The user's path (discriminator values left out), the fields known in the model that holds its last step, and the
    models that this step may be."""
    model: Any = JobSpec
    parts: list[str] = []
    known: list[str] = []
    arms: list[type[BaseModel]] = []
    position = 0
    while position < len(loc):
        step = loc[position]
        position += 1
        if isinstance(step, int):
            if parts:
                parts[-1] += f"[{step}]"
            if model not in arms and position < len(loc) and (chosen := _arm(arms, loc[position])) is not None:
                model, position = chosen, position + 1  # an entry of a list of unions
            continue
        if isinstance(model, type) and issubclass(model, BaseModel):
            known = list(model.model_fields)
            parts.append(_show(step))
            field = model.model_fields.get(step)
            model = field.rebuild_annotation() if field is not None else None
            arms = hints.models_in(model)
            if len(arms) == 1:
                model = arms[0]
            elif position < len(loc) and (chosen := _arm(arms, loc[position])) is not None:
                model, position = chosen, position + 1
        # A step inside something that is no model (a union's branch name) says nothing to the user.
    return ".".join(parts) or "(job)", known, arms


def _arm(arms: list[type[BaseModel]], tag: int | str) -> type[BaseModel] | None:
    return next((arm for arm in arms if "type" in arm.model_fields and arm.model_fields["type"].default == tag), None)


def _show(text: str) -> str:
    """A user's text inside a message: short, and with nothing in it that a terminal would obey."""
    safe = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[:80])
    return safe + ("…" if len(text) > 80 else "")


def _kind(raw: Any) -> str:
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "nothing"}
    return kinds.get(type(raw), "a number")
