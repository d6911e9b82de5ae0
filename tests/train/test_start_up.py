"""What a trainer imports before its first step, and what it need not."""

from __future__ import annotations

import json
import marshal
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.base.quick_imports import Remembered
from tests.support.trainer import ENVIRONMENT, ROOT

NOT_AT_START = {
    *("bitsandbytes", "boto3", "botocore", "torchao", "trl", "datasets", "pandas", "pyarrow", "scipy", "sklearn"),
    *("matplotlib", "IPython", "tensorboard", "sqlalchemy", "celery", "fastapi", "redis", "worker", "api"),
    *("torch._inductor.compile_fx", "torch.distributed.run", "transformers.trainer", "transformers.pipelines"),
}
"""A second of each start, or more."""

CODE = """
import json, sys
from core.train.__main__ import importing
with importing():
    import core.train.recipe
told = {name: name in sys.modules and sys.modules[name] is not None for name in json.loads(sys.argv[1])}
import pathlib, transformers
from transformers.utils import import_utils
folder = pathlib.Path(transformers.__file__).parent / "models"
remembered = import_utils.create_import_structure_from_path
told["same"] = remembered(str(folder)) == remembered._scan(str(folder))
told["wrapped"] = type(remembered).__name__
print(json.dumps(told))
"""


def test_a_trainer_imports_what_it_needs_and_knows_all_of_transformers() -> None:
    """The modules that it leaves out, and that transformers finds the same names by its answer and by its scan."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(sorted(NOT_AT_START))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told.pop("same") and told.pop("wrapped") == "Remembered"
    assert [name for name, imported in told.items() if imported] == []


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package like transformers: utils/scanner.py and models."""
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "scanner.py").touch()
    (tmp_path / "models" / "__pycache__").mkdir(parents=True)
    return tmp_path


class Scan:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, path: Any) -> Any:
        self.seen.append(str(path))
        return {frozenset({"torch"}): {"llama": {"LlamaModel"}}, "count": len(self.seen)}


def remembered(scan: Scan, package: Path) -> Remembered:
    return Remembered(scan, package / "utils" / "scanner.py")


def test_an_answer_is_kept_until_the_folder_changes(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    scan, models = Scan(), package / "models"
    first = remembered(scan, package)(models)
    assert remembered(scan, package)(str(models / "__init__.py")) == first and len(scan.seen) == 1
    os.utime(models, (1, 1))  # a file was added
    assert remembered(scan, package)(models)["count"] == 2
    assert remembered(scan, package)(models)["count"] == 2
    os.utime(package / "utils" / "scanner.py", (1, 1))  # another version
    assert remembered(scan, package)(models)["count"] == 3


def test_other_folders_are_scanned_each_time(package: Path) -> None:
    scan = Scan()
    for path in (package / "models" / "llama", package / "models" / "llama" / "__init__.py", package / "utils"):
        for count in (1, 2):
            remembered(scan, package)(path)
            assert scan.seen.count(str(path)) == count


@pytest.mark.parametrize("rubbish", [b"", b"\x00", marshal.dumps(7), marshal.dumps(((0, 0), {}))])
def test_a_file_that_is_none_is_written_anew(package: Path, monkeypatch: pytest.MonkeyPatch, rubbish: bytes) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    scan, models = Scan(), package / "models"
    kept = models / "__pycache__" / f"eft-names.{sys.implementation.cache_tag}.marshal"
    kept.write_bytes(rubbish)
    assert remembered(scan, package)(models)["count"] == 1
    assert remembered(scan, package)(models)["count"] == 1
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]  # no file that was half written


def test_nothing_is_written_where_bytecode_is_not(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, models = Scan(), package / "models"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert remembered(scan, package)(models)["count"] == 1
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (models / "__pycache__").rmdir()  # as in a folder that cannot be written to
    assert remembered(scan, package)(models)["count"] == 2
    assert list(models.iterdir()) == []
