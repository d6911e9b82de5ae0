"""The data of a run: read → render → truncate → order → batches; and the rows held out for the evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from core.data.ignored import glance
from core.errors import SpecError
from core.spec.axes.runtime import HeldOut
from core.spec.axes.training import Packed, Rows
from core.spec.axes.training import Tokens as TokenBatches
from core.spec.job import JobSpec
from core.spec.run.contract import RunOrder
from core.train.base.events import EventWriter
from core.train.data.cache import Tokens
from core.train.data.dataset import TokenDataset
from core.train.data.order import build_order
from core.train.data.streaming import StreamFeed
from core.train.data.tokens import TokenReader
from core.train.data.truncate import DataReport, Truncation, truncate
from core.train.data.windows import Feed, RowFeed
from core.train.model.record import data_record
from core.train.ranks.group import ALONE, Ranks
from core.train.render.options import LossOn, RenderOptions
from core.train.render.renderer import renderer_of

TELL_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Data:
    train: TokenDataset
    train_record: dict[str, Any]
    eval: TokenDataset | None
    eval_record: dict[str, Any] | None
    options: RenderOptions
    """Of the renderer of its rows."""
    rendering: dict[str, Any]
    longest: int
    """Tokens of the longest row in use; of a stream max_length."""
    stream: StreamFeed | None = None
    """With data.streaming; `train` is its first block then."""

    @property
    def loss_on(self) -> LossOn:
        return self.options.loss_on

    @property
    def completions(self) -> bool:
        """The loss is on completions (or some of them), not on all tokens."""
        return self.loss_on != "all"


def read_data(
    order: RunOrder, tokenizer: Any, events: EventWriter, between: Callable[[], None], ranks: Ranks = ALONE
) -> Data:
    """All rows of the order as tokens. DataError or SpecError, with what is wrong; `between` may raise to stop."""
    spec = order.spec
    told = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        nonlocal told
        between()
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            events.write("progress", rows=done, total_rows=total)

    def notice(fault: str) -> None:
        events.write("notice", code="token_cache", message=fault)

    for ignored in glance(order.train):
        events.write("notice", code=ignored.code, message=ignored.message)
    reader = TokenReader(order, tokenizer, progress, notice)
    stream: StreamFeed | None = None
    if spec.data.streaming:
        stream = StreamFeed(
            order.train,
            spec,
            lambda row_format: renderer_of(spec, row_format, tokenizer),
            between=between,
            notice=lambda words: events.write("notice", code="block_skipped", message=words),
            model_dir=Path(order.model_dir),
            rank=ranks.rank,
            world=ranks.world,
        )
        renderer = stream.renderer
    else:
        found = reader.read(order.train)
        tokens, renderer = found.tokens, found.renderer
    loss_on = renderer.options.loss_on
    limit, policy = spec.training.max_length, spec.training.truncation
    if stream is not None:
        train, report, row_format = stream.dataset, stream.report, stream.format
    else:
        (train, report), row_format = _truncated(tokens, limit, policy), tokens.format
    _tell(report, "training" if stream is None else f"of the first {report.rows} training", limit, policy, events)
    held: TokenDataset | None = None
    held_record: dict[str, Any] | None = None
    longest = report.longest
    if order.eval is not None and isinstance(spec.evaluation, HeldOut):
        eval_tokens = reader.read(order.eval, renderer).tokens
        if loss_on != "all" and eval_tokens.format == "text":
            raise SpecError(
                "held-out rows of raw text cannot be compared with training on completions", field="data.eval"
            )
        held, held_report = _truncated(eval_tokens, limit, policy)
        _tell(held_report, "held-out", limit, policy, events)
        held_record = data_record(order.eval, eval_tokens.format, held_report)
        longest = max(longest, held_report.longest)
    if (template := renderer.saved_template()) is not None:
        tokenizer.chat_template = template  # the tuned model is asked as it was trained
    train_record = data_record(order.train, row_format, report)
    if stream is not None:
        train_record |= {"streaming": True, "counted": "the first block"}
        longest = limit
    described = renderer.describe()
    return Data(train, train_record, held, held_record, renderer.options, described, min(longest, limit), stream)


def _truncated(tokens: Tokens, limit: int, policy: Truncation) -> tuple[TokenDataset, DataReport]:
    dataset, report = truncate(tokens.dataset, limit, policy)
    report.cut_prompts = tokens.cut_prompts
    return dataset, report


def _tell(report: DataReport, which: str, limit: int, policy: Truncation, events: EventWriter) -> None:
    if report.truncated:
        become = {
            "cut_left": "lost their beginning",
            "cut_right": "lost their end",
            "split": f"became {report.pieces} rows",
        }
        message = f"{report.truncated} {which} rows are longer than max_length = {limit} tokens and {become[policy]}"
        if report.dropped:
            message += f"; {report.dropped} of them had nothing left to learn and are left out"
        events.write("notice", code="rows_truncated", message=f"{message} (the longest has {report.longest} tokens)")
    if report.cut_prompts:
        message = (
            f"in {report.cut_prompts} {which} rows tokens merge across the border of prompt and answer, so the model "
            "learns from another prompt than it is asked with, and eval_exact_match is not what it writes; begin no "
            "answer with white space, and leave data.rendering.pairs out or set it to another way than `joined`"
        )
        events.write("notice", code="prompt_boundary", message=message)


# --- batches ---------------------------------------------------------------------------------------------


def build_feed(
    spec: JobSpec, data: Data, pad_token_id: int, events: EventWriter, ranks: Ranks = ALONE
) -> tuple[Feed, int]:
    """The batches of this rank, and the number of the run's optimizer steps."""
    if data.stream is not None:
        assert spec.training.max_steps is not None  # the spec sees to it
        data.stream.pad_token_id = pad_token_id
        return data.stream, spec.training.max_steps
    order = build_order(spec, data.train.lengths, rank=ranks.rank, world=ranks.world)
    match spec.batching:
        case Rows():
            pass
        case TokenBatches(tokens_per_batch=budget) | Packed(tokens_per_batch=budget):
            if over := sum(length > budget for length in data.train.lengths):
                message = f"{over} rows are longer than tokens_per_batch = {budget}: each is a batch by itself"
                events.write("notice", code="rows_over_budget", message=message)
        case _ as never:
            assert_never(never)
    feed = RowFeed(data.train, order, packed=isinstance(spec.batching, Packed), pad_token_id=pad_token_id)
    return feed, order.total_steps(spec.training.num_train_epochs, spec.training.max_steps)
