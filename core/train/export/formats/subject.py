"""The trained model as every format sees it, with what its files are compared with."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.spec.axes.export import MergeOnto
from core.spec.axes.method import Full, SettledMethod
from core.spec.axes.quantization import QAT
from core.train.export.compare import Comparison, logits_of
from core.train.export.merge import write_merged
from core.train.export.retention import Retention, RowsOf
from core.train.kernels.scratch import clear_scratch
from core.train.memory.available import available_bytes
from core.train.model.heads import head_kind, with_head
from core.train.model.load import count_parameters, given_head, load_model, saved_dtype

SENTENCEPIECE = "tokenizer.model"


class Withheld(Exception):
    """A format cannot be made, or is not what it should be; the words are for the user."""

    def __init__(
        self,
        reason: str,
        check: Comparison | None = None,
        retention: Retention | None = None,
        *,
        kept_apart: bool = False,
    ) -> None:
        super().__init__(reason)
        self.check, self.retention = check, retention
        self.kept_apart = kept_apart
        """Whether its files are kept, beside those that are released."""


@dataclass
class Subject:
    """A trained model whose own files are written already."""

    model: Any
    """All weights, or base and adapter."""
    method: SettledMethod
    tokenizer: Any
    model_dir: Path
    """Folder of the model that training started from."""
    artifacts: Path
    """Folder below which formats are written."""
    trained_dir: Path
    """Folder of what was trained: an adapter, or a model."""
    cache_dir: Path | None
    rows: Sequence[Tensor]
    """Rows of ids to compare on."""
    rows_of: RowsOf
    calibration: Sequence[Tensor]
    """Training rows of ids, on which quantisation may be based."""
    name: str
    """Display name, for formats that carry one."""
    between: Callable[[], None]
    """Called now and then; may raise to stop."""
    rounded: QAT | None = None
    """How it was rounded in training (`quantization: qat`)."""
    task_folder: Path | None = None
    """Folder of tasks for lm-eval, beside those of its package."""
    _logits: dict[MergeOnto, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _made: dict[str, Path] = field(default_factory=dict, init=False)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def logits(self, onto: MergeOnto) -> tuple[Tensor, Tensor]:
        """Logits of the tuned model and of its base, [positions, vocabulary] float32 on the CPU."""
        if onto not in self._logits:
            clear_scratch()  # the dense weights of the last step: up to half a GiB on a GPU
            self._logits[onto] = self._compute(onto)
            gc.collect()
        return self._logits[onto]

    def _compute(self, onto: MergeOnto) -> tuple[Tensor, Tensor]:
        if isinstance(self.method, Full):
            base = placed(load_model(self.model_dir, saved_dtype(self.model_dir)), self.device)
            return logits_of(self.model, self.rows, self.between), logits_of(base, self.rows, self.between)
        if onto == "trained":
            return self._both(self.model)
        # What the adapter's folder says by itself, over the model's files: plain transformers and PEFT.
        from peft import PeftModel

        head = head_kind(self.model)
        over: Any = load_model(self.model_dir, saved_dtype(self.model_dir), head=given_head(self.model_dir, head))
        if head != "tokens":
            over = with_head(over, head, self.model.get_base_model().config.pad_token_id)
        return self._both(placed(PeftModel.from_pretrained(over, self.trained_dir), self.device))

    def _both(self, model: Any) -> tuple[Tensor, Tensor]:
        tuned = logits_of(model, self.rows, self.between)
        with model.disable_adapter():
            return tuned, logits_of(model, self.rows, self.between)

    def whole(self, onto: MergeOnto) -> Path:
        """A folder that plain transformers reads, tokenizer included, for converters. Merged weights are float32 there,
        so that a format rounds once; `close` removes it."""
        if isinstance(self.method, Full):
            return self.trained_dir
        return self.once(f"whole-{onto}", lambda folder: self.write(folder, onto, torch.float32))

    def once(self, name: str, make: Callable[[Path], None]) -> Path:
        """A file or folder on the way to a format, made for the first format that needs it; `close` removes it."""
        if name not in self._made:
            path = self.artifacts / f".{name}"
            _remove(path)  # half of one, of a format that failed
            make(path)
            self._made[name] = path
        return self._made[name]

    def write(self, folder: Path, onto: MergeOnto, dtype: torch.dtype) -> None:
        """Write the merged model and the tokenizer."""
        original = onto == "original"
        write_merged(self.model, folder, model_dir=self.model_dir, dtype=dtype, original=original, between=self.between)
        self.tokenizer.save_pretrained(folder)
        # transformers does not save it with a fast tokenizer, and llama.cpp's converter reads SentencePiece from it.
        if (model := self.model_dir / SENTENCEPIECE).is_file() and not (folder / SENTENCEPIECE).exists():
            shutil.copyfile(model, folder / SENTENCEPIECE)

    def close(self) -> None:
        """Remove what was only on the way to a format."""
        for path in self.artifacts.glob(".*"):
            _remove(path)
        self._made.clear()
        self._logits.clear()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_memory(model: Any, dtype: torch.dtype) -> None:
    """Withheld is better than killed: a killed trainer would hand back no adapter either."""
    needed = count_parameters(model) * dtype.itemsize + model.get_input_embeddings().weight.numel() * 4
    here = available_bytes()
    if here is not None and needed > here:
        raise Withheld(
            f"to read it again and to compare it takes {needed / 1e9:.1f} GB of memory, and {here / 1e9:.1f} are free; "
            "merge on a machine that has more"
        )


def placed(model: Any, device: torch.device) -> Any:
    """On the device, or where it came from if there is no room."""
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        print(f"notice: no room on {device} for the comparison; it runs on the CPU", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
        return model.to("cpu")
