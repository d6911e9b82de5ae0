"""The generated pages of docs/: `python -m core.docs` writes them, `--check` fails when one is stale."""

from __future__ import annotations

import argparse
import subprocess
import sys
import typing
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from pydantic_core import PydanticUndefined

from core import HOME, error_codes
from core.base.attribute_docs import attribute_docs
from core.docs import hardware as hardware_docs
from core.docs import install
from core.docs import plans as plan_docs
from core.plan import drift
from core.settings import Settings
from core.spec.axes.rollout import games, tasks
from core.spec.job import JobSpec
from core.train.kernels.triton.compiled import table as kernel_table

# --- docs/spec.md ----------------------------------------------------------------------------------


def spec_page() -> str:
    """The reference of every field of a job, from the models' docstrings and bounds."""
    schema = JobSpec.model_json_schema(mode="validation")
    parts: dict[str, Any] = schema["$defs"]
    lines = [
        "# The job spec",
        "",
        "Generated from `core/spec` by `make docs`. `POST /jobs` accepts the spec as JSON or YAML. Only `model` and",
        "`data` are required; unknown fields are errors. A plain string is the short form of an axis: `method: lora`",
        "means `method: {type: lora}`. An object without `type` is the default arm, if that arm has all of its fields:",
        "`method: {r: 8}` means LoRA. `POST /jobs?dry_run=true` returns the spec with all defaults.",
        "",
        "```yaml",
        "model: HuggingFaceTB/SmolLM2-135M-Instruct",
        "data:",
        "  train: file-01kar3v8x5m2h6n9qst4wyz0bc",
        "method:",
        "  type: lora",
        "  r: 16",
        "```",
        "",
        *_fields(schema, parts),
    ]
    for name, field in schema["properties"].items():
        models = _models(field)
        if not models:
            continue
        lines += ["", f"## {name}"]
        if all("type" in parts[model]["properties"] for model in models):
            lines += ["", field["description"]]
        for model in models:
            lines += _section(name, model, parts)
    return "\n".join(lines) + "\n"


def _section(path: str, model: str, parts: dict[str, Any]) -> list[str]:
    """One arm of an axis, and behind it what its fields are made of."""
    part = parts[model]
    arm = part["properties"].get("type", {}).get("const")
    title = [f"### {path}: {arm}", ""] if arm else []
    lines = ["", *title, _flat(part["description"])]
    table = _fields(part, parts)
    lines += ["", *table] if len(table) > 2 else []
    for name, field in part["properties"].items():
        for inner in _models(field):
            if f"{path}.{name}" not in ("data.eval", "data.train.sources.source"):  # the same arms as data.train
                lines += _section(f"{path}.{name}", inner, parts)
    return lines


def _flat(text: str) -> str:
    """For one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _fields(part: dict[str, Any], parts: dict[str, Any]) -> list[str]:
    required = part.get("required", ())
    rows = [
        f"| `{name}` | {_kind(field, parts)} | {'required' if name in required else _default(field)} "
        f"| {_flat(field['description'])} |"
        for name, field in part["properties"].items()
        if "const" not in field or name != "type"
    ]
    return ["| field | value | default | |", "|---|---|---|---|", *rows]


def _models(field: dict[str, Any]) -> list[str]:
    """Names of the models a field, or an entry of it, may hold, in the order of the union."""
    if "$ref" in field:
        return [field["$ref"].rpartition("/")[2]]
    if field.get("type") == "array" and isinstance(field.get("items"), dict):
        return _models(field["items"])
    return [name for key in ("anyOf", "oneOf") for option in field.get(key, ()) for name in _models(option)]


def _kind(field: dict[str, Any], parts: dict[str, Any]) -> str:
    models = _models(field)
    if models:
        arms = [parts[model]["properties"].get("type", {}).get("const") for model in models]
        many = "list of " if any(option.get("type") == "array" for option in field.get("anyOf", ())) else ""
        return many + ", ".join(f"`{arm}`" for arm in arms) if all(arms) else "object"
    if "anyOf" in field:
        return " or ".join(_kind(option, parts) for option in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    match field["type"]:
        case "array":
            if "prefixItems" in field:
                return f"list of {len(field['prefixItems'])}, each a {_kind(field['prefixItems'][0], parts)}"
            return f"list of {_kind(field['items'], parts)}s"
        case kind:
            return f"{kind}{_bounds(field)}"


def _bounds(field: dict[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    found = [f"{sign} {field[key]:,}".replace(",", " ") for key, sign in signs.items() if key in field]
    return f" {', '.join(found)}" if found else ""


def _default(field: dict[str, Any]) -> str:
    default = field.get("default")
    if isinstance(default, dict):
        return f"`{default['type']}`" if "type" in default else ""
    return "" if default is None else f"`{default}`".replace("True", "true").replace("False", "false")


# --- docs/settings.md ------------------------------------------------------------------------------


def settings_page() -> str:
    """Every setting, from the docstrings of `Settings`."""
    lines = [
        "# Settings",
        "",
        "Generated from `core/settings/fields.py` by `make docs`. All settings are environment variables. The defaults",
        "are right for a single machine. `EFT_NAME_FILE=path` instead of `EFT_NAME=value` reads the value from a file",
        "and strips surrounding white space; use it for secrets. Setting both is an error.",
        "",
        "| variable | type | default | |",
        "|---|---|---|---|",
    ]
    docs = attribute_docs(Settings)
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (PydanticUndefined, None, "", ()) else f"`{_shown(field.default)}`"
        description = _flat(docs.get(name, ""))
        lines.append(f"| `EFT_{name.upper()}` | {_type_name(field.annotation)} | {default} | {description} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(annotation: Any) -> str:
    names = {
        "Path": "path",
        "str": "text",
        "SecretStr": "text",
        "int": "integer",
        "float": "number",
        "bool": "true or false",
    }
    if isinstance(annotation, type) and annotation.__name__ in names:
        return names[annotation.__name__]
    inner = [part for part in typing.get_args(annotation) if part not in (type(None), Ellipsis)]
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(f"`{part}`" for part in inner)
    if typing.get_origin(annotation) is not tuple:  # one of these, or nothing
        return _type_name(inner[0])
    return f"list of {_type_name(inner[0])}s".replace("ss", "s")


# --- docs/cli*.md -----------------------------------------------------------------------------------


def cli_page(name: str = "cli.md") -> str:
    """The manual of the command line, which prints it itself: the client is a program of its own."""
    call = [sys.executable, "-m", "eft.manual", name]
    return subprocess.run(call, cwd=HOME, capture_output=True, text=True, encoding="utf-8", check=True).stdout


PAGES: dict[str, Callable[[], str]] = {
    "spec.md": spec_page,
    "settings.md": settings_page,
    "compatibility.md": plan_docs.render,
    "drift.md": drift.page,
    "tasks.md": tasks.page,
    "games.md": games.page,
    "hardware.md": hardware_docs.render,
    "install-rocm.md": install.rocm,
    "install-cuda.md": install.cuda,
    "kernel-table.md": kernel_table.render,
    "cli.md": cli_page,
    "cli-models.md": partial(cli_page, "cli-models.md"),
    "cli-operators.md": partial(cli_page, "cli-operators.md"),
    "troubleshooting.md": error_codes.page,
}


def stale(names: Collection[str] = PAGES.keys()) -> list[str]:
    """Those of the pages that are not what the code says."""
    folder = HOME / "docs"
    return [
        name
        for name in names
        if not (folder / name).exists() or (folder / name).read_text(encoding="utf-8") != PAGES[name]()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m core.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    if parser.parse_args().check:
        found = stale()
        for name in found:
            print(f"docs/{name} is stale: run `make docs`", file=sys.stderr)
        return int(bool(found))
    for name in stale():
        (HOME / "docs" / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"docs/{name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
