"""Imports that cost a trainer less time. What is imported stays the same, but for packages that no run uses."""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

UNUSED = ("bitsandbytes", "boto3", "torchao")
"""Packages that PEFT, transformers and accelerate import where they find them, for more than a second. No run needs
bitsandbytes (core/train/quant); the worker, not the trainer, talks to buckets; torchao is brought in by the one that
asks for fp8 (core/train/quant/fp8.py)."""
SCANNER = "transformers.utils.import_utils"
SCAN = "create_import_structure_from_path"
"""The function of SCANNER that says which module of a folder defines which names."""


def install(unused: Sequence[str] = UNUSED) -> None:
    """Leave out the `unused` packages, and let transformers remember which of its modules defines what. Call it before
    they are imported; it changes nothing for what is imported already."""
    for name in unused:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    if SCANNER not in sys.modules and not any(isinstance(finder, _ScannerFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ScannerFinder())


class _ScannerFinder(MetaPathFinder):
    """Finds SCANNER alone, as Python would, with a loader that wraps its SCAN."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != SCANNER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ScannerLoader(spec.loader)
        return spec


class _ScannerLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        scan = getattr(module, SCAN, None)
        if scan is not None and module.__file__ is not None:
            setattr(module, SCAN, Remembered(scan, Path(module.__file__)))


class Remembered:
    """SCAN of transformers, whose answer for the folder `models` lies beside that folder's bytecode.

    transformers reads each of its 2000 files of models twice in every process, to learn which names they define. As
    with bytecode, an answer is written where the folder may be written to and PYTHONDONTWRITEBYTECODE is not set, and
    holds as long as the folder and the scanner are unchanged.
    """

    def __init__(self, scan: Any, scanner: Path) -> None:
        self._scan = scan
        self._scanner = scanner
        """The file that `scan` is of."""
        self._folder = scanner.parent.parent / "models"
        self._file = self._folder / "__pycache__" / f"eft-names.{sys.implementation.cache_tag}.marshal"

    def __call__(self, module_path: str | os.PathLike[str]) -> Any:
        path = Path(module_path)
        if path not in (self._folder, self._folder / "__init__.py"):
            return self._scan(module_path)
        key = self._key()
        try:
            kept, found = marshal.loads(self._file.read_bytes())  # noqa: S302 -- as trusted as the bytecode beside it
            if kept == key:
                return found
        except (OSError, ValueError, EOFError, TypeError):
            pass  # none yet, or of another version
        found = self._scan(module_path)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):  # a folder that is read-only, or has no bytecode
                self._write(marshal.dumps((key, found)))
        return found

    def _key(self) -> tuple[int, int]:
        """When the folder and the scanner were last changed, in seconds: layers of images keep no more."""
        return int(self._folder.stat().st_mtime), int(self._scanner.stat().st_mtime)

    def _write(self, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=".eft-names.", dir=self._file.parent)
        beside = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            beside.chmod(0o644)
            beside.replace(self._file)
        except BaseException:
            beside.unlink()
            raise
