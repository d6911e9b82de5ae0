"""What a job hands back beside what it trained: one arm of `export` after the other, each proven before it is released.

A format that cannot be made, or is not what was trained, is withheld: its files are removed, the job says so in a
notice and in its result, and what was trained is handed back all the same. A format that works but has kept too little
of the tuning is put below WITHHELD, with its figures.
"""

from __future__ import annotations

import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_never

from core.spec.axes.export import (
    AWQ,
    FP8,
    GGUF,
    GPTQ,
    MXFP4,
    Export,
    LMEval,
    Merged,
    TorchAOInt4,
    TorchAOInt8,
    VLLMAdapter,
    about,
)
from core.spec.axes.method import Full
from core.train.base.disk import disk_full
from core.train.base.events import EventWriter
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.stop import StopRequested
from core.train.export.formats.subject import Subject, Withheld

WITHHELD = "withheld"
"""Folder below the artifacts of what was made and is not released."""


def write_formats(exports: Sequence[Export], subject: Subject, events: EventWriter) -> list[dict[str, Any]]:
    """Write each format into a folder below the artifacts; what became of each, for the job's result.
    StopRequested from `subject.between`, and a full disk, go through."""
    outcomes: list[dict[str, Any]] = []
    try:
        for item in exports:
            known = about(item)
            folder = subject.artifacts / known.folder
            told: dict[str, Any] = item.model_dump() | {"folder": known.folder}
            try:
                begun = time.monotonic()
                written = _written(item, subject, folder)
                taken = {"bytes": _bytes(folder), "seconds": round(time.monotonic() - begun, 3)}
                outcomes.append(told | written | taken | {"released": True})
            except Exception as error:
                if isinstance(error, StopRequested) or disk_full(error):
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                outcome = told | _withheld(error, folder, known.folder)
                outcomes.append(outcome | {"released": False})
                own = "the model itself" if isinstance(subject.method, Full) else "the adapter"
                message = f"{known.title} is not released: {outcome['reason']}; {own} is, as it was trained"
                events.write("notice", code=known.withheld, message=message)
    finally:
        subject.close()
    return outcomes


def _written(item: Export, subject: Subject, folder: Path) -> dict[str, Any]:
    match item:
        case Merged():
            from core.train.export.formats.merged import write_merged_format

            return write_merged_format(item, subject, folder)
        case GGUF():
            from core.train.export.formats.gguf import write_gguf

            return write_gguf(item, subject, folder)
        case VLLMAdapter():
            from core.train.export.formats.vllm import write_vllm

            return write_vllm(item, subject, folder)
        case TorchAOInt8() | TorchAOInt4() if subject.rounded is not None:
            from core.train.export.formats.packed import write_as_trained

            return write_as_trained(item, subject.rounded, subject, folder)
        case FP8() | TorchAOInt8():
            from core.train.export.formats.packed import write_rounded

            return write_rounded(item, subject, folder)
        case GPTQ() | AWQ() | MXFP4() | TorchAOInt4():
            from core.train.export.formats.packed import write_four_bits

            return write_four_bits(item, subject, folder)
        case LMEval():
            from core.train.export.formats.lm_eval import write_lm_eval

            return write_lm_eval(item, subject, folder)
        case _ as never:
            assert_never(never)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _withheld(error: Exception, folder: Path, name: str) -> dict[str, Any]:
    """Put the files apart, or remove them; why, and what was measured."""
    found: dict[str, Any] = {"reason": _reason(error), "check": None, "retention": None}
    if isinstance(error, Withheld):
        found["check"] = None if error.check is None else error.check.as_dict()
        found["retention"] = None if error.retention is None else error.retention.as_dict()
        if error.kept_apart:
            apart = folder.parent / WITHHELD / name
            apart.parent.mkdir(exist_ok=True)
            folder.rename(apart)
            return found | {"folder": f"{WITHHELD}/{name}"}
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, Withheld):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    if is_out_of_memory(error):
        return "there was not enough memory to make it and to compare it"
    return f"it could not be made ({type(error).__name__}: {error})"
