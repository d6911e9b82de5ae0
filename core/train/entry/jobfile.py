"""A job as a document, made from a job file and the arguments of a command without a server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, assert_never

from core.errors import DataError, SpecError
from core.spec.axes.data import FileSource, GameRows, HubDataset, PathSource, Single, TaskRows
from core.spec.load import load_yaml


def document(args: argparse.Namespace) -> dict[str, Any]:
    """The job as a document: the file, then the arguments over it."""
    document: dict[str, Any] = {}
    if args.spec is not None:
        try:
            loaded = load_yaml(args.spec.read_bytes())
        except OSError as error:
            raise SpecError(f"{args.spec} cannot be read: {error.strerror}") from error
        if not isinstance(loaded, dict):
            raise SpecError(f"{args.spec} holds no job")
        document = loaded
    if args.model is not None:
        document["model"] = _local(args.model)
    if args.data is not None:
        document.setdefault("data", {})
        _assign(document, "data.train", {"type": "path", "path": str(Path(args.data).absolute())})
    if args.eval is not None:
        _assign(document, "data.eval", {"type": "path", "path": str(Path(args.eval).absolute())})
    if args.method is not None:
        document["method"] = args.method
    for assignment in args.set:
        path, equals, value = assignment.partition("=")
        if not equals or not path:
            raise SpecError(f"--set takes PATH=VALUE such as training.max_steps=10, not `{assignment}`")
        _assign(document, path, load_yaml(value.encode()))
    return document


def several(document: dict[str, Any], gpus: int | None, slots: int | None) -> dict[str, Any]:
    """The job on so many GPUs of this machine, or so many shares of its CPU."""
    if gpus is not None and slots is not None:
        raise SpecError("--gpus are GPUs and --slots shares of the CPU: give one of the two")
    if (count := gpus if slots is None else slots) is not None:
        _assign(document, "resources.gpus", count)
        _assign(document, "resources.accelerator", "gpu" if slots is None else "cpu")
    return document


def _local(model: str) -> str:
    """A path that exists is a path, also without `./` before it; anything else is a hub id."""
    return str(Path(model).absolute()) if Path(model).exists() else model


def _assign(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = document
    for name in parents:
        inner = place.get(name)
        if isinstance(inner, str):  # a short form: `method: lora`, `data: rows.jsonl`
            inner = {"train": inner} if name == "data" else {"type": inner}
        place[name] = inner if isinstance(inner, dict) else {}
        place = place[name]
    place[last] = value


def located(source: Single, field: str) -> tuple[list[Path], dict[str, Any]]:
    match source:
        case PathSource(path=path):
            absolute = Path(path).expanduser().absolute()
            if not absolute.is_file():
                raise DataError(f"{path} is not a file", field=field)
            return [absolute], {}
        case FileSource() | HubDataset() | TaskRows() | GameRows():
            raise DataError("without a server a data file is named by its path", field=field)
        case _ as never:
            assert_never(never)
