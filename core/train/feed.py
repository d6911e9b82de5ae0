"""The data of a run: read → render → truncate, for training and for the evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from core.data.rows import RowFormat
from core.errors import SpecError
from core.spec.job import JobSpec
from core.spec.run import RunOrder
from core.spec.runtime import HeldOut
from core.train.data.dataset import DataReport, TokenDataset, tokenise
from core.train.data.reader import read_rows
from core.train.data.render import Renderer
from core.train.events import EventWriter
from core.train.record import data_record


@dataclass(frozen=True, slots=True)
class Data:
    train: TokenDataset
    train_record: dict[str, Any]
    eval: TokenDataset | None
    eval_record: dict[str, Any] | None
    completions: bool
    """The loss is on completions, not on all tokens."""
    longest: int
    """Tokens of the longest row in use."""


def read_data(order: RunOrder, tokenizer: Any, events: EventWriter, between: Callable[[], None]) -> Data:
    """All rows of the order as tokens. DataError or SpecError, with what is wrong; `between` may raise to stop."""
    spec = order.spec
    rows, row_format = read_rows(order.train)
    completions = _loss_on_completions(spec, row_format)
    renderer = Renderer(tokenizer, all_tokens=not completions)
    limit = spec.training.max_length
    train, report = tokenise(rows, renderer, limit, between)
    _tell(report, "training", limit, events)
    held: TokenDataset | None = None
    held_record: dict[str, Any] | None = None
    longest = report.longest
    if order.eval is not None and isinstance(spec.evaluation, HeldOut):
        eval_rows, eval_format = read_rows(order.eval)
        if completions and eval_format == "text":
            raise SpecError(
                "held-out rows of raw text cannot be compared with training on completions", field="data.eval"
            )
        held, held_report = tokenise(eval_rows, renderer, limit, between)
        _tell(held_report, "held-out", limit, events)
        held_record = data_record(order.eval, eval_format, held_report)
        longest = max(longest, held_report.longest)
    train_record = data_record(order.train, row_format, report)
    return Data(train, train_record, held, held_record, completions, min(longest, limit))


def _loss_on_completions(spec: JobSpec, row_format: RowFormat) -> bool:
    match spec.stage.loss_on:
        case "completions" if row_format == "text":
            raise SpecError("rows of raw text have no completion; set stage.loss_on to `all`", field="stage.loss_on")
        case "completions":
            return True
        case "all":
            return False
        case None:
            return row_format != "text"
        case _ as never:
            assert_never(never)


def _tell(report: DataReport, which: str, limit: int, events: EventWriter) -> None:
    if report.truncated:
        message = f"{report.truncated} {which} rows are longer than max_length = {limit} tokens and lost their end"
        if report.dropped:
            message += f"; {report.dropped} of them had nothing left to learn and are left out"
        events.write("notice", code="rows_truncated", message=f"{message} (the longest has {report.longest} tokens)")
    if report.cut_prompts:
        message = (
            f"in {report.cut_prompts} {which} rows tokens merge across the end of the prompt; "
            "end prompts with a space or a new line"
        )
        events.write("notice", code="prompt_boundary", message=message)
