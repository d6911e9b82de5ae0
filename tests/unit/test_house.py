"""Rules of the house: how large a room may be, and how things are named. A failure lists the offenders."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from core import HOME

CLIENT = "client/eft"
"""A program of its own that imports none of the service: its types are named as what they show."""
ROOMS = ("api", "core", "worker", "box", CLIENT)
MODULES_A_FOLDER = 12
WORDS_A_PAGE = 4000
"""Longest generated page of commands: a longer one wants to be told shorter, or to be divided by reader."""
WITH_MORE: dict[str, str] = {
    "client/eft/aio": "a module a resource of the API",
    "client/eft/sync": "a module a resource of the API",
}
"""Folders that may hold more modules, each with the reason."""
GENERATED = ("client/eft/sync/",)
"""Written by a program from another folder, so that its names come twice."""
BEGINNINGS = re.compile(r"(Of|Who|Whose|Nobody|Under which)\b")


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    """Path from the root and syntax tree of each module of the product; parsed once for all rules."""
    found = []
    for room in ROOMS:
        for path in sorted((HOME / room).glob("**/*.py")):
            name = str(path.relative_to(HOME))
            if not name.startswith(GENERATED):
                found.append((name, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, those below fields and constants too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, statement in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            documented = before is None or isinstance(before, ast.Assign | ast.AnnAssign)
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if documented:
                    yield statement.lineno, text


def folders() -> Iterator[Path]:
    for room in ROOMS:
        yield from {path.parent for path in (HOME / room).glob("**/*.py")}


def test_no_folder_holds_more_modules_than_a_newcomer_reads_at_a_glance() -> None:
    counts = {
        str(folder.relative_to(HOME)): len([p for p in folder.glob("*.py") if not p.name.startswith("__")])
        for folder in folders()
    }
    too_many = {name: count for name, count in counts.items() if count > MODULES_A_FOLDER and name not in WITH_MORE}
    assert not too_many
    assert not [name for name in WITH_MORE if counts[name] <= MODULES_A_FOLDER], "needs no exemption any more"


def imports() -> dict[str, set[str]]:
    """Module → modules of the product that it imports, at its top or inside a function."""
    trees = {
        ".".join(Path(name.removeprefix("client/")).with_suffix("").parts).removesuffix(".__init__"): tree
        for name, tree in sources()
    }
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= inner & set(trees) or {node.module}
        graph[module] = (named & set(trees)) - {module}
    return graph


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = imports()
    assert len(graph) > 300 and any(graph.values())
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


@pytest.mark.parametrize("client", [False, True])
def test_no_class_name_stands_for_two_things(client: bool) -> None:
    places = defaultdict(list)
    for name, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and name.startswith(CLIENT) is client:
                places[node.name].append(f"{name}:{node.lineno}")
    doubled = {name: found for name, found in places.items() if len(found) > 1}
    assert not doubled, "\n".join(f"{name}: {', '.join(found)}" for name, found in sorted(doubled.items()))


def test_each_docstring_can_be_read_without_its_neighbour() -> None:
    odd = [
        f"{name}:{line}: {text.strip().splitlines()[0]}"
        for name, tree in sources()
        for line, text in docstrings(tree)
        if BEGINNINGS.match(text.strip())
    ]
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize("text", ["Of the GPU.", "Whose turn it is.", "Nobody is beyond it.", "Under which key."])
def test_the_rule_for_docstrings_finds_what_it_is_for(text: str) -> None:
    assert [found for _, found in docstrings(ast.parse(f'class A:\n    b: int\n    """{text}"""'))] == [text]
    assert BEGINNINGS.match(text)


@pytest.mark.parametrize("page", ["cli.md", "cli-models.md", "cli-operators.md"])
def test_a_page_of_commands_can_be_read(page: str) -> None:
    assert len((HOME / "docs" / page).read_text(encoding="utf-8").split()) <= WORDS_A_PAGE


def test_benches_and_tests_import_what_is_there() -> None:
    """A bench is run by hand, so that nothing else notices when a name of a test's support is gone."""
    ours = {
        str(path.relative_to(HOME)): ast.parse(path.read_text(encoding="utf-8"))
        for room in ("bench", "examples", "tests")
        for path in sorted((HOME / room).glob("**/*.py"))
    }
    trees = dict(sources()) | ours
    names = dict[str, set[str]]()
    missing = []
    for name, tree in ours.items():  # those of the product are mypy's
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            if (target := _module(node.module)) not in trees:
                continue
            if target not in names:
                names[target] = set(_defined(trees[target]))
            for alias in node.names:
                if alias.name not in names[target] and not _is_module(f"{node.module}.{alias.name}"):
                    missing.append(f"{name}: {node.module}.{alias.name}")
    assert not missing


def _module(name: str) -> str:
    """Path from the root of a module or package of ours."""
    path = name.replace(".", "/")
    return f"{path}.py" if (HOME / f"{path}.py").is_file() else f"{path}/__init__.py"


def _is_module(name: str) -> bool:
    return (HOME / _module(name)).is_file() or (HOME / name.replace(".", "/")).is_dir()


def _defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines or imports, also within an `if`, a `try` or a `with`."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case _:
                yield from _defined(node)
