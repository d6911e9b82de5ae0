"""The catalogue of error codes and the code that writes them are one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from core import HOME
from core.error_codes import PARTS
from core.jobs.views.explain import Code as Waiting
from core.settings import Settings
from worker.attempt.outcome import CRASHES

FIRST = {"Fault", "add", "add_file", "notice", "_fault"}
"""Called with a code as their first argument, and with words as their second."""
SECOND = {"Failed", "_event", "partial"}
"""Called with a failure class, a code and a message; or with a function and its code (`partial(run.notice, "…")`)."""
NO_CODES = {
    # box/doctor: how a line is marked
    "ok",
    "note",
    "problem",
    # core/train/selftest/attention.py: a kernel
    "cudnn",
}


def written() -> Iterator[str]:
    for folder in ("core", "api", "worker", "box"):
        for path in sorted((HOME / folder).rglob("*.py")):
            if path.name != "error_codes.py":
                yield from codes_in(path)
    yield from (code for code, _ in CRASHES.values())
    yield from get_args(Waiting)


def codes_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call():
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                places = node.args[:1] if name in FIRST and len(node.args) > 1 else []
                places = node.args[1:2] if name in SECOND else places
                places = node.args[2:3] if name == "AboutFormat" else places
                places += [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                for place in places:
                    yield from texts(place)
            case ast.Assign(targets=[ast.Name(id="code")], value=value):
                yield from texts(value)
            case ast.AnnAssign(target=ast.Name(id="code"), value=ast.expr() as value):
                yield from texts(value)
            case ast.Dict():
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "code":
                        yield from texts(value)


def texts(node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)) if re.fullmatch(r"[a-z][a-z0-9_]+", text):
            yield text
        case ast.IfExp():
            yield from texts(node.body)
            yield from texts(node.orelse)


def test_every_code_is_explained_and_no_other() -> None:
    explained = Counter(code for _, codes in PARTS.values() for code in codes)
    assert [code for code, times in explained.items() if times > 1] == []
    found = set(written()) - NO_CODES
    assert len(found) > 100
    assert sorted(found - explained.keys()) == [], "say in core/error_codes.py what they mean and what helps"
    assert sorted(explained.keys() - found) == [], "nothing writes them any more"


def test_what_helps_names_settings_and_pages_that_there_are() -> None:
    words = " ".join(" ".join(code) for _, codes in PARTS.values() for code in codes.values())
    settings = {f"EFT_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(r"(?<!`)\bEFT_[A-Z_]+\b", words)) <= settings
    assert [page for page in re.findall(r"docs/[\w-]+\.md", words) if not (HOME / page).exists()] == []
