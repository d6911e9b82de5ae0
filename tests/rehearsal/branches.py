"""Which branches on the device's type in core/train were taken as on a GPU.

With EFT_REHEARSAL_BRANCHES set to a folder, every such test in a module of core/train notes there, once a process, that
it came out as it does on a GPU. The list of tests is made from the sources; `faults` compares.
"""

from __future__ import annotations

import ast
import builtins
import marshal
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "EFT_REHEARSAL_BRANCHES"
PACKAGE = "core.train"
CODE = "code"
"""A folder in that one, of the modules' code."""
NOTED = "_eft_branch"
COMPILED = "torch.compile makes code of a GPU by Triton, which has no driver here"
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("core.train.kernels.triton.launch", "tensor.device.type == 'cuda'"): (
        "Triton has no driver here; its kernels are executed from their machine code, and by tests/gpu/test_triton.py"
    ),
    ("core.train.memory.offload.optimizer", "parameter.device.type == 'cpu'"): (
        "a run makes the masters while the model is on the host, so that there is no other outcome"
    ),
    ("core.train.export.in_files", "tensor.device.type != 'cpu'"): (
        "experts are fused on the host, where their files are read; the test keeps joins on a GPU out of files"
    ),
    ("core.train.compiling.prepare", "device.type == 'cpu'"): COMPILED,
    ("core.train.compiling.prepare", "engine.device.type == 'cuda'"): COMPILED,
}
"""(module, source of the test) → why neither outcome of it can be had here."""


def gpu_outcome(node: ast.AST) -> bool | None:
    """What a test of the device's type comes out as on a GPU (of AMD's, where it asks for that); None: no such test."""
    match node:
        case ast.Compare(
            left=ast.Attribute(attr="type"), ops=[op], comparators=[ast.Constant(value="cuda" | "cpu" as kind)]
        ):
            return isinstance(op, ast.Eq) == (kind == "cuda")
        case ast.Attribute(attr="is_cuda", ctx=ast.Load()):
            return True
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="version"), attr="hip"):
            return True
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="cuda"), attr="is_available")
        ):
            return True
        case _:
            return None


class _Noting(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self.module = module

    def visit(self, node: ast.AST) -> Any:
        outcome = gpu_outcome(node)
        if outcome is None:
            return self.generic_visit(node)
        about = (self.module, ast.unparse(node), outcome)
        called = ast.Call(ast.Name(NOTED, ast.Load()), [ast.Constant(about), node], [])  # type: ignore[list-item]
        return ast.copy_location(called, node)


class _Loader(SourceFileLoader):
    kept: Path
    """A folder with the code of modules."""

    def get_code(self, fullname: str) -> CodeType:
        """Compiled once a run, by whichever process comes first to the module."""
        kept = self.kept / fullname
        try:
            code: CodeType = marshal.loads(kept.read_bytes())
        except FileNotFoundError:
            tree = _Noting(fullname).visit(ast.parse(Path(self.path).read_bytes()))
            code = compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)
            aside = kept.with_name(f".{fullname}-{os.getpid()}")
            aside.write_bytes(marshal.dumps(code))
            aside.replace(kept)
        return code


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def install() -> None:
    """Note what is taken from here on, if a folder for it is named."""
    if (folder := os.environ.get(FOLDER)) is None:
        return
    _Loader.kept = Path(folder) / CODE
    _Loader.kept.mkdir(exist_ok=True)
    noted: set[tuple[str, str, bool]] = set()

    def note(about: tuple[str, str, bool], value: Any) -> Any:
        if about not in noted and bool(value) == about[2]:
            noted.add(about)
            with (Path(folder) / str(os.getpid())).open("a") as file:
                file.write(f"{about[0]}\t{about[1]}\n")
        return value

    setattr(builtins, NOTED, note)
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


def device_tests() -> Iterator[tuple[str, str]]:
    """(module, source) of every test of the device's type in core/train."""
    for path in sorted((ROOT / PACKAGE.replace(".", "/")).glob("**/*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_bytes())):
            if gpu_outcome(node) is not None:
                yield module, ast.unparse(node)


def faults(folder: Path) -> list[str]:
    """Tests that never came out as on a GPU and are no exception, and exceptions that have no reason any more."""
    noted = [path for path in folder.iterdir() if path.name != CODE]
    taken = {tuple(line.split("\t")) for path in noted for line in path.read_text().splitlines()}
    everything = set(device_tests())
    missed = everything - taken - set(EXCEPTIONS)
    idle = {one for one in EXCEPTIONS if one in taken or one not in everything}
    return [
        f"{source} of {module} {words}"
        for words, found in (("never came out as on a GPU", missed), ("is an exception without need", idle))
        for module, source in sorted(found)
    ]
