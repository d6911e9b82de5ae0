"""Every way out that is named anywhere exists: commands with their options, settings, targets of make and fields of
jobs, in messages and docstrings of the code, in the explanations of error codes, and on the pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from eft.cli import tree
from eft.manual.source import find
from pydantic import BaseModel

from core import HOME
from core.settings import Settings
from core.spec.job import JobSpec

CODE = ("api", "box", "client/eft", "core", "worker")
PROSE = ("README.md", "docs/*.md", "examples/**/*.md", "examples/**/*.yaml", "client/*.md", "deploy/**/*.md")
HISTORY = ("docs/adr", "CHANGELOG.md")
PLACEHOLDERS = {"EFT_NAME", "EFT_NAME_FILE"}
"""In the words of docs/settings.md about settings from files."""
NOT_OF_JOBS = {
    "memory.activations": "of the run record",
    "quantization.source": "of the run record",
    "optimizer.adamw": "part of the self-test",
    "model.layers": "of the module",
}

Place = tuple[str, str]
"""Where it stands; the text."""


def _strings(path: Path) -> Iterator[str]:
    """Text constants of a module, with what f-strings put in between as `…`; strings that are put together as one."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@cache
def texts() -> tuple[Place, ...]:
    found: list[Place] = []
    for folder in CODE:
        for path in sorted((HOME / folder).rglob("*.py")):
            found += [(str(path.relative_to(HOME)), text) for text in _strings(path)]
    for pattern in PROSE:
        for path in sorted(HOME.glob(pattern)):
            name = str(path.relative_to(HOME))
            if not name.startswith(HISTORY):
                found.append((name, path.read_text(encoding="utf-8")))
    return tuple(found)


def quoted() -> Iterator[Place]:
    """What stands in backticks, on one line of prose."""
    for place, text in texts():
        for span in re.findall(r"`([^`\n]+)`", text):
            yield place, span


def commands() -> Iterator[tuple[str, list[str]]]:
    for place, span in quoted():
        for part in re.split(r"&&|\||;|\$\(", span):
            words = part.strip().strip(")").split()
            while words and re.fullmatch(r"[A-Z_]+=\S*|sudo|\.venv/bin/eft", words[0]):
                words = ["eft", *words[1:]] if words[0].endswith("/eft") else words[1:]
            if words[:1] == ["eft"] and len(words) > 1:
                yield place, words[1:]


@cache
def _tree() -> Any:
    """The commands of `eft`, made once: it takes 50 ms, and a thousand quotations are looked up."""
    return tree()


def _known(words: list[str]) -> tuple[Any, list[str]] | None:
    """The deepest command that they name, and what is left; None: there is no such command."""
    command, rest = _tree(), list(words)
    while rest and re.fullmatch(r"[a-z][a-z-]*", rest[0]):
        child = find(command, [rest[0]])
        if child is None:
            return None if getattr(command, "commands", None) else (command, rest)
        command, rest = child, rest[1:]
    return command, rest


def test_commands_and_their_options() -> None:
    faults, seen = [], 0
    for place, words in commands():
        alternatives = [words]
        if "|" in words[0]:
            continue  # a title that names several
        for one in alternatives:
            if one[0] in ("…", "VERB", "__complete") or one[0].startswith("-"):
                continue
            seen += 1
            found = _known([word.strip(".,:") for word in one])
            if found is None:
                faults.append(f"{place}: there is no `eft {' '.join(words)}`")
                continue
            command, rest = found
            options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            if getattr(command, "context_settings", {}).get("ignore_unknown_options"):
                continue  # a program of the application: its own parser knows
            for word in rest:
                option = re.match(r"--[a-z][a-z-]*", word)
                if option and option[0] not in options | {"--help"}:
                    faults.append(f"{place}: `eft {' '.join(words)}`: no option {option[0]}")
    assert seen > 200
    assert not faults, "\n".join(sorted(set(faults)))


def _variables() -> set[str]:
    """Settings, and what the client, deployments, CI examples and tests read beside them."""
    known = {f"EFT_{name.upper()}" for name in Settings.model_fields}
    known |= {f"{name}_FILE" for name in known} | PLACEHOLDERS
    for folder in (*CODE, "bench", "tests"):
        for path in (HOME / folder).rglob("*.py"):
            if path.name not in ("error_codes.py", Path(__file__).name):
                known |= set(re.findall(r"""["'](EFT_[A-Z0-9_]+)["']""", path.read_text(encoding="utf-8")))
    deployment = [HOME / "Makefile", HOME / "docker-compose.yml", *(HOME / "deploy").rglob("*")]
    for path in [*deployment, *(HOME / "examples" / "ci").rglob("*")]:
        if path.is_file() and path.suffix != ".md" and path.parent.name != "__pycache__":
            known |= set(re.findall(r"(?:\$\{?|ARG )(EFT_[A-Z0-9_]+)", path.read_text(encoding="utf-8")))
            known |= set(re.findall(r"\b(EFT_[A-Z0-9_]+)(?::| *=)", path.read_text(encoding="utf-8")))
    return known


def test_settings() -> None:
    known, faults = _variables(), set()
    for place, text in texts():
        for name in re.findall(r"\bEFT_[A-Z0-9_]+", text):
            prefix = name.endswith("_") and any(one.startswith(name) for one in known)  # `EFT_HANG_SECONDS_…`
            if name not in known and not prefix:
                faults.add(f"{place}: there is no {name}")
    assert len(known) > 100 and not faults, "\n".join(sorted(faults))


def test_targets_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (HOME / "Makefile").read_text(), re.MULTILINE))
    faults = {
        f"{place}: there is no `make {target}`"
        for place, span in quoted()
        for target in re.findall(r"\bmake ([a-z][a-z-]*)", span)
        if target not in targets
    }
    assert {"install", "demo", "up"} <= targets
    assert not faults, "\n".join(sorted(faults))


# -- fields


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return [found for one in inner for found in _models(one)]


def _is_field(path: str) -> bool:
    """Whether some arm of the axes has it; what stands behind a free mapping is free."""
    models: list[type[BaseModel]] = [JobSpec]
    for step in path.split("."):
        name = step.partition("[")[0]
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        models = [found for field in fields for found in _models(field.rebuild_annotation())]
        if not models and any("dict" in str(field.annotation) for field in fields):
            return True
    return True


def test_fields_of_jobs() -> None:
    axes = "|".join(sorted(set(JobSpec.model_fields) - {"name", "version", "priority"}))
    dotted = re.compile(rf"(?:{axes})(?:\.[a-z_]+(?:\[\d+\])?)+(?=$|[:= ])")
    faults, seen = set(), 0
    for place, span in quoted():
        found = dotted.match(span)
        if found is None or re.search(r"\.(py|md|jsonl?|ya?ml|safetensors|json|h)$", found[0]):
            continue
        seen += 1
        if not _is_field(found[0]) and found[0] not in NOT_OF_JOBS:
            faults.add(f"{place}: no job has a field `{found[0]}`")
    assert seen > 80
    assert not faults, "\n".join(sorted(faults))
