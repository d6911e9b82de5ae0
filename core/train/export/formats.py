"""What a job hands back beside what it trained: one arm of `export` after the other, each proven before it is released.

A format that cannot be made, or does not say what the trained model says, is withheld: its files are removed, the job
tells so in a notice and in its result, and what was trained is handed back all the same.
"""

from __future__ import annotations

import gc
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from core.spec.axes.export import Merged
from core.spec.job import JobSpec
from core.train.base.disk import disk_full
from core.train.base.events import EventWriter
from core.train.base.out_of_memory import is_out_of_memory
from core.train.base.stop import StopRequested
from core.train.export.compare import Comparison, compare, logits_of
from core.train.export.merge import write_merged
from core.train.kernels.scratch import clear_scratch
from core.train.memory.available import available_bytes
from core.train.model.load import count_parameters, load_model, saved_dtype

MERGED = "merged"


class Withheld(Exception):
    """A format was made and is not what it should be; the words are for the user."""

    def __init__(self, reason: str, check: Comparison | None = None) -> None:
        super().__init__(reason)
        self.check = check


def write_formats(
    spec: JobSpec,
    model: Any,
    tokenizer: Any,
    artifacts: Path,
    *,
    model_dir: Path,
    probes: Sequence[Tensor],
    events: EventWriter,
    between: Callable[[], None],
) -> list[dict[str, Any]]:
    """Write each format of `spec.export` into a folder below `artifacts`; what became of each, for the job's result.
    `probes` are rows of ids to compare with. StopRequested from `between`, and a full disk, go through."""
    outcomes: list[dict[str, Any]] = []
    for item in spec.export:
        match item:
            case Merged():
                folder = artifacts / MERGED
                about: dict[str, Any] = item.model_dump() | {"folder": MERGED}
                make = _merged
            case _ as never:
                assert_never(never)
        try:
            about |= make(item, model, folder, artifacts, model_dir, probes, between)
            tokenizer.save_pretrained(folder)
            outcomes.append(about | {"released": True})
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, StopRequested) or disk_full(error):
                raise
            reason = _reason(error)
            check = error.check.as_dict() if isinstance(error, Withheld) and error.check else None
            outcomes.append(about | {"released": False, "reason": reason, "check": check})
            message = f"the {item.type} model is not handed back: {reason}; the adapter is, as it was trained"
            events.write("notice", code=f"{item.type}_withheld", message=message)
    return outcomes


def _reason(error: Exception) -> str:
    if isinstance(error, Withheld):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    if is_out_of_memory(error):
        return "there was not enough memory to make it and to compare it"
    return f"it could not be made ({type(error).__name__}: {error})"


# --- merged ------------------------------------------------------------------------------------------------


def _merged(
    item: Merged,
    model: Any,
    folder: Path,
    artifacts: Path,
    model_dir: Path,
    probes: Sequence[Tensor],
    between: Callable[[], None],
) -> dict[str, Any]:
    """Merge, write, read again with plain transformers, compare."""
    dtype = _dtype(item, model_dir)
    clear_scratch()  # the dense weights of the last step: up to half a GiB on a GPU
    check_memory(model, dtype)
    original = item.merge_onto == "original"
    if not original:
        with_adapter, without = _both(model, probes, between)
    write_merged(model, folder, model_dir=model_dir, dtype=dtype, original=original, between=between)
    device = next(model.parameters()).device
    if original:
        # What the adapter's folder says by itself, over the model's files: plain transformers and PEFT.
        from peft import PeftModel

        over: Any = load_model(model_dir, saved_dtype(model_dir))
        over = _placed(PeftModel.from_pretrained(over, artifacts / "adapter"), device)
        with_adapter, without = _both(over, probes, between)
        del over
        gc.collect()
    again = _placed(load_model(folder, dtype), device)
    merged = logits_of(again, probes, between)
    check = compare(with_adapter, without, merged, len(probes), dtype)
    if fault := check.fault():
        raise Withheld(f"in {_word(dtype)} {fault}; a `dtype` with more digits or range may do", check)
    return {"dtype": _word(dtype), "check": check.as_dict()}


def check_memory(model: Any, dtype: torch.dtype) -> None:
    """Withheld is better than killed: a killed trainer would hand back no adapter either."""
    needed = count_parameters(model) * dtype.itemsize + model.get_input_embeddings().weight.numel() * 4
    here = available_bytes()
    if here is not None and needed > here:
        raise Withheld(
            f"to read it again and to compare it takes {needed / 1e9:.1f} GB of memory, and {here / 1e9:.1f} are free; "
            "merge on a machine that has more"
        )


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


def _word(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")


def _both(model: Any, probes: Sequence[Tensor], between: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """Logits with the adapter and without it."""
    with_adapter = logits_of(model, probes, between)
    with model.disable_adapter():
        return with_adapter, logits_of(model, probes, between)


def _placed(model: Any, device: torch.device) -> Any:
    """On the device, or where it came from if there is no room."""
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        print(f"notice: no room on {device} for the comparison; it runs on the CPU", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        return model.to("cpu")
