"""`export: merged`: merge, write, read again with plain transformers, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_never

import torch
import transformers

from core.spec.axes.export import Merged, required_retention
from core.train.export.compare import compare, logits_of
from core.train.export.formats.subject import Subject, Withheld, check_memory, placed
from core.train.export.retention import measure
from core.train.model.heads import head_kind
from core.train.model.load import load_model, saved_dtype


def write_merged_format(item: Merged, subject: Subject, folder: Path) -> dict[str, Any]:
    """Write the format into `folder`; what is known of it. Withheld where it is not what was trained."""
    dtype = _dtype(item, subject.model_dir)
    check_memory(subject.model, dtype)
    tuned, base = subject.logits(item.merge_onto)
    subject.write(folder, item.merge_onto, dtype)
    again = placed(load_model(folder, dtype, head=head_kind(subject.model)), subject.device)
    merged = logits_of(again, subject.rows, subject.between)
    check = compare(tuned, base, merged, len(subject.rows), dtype)
    found = measure(
        tuned,
        base,
        merged,
        rows=len(subject.rows),
        rows_of=subject.rows_of,
        required=required_retention(item),
        reader=f"transformers {transformers.__version__}",
    )
    if fault := check.fault():
        raise Withheld(f"in {word(dtype)} {fault}; a `dtype` with more digits or range may do", check, found)
    if fault := found.fault():
        way = "a `dtype` with more digits or a lower `min_retention`"
        raise Withheld(f"in {word(dtype)} {fault}; the way out is {way}", check, found, kept_apart=True)
    return {"dtype": word(dtype), "check": check.as_dict(), "retention": found.as_dict()}


def _dtype(item: Merged, model_dir: Path) -> torch.dtype:
    match item.dtype:
        case "auto":
            return torch.float16 if saved_dtype(model_dir) is torch.float16 else torch.bfloat16
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case "fp32":
            return torch.float32
        case _ as never:
            assert_never(never)


def word(dtype: torch.dtype) -> str:
    """Name of a dtype in the spec."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")
