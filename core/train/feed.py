"""The data of a run: read → render → truncate → order → batches; and the rows held out for the evaluation."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from torch import Tensor

from core.base.files import sha256
from core.data.ignored import glance
from core.data.rows import PromptOnly
from core.errors import DataError, SpecError
from core.plan.advice import of_steps
from core.plan.memory.passes import training_pass
from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.runtime import HeldOut
from core.spec.job import JobSpec
from core.spec.run.orders import DataOrder
from core.train.data.cache import TokenisedRows
from core.train.data.dataset import TokenDataset
from core.train.data.loaders import Prelude, RowLoader, Shares, StepLoader
from core.train.data.order import build_order
from core.train.data.reader import rows_of
from core.train.data.streaming import StreamLoader
from core.train.data.tokens import TokenReader
from core.train.data.truncate import DataReport, fitted_or_refused
from core.train.examples.mismatched import arrange, refuse_one_class
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer, renderer_of
from core.train.rollout.rewards import columns_of, refuse_rows_without
from core.train.run import Run

TELL_SECONDS = 3.0
FIRST_ROWS = 64
PRELUDE_ROWS = 256
"""Examples of one pass at most in what a stage looks at before a step."""


@dataclass(frozen=True, slots=True)
class RunData:
    """All rows of a run as tokens."""

    train: TokenDataset
    train_record: dict[str, Any]
    eval: TokenDataset | None
    eval_record: dict[str, Any] | None
    options: RenderOptions
    """Options of the renderer of the training rows."""
    rendering: dict[str, Any]
    longest: int
    """Tokens of the longest row in use; of a stream max_length."""
    prompts: list[PromptOnly] | None = None
    """The training rows, where they are prompts whose answers are rewarded."""
    eval_prompts: list[PromptOnly] | None = None
    """Those of each held-out row."""
    stream: StreamLoader | None = None
    """With data.streaming; `train` is its first block then."""

    @property
    def first_rows(self) -> list[Tensor]:
        """Ids of the first held-out rows; of the first training rows where none are held out."""
        dataset = self.train if self.eval is None else self.eval
        return [dataset[row][0] for row in range(min(len(dataset), FIRST_ROWS))]

    @property
    def training_rows(self) -> list[Tensor]:
        """Ids of the first training rows."""
        return [self.train[row][0] for row in range(min(len(self.train), FIRST_ROWS))]

    @property
    def completions(self) -> bool:
        """Whether the labels are completions (or some of them), not all tokens."""
        return self.options.loss_on != "all"

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        return {
            "data": {
                "train": self.train_record,
                "eval": self.eval_record,
                "loss_on": self.options.loss_on,
                "rendering": self.rendering,
            }
        }


def read_data(run: Run, tokenizer: Any) -> RunData:
    """Read all rows of the order as tokens. DataError or SpecError, with what is wrong."""
    order, spec = run.order, run.spec
    for ignored in glance(order.train):
        run.notice(ignored.code, ignored.message)
    reader = TokenReader(order, tokenizer, _progress(run), partial(run.notice, "token_cache"))
    train = _streamed(run, tokenizer) if spec.data.streaming else _read_whole(run, reader)
    renderer = train.renderer
    held = _held_out(run, order.eval, reader, renderer) if isinstance(spec.evaluation, HeldOut) else None
    longest = max(train.longest, 0 if held is None else held.longest)
    if (template := renderer.saved_template()) is not None:
        tokenizer.chat_template = template  # the tuned model is asked as it was trained
    prompts = eval_prompts = None
    if isinstance(spec.stage, RolloutStage):
        prompts = _prompts(spec.stage, order.train, train.dataset, "data.train")
        if held is not None and order.eval is not None:
            eval_prompts = _prompts(spec.stage, order.eval, held.dataset, "data.eval")
        answer = spec.stage.max_completion_length
        longest = min(longest, spec.training.max_length - answer) + answer
    return RunData(
        train.dataset,
        train.record,
        None if held is None else held.dataset,
        None if held is None else held.record,
        renderer.options,
        renderer.describe() | {"template_sha256": _template_sha256(tokenizer)},
        min(longest, spec.training.max_length),
        prompts,
        eval_prompts,
        train.stream,
    )


@dataclass(frozen=True, slots=True)
class _Read:
    """Rows that were read, for training or held out."""

    dataset: TokenDataset
    record: dict[str, Any]
    longest: int
    """Tokens of the longest row; of a stream max_length."""
    renderer: Renderer
    stream: StreamLoader | None = None


def _progress(run: Run) -> Callable[[int, int | None], None]:
    """What is called between rows: (rows done, of so many)."""
    told = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        nonlocal told
        run.check_stop()
        if time.monotonic() - told >= TELL_SECONDS:
            told = time.monotonic()
            run.events.write("progress", rows=done, total_rows=total)

    return progress


def _streamed(run: Run, tokenizer: Any) -> _Read:
    order, spec = run.order, run.spec
    stream = StreamLoader(
        order.train,
        spec,
        lambda row_format: renderer_of(spec, row_format, tokenizer),
        between=run.check_stop,
        notice=partial(run.notice, "block_skipped"),
        model_dir=run.tokenizer_dir,
        rank=run.ranks.rank,
        world=run.ranks.world,
    )
    _tell(stream.report, f"of the first {stream.report.rows} training", run)
    record = _record(order.train, stream.format, stream.report) | {"streaming": True, "counted": "the first block"}
    return _Read(stream.dataset, record, spec.training.max_length, stream.renderer, stream)


def _read_whole(run: Run, reader: TokenReader) -> _Read:
    order, spec = run.order, run.spec
    found = reader.read(order.train)
    refuse_one_class(found.tokens.dataset, spec.stage)
    dataset, report = _fitted(spec, found.tokens)
    _tell(report, "training", run)
    return _Read(dataset, _record(order.train, found.tokens.format, report), report.longest, found.renderer)


def _held_out(run: Run, order: DataOrder | None, reader: TokenReader, renderer: Renderer) -> _Read | None:
    if order is None:
        return None
    tokens = reader.read(order, renderer).tokens
    if renderer.options.loss_on != "all" and tokens.format == "text":
        raise SpecError("held-out rows of raw text cannot be compared with training on completions", field="data.eval")
    dataset, report = _fitted(run.spec, tokens)
    _tell(report, "held-out", run)
    return _Read(dataset, _record(order, tokens.format, report), report.longest, renderer)


def _prompts(stage: RolloutStage, order: DataOrder, prompts: TokenDataset, field: str) -> list[PromptOnly]:
    """The row of each prompt. DataError where a reward reads one that a row does not have."""
    _, rows = rows_of(order)
    found = []
    for numbered in rows:
        assert isinstance(numbered.row, PromptOnly)
        found.append(numbered.row)
    if len(found) != len(prompts):
        raise DataError(
            f"{len(found) - len(prompts)} of {len(found)} prompts have no token at all; remove them",
            field=field,
        )
    columns = map(columns_of, found)
    refuse_rows_without(stage.reward, list(zip(prompts.lines.tolist(), columns, strict=True)))
    return found


def _template_sha256(tokenizer: Any) -> str | None:
    """SHA-256 of the chat template that goes with the trained model; None: it has none."""
    template = tokenizer.chat_template
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _fitted(spec: JobSpec, tokens: TokenisedRows) -> tuple[TokenDataset, DataReport]:
    dataset, report = fitted_or_refused(spec, arrange(tokens.dataset, spec.stage, spec.training.seed))
    report.cut_prompts = tokens.cut_prompts
    return dataset, report


def _tell(report: DataReport, which: str, run: Run) -> None:
    limit, policy = run.spec.training.max_length, run.spec.training.truncation
    if report.truncated:
        become = {
            "cut_left": "lost their beginning",
            "cut_right": "lost their end",
            "split": f"became {report.pieces} rows",
        }
        message = f"{report.truncated} {which} rows are longer than max_length = {limit} tokens and {become[policy]}"
        if report.dropped:
            message += f"; {report.dropped} of them had nothing left to learn and are left out"
        run.notice("rows_truncated", f"{message} (the longest has {report.longest} tokens)")
    if report.cut_prompts:
        message = (
            f"in {report.cut_prompts} {which} rows tokens merge across the border of prompt and answer, so the model "
            "learns from another prompt than it is asked with, and eval_exact_match is not what it writes; begin no "
            "answer with white space, and leave data.rendering.pairs out or set it to another way than `joined`"
        )
        run.notice("prompt_boundary", message)


def _record(order: DataOrder, row_format: str, report: DataReport) -> dict[str, Any]:
    """`sha256` of the one file, or `sources` with those of all of them; then what became of the rows."""
    hashes = [[sha256(Path(path)) for path in source.paths] for source in order.sources]
    which: dict[str, Any] = {"sha256": hashes[0][0]}
    if sum(map(len, hashes)) > 1 or order.sources[0].origin:
        which = {
            "sources": [
                source.origin | {"sha256": digests} | ({"weight": source.weight} if source.weight is not None else {})
                for source, digests in zip(order.sources, hashes, strict=True)
            ]
        }
    if order.split is not None:
        which |= {"split": order.split.model_dump(mode="json"), "part": order.part}
    return which | {"format": row_format} | report.as_dict()


# --- batches ---------------------------------------------------------------------------------------------


def build_loader(
    run: Run, data: RunData, shares: Shares, pad_token_id: int, prelude_sequences: tuple[int, ...] = ()
) -> tuple[StepLoader, int]:
    """The batches of this rank, and the number of the run's optimizer steps. `shares`, `prelude_sequences`: those of
    the stage."""
    training, batching = run.spec.training, run.spec.batching
    prelude = None
    if prelude_sequences:
        prelude = Prelude(prelude_sequences, PRELUDE_ROWS, training_pass(run.spec, data.longest)[0])
    if data.stream is not None:
        assert training.max_steps is not None  # the spec sees to it
        data.stream.shares, data.stream.pad_token_id, data.stream.prelude = shares, pad_token_id, prelude
        return data.stream, training.max_steps
    packed = isinstance(batching, Packed)
    sizes = data.train.sizes(packed=packed)
    order = build_order(run.spec, sizes, rank=run.ranks.rank, world=run.ranks.world)
    match batching:
        case Rows():
            pass
        case Tokens(tokens_per_batch=budget) | Packed(tokens_per_batch=budget):
            if over := sum(size > budget for size in sizes):
                message = f"{over} rows are longer than tokens_per_batch = {budget}: each is a batch by itself"
                run.notice("rows_over_budget", message)
        case _ as never:
            assert_never(never)
    loader = RowLoader(data.train, order, shares, packed=packed, pad_token_id=pad_token_id, prelude=prelude)
    steps = order.total_steps(training.num_train_epochs, training.max_steps)
    if run.order.fence_seconds is None:  # started by hand: no service has advised its owner at submit
        for warning in of_steps(run.spec, steps):
            run.notice(warning.code, warning.message)
    return loader, steps
