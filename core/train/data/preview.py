"""What training would make of its rows, found out without the model's weights.

The order is a trainer's (core/spec/run/orders.py), and reading, rendering, truncation and batches are the trainer's
own code, so that what is said here is what would be done; the tokens are taken from the same cache and kept there. Rows
that training would refuse are listed, not just the first of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from core.data.faults import Faults
from core.data.ignored import glance
from core.errors import EftError, Fault
from core.plan.steps import run_steps
from core.spec.axes.batching import Packed
from core.spec.job import JobSpec
from core.spec.run.orders import RunOrder
from core.train.data import streaming
from core.train.data.dataset import TokenDataset
from core.train.data.order import build_order
from core.train.data.tokenise.chunks import RowFault
from core.train.data.tokens import OnRows, TokenReader
from core.train.data.truncate import fitted, fitted_or_refused
from core.train.examples.mismatched import arrange

PAIR = ("chosen", "rejected")
"""Names of the sequences of a pair."""
SAMPLES = 10
SHOWN_HEAD, SHOWN_TAIL = 400, 200
"""Tokens of a sample that are shown; what lies between is counted."""
SHOWN_FAULTS = 20
"""Causes that are shown; each is told once, with the lines that have it."""
SHOWN_DUPLICATES = 10
FIRST_BIN = 16
"""Tokens; each further bin of the histogram is twice as wide as the one before."""


def preview(
    order: RunOrder,
    tokenizer: Any,
    told: OnRows = lambda done, total: None,
    notice: Callable[[str], None] = lambda fault: None,
) -> dict[str, Any]:
    """See docs/preview.md, for the document. DataError for a file that cannot be read as rows, SpecError for
    options that do not go with its format. Of the rows only their tokens are held in memory; they are kept for the
    training job. `notice` is told what did not work with that."""
    return _preview(order, tokenizer, told, notice) | {"notices": [said.as_dict() for said in glance(order.train)]}


def _preview(order: RunOrder, tokenizer: Any, told: OnRows, notice: Callable[[str], None]) -> dict[str, Any]:
    spec = order.spec
    found = TokenReader(order, tokenizer, told, notice).read(order.train, listing=True)
    tokens, renderer, faults = found.tokens, found.renderer, found.faults
    whole = tokens.dataset
    if not len(whole):
        counts = {"file": tokens.rows, "refused": len(faults)}
        return {"format": tokens.format, "ok": False, "rows": counts} | _told(faults)
    used, report, batches, limit_fault = None, None, {}, None
    try:
        if tokens.format in ("kto", "stepwise"):
            whole = arrange(whole, spec.stage, spec.training.seed)
        used, report = fitted_or_refused(spec, whole)
        batches = _batches(spec, used, whole)
    except EftError as error:
        limit_fault = Fault(error.code, error.message, error.field)
    document: dict[str, Any] = {
        "format": tokens.format,
        "ok": not faults and limit_fault is None,
        "rows": {
            "file": tokens.rows,
            "refused": len(faults),
            "used": len(used) if used is not None else 0,
            "truncated": int((_longest(whole) > spec.training.max_length).sum()),
            "dropped": report.dropped if report is not None else len(whole),
            "pieces": report.pieces if report is not None else 0,
            "cut_prompts": tokens.cut_prompts,
        },
        "rendering": {
            "loss_on": renderer.options.loss_on,
            "family": renderer.family,
            "chat_template": renderer.has_template,
        }
        | renderer.about_pairs(),
        "max_length": spec.training.max_length,
        "truncation": spec.training.truncation,
        "tokens": _lengths(np.asarray(whole.sequence_lengths)),
        "duplicates": _duplicates(whole),
    }
    if used is not None and report is not None and batches:
        document["epoch"] = {
            "tokens": report.tokens,
            "label_tokens": report.label_tokens,
            "lost_tokens": sum(whole.lengths) - report.tokens if spec.training.truncation != "split" else 0,
            **batches,
        }
        document["samples"] = _samples(used, whole, tokenizer)
    return document | _told(faults, limit_fault)


def _told(rows: Iterable[RowFault], limit: Fault | None = None) -> dict[str, Any]:
    """The first causes, each with the lines that have it, and the number of all faults; `limit` comes first."""
    faults = Faults()
    for row in rows:
        faults.add(row.code, row.message, row.place, number=row.line)
    told = ([] if limit is None else [limit]) + faults.kept
    return {
        "faults": [fault.as_dict() for fault in told[:SHOWN_FAULTS]],
        "fault_count": faults.count + (limit is not None),
    }


# --- figures -----------------------------------------------------------------------------------------------


def _longest(whole: TokenDataset) -> npt.NDArray[np.int64]:
    """Tokens of each row's longest sequence."""
    found: npt.NDArray[np.int64] = (whole.ends - whole.starts).reshape(-1, whole.sequences).max(axis=1)
    return found


def _lengths(lengths: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Tokens of the rows (of a pair: each answer with its prompt) before truncation: a histogram (`from` ≤ tokens <
    `to`) and some of its marks."""
    edges = [0, FIRST_BIN]
    while edges[-1] <= int(lengths.max()):
        edges.append(2 * edges[-1])
    counts, _ = np.histogram(lengths, bins=edges)
    marks = np.percentile(lengths, [50, 90, 99], method="higher")
    return {
        "total": int(lengths.sum()),
        "shortest": int(lengths.min()),
        "mean": round(float(lengths.mean()), 1),
        "median": int(marks[0]),
        "p90": int(marks[1]),
        "p99": int(marks[2]),
        "longest": int(lengths.max()),
        "histogram": [
            {"from": low, "to": high, "rows": int(rows)}
            for low, high, rows in zip(edges, edges[1:], counts, strict=False)
        ],
    }


def _duplicates(whole: TokenDataset) -> dict[str, Any]:
    """Rows whose tokens are those of an earlier row; examples with the lines of both."""
    first: dict[bytes, int] = {}
    again: dict[int, list[int]] = defaultdict(list)
    count = 0
    starts, ends = (edges.reshape(-1, whole.sequences) for edges in (whole.starts, whole.ends))
    for row in range(len(whole)):
        hashed = hashlib.blake2b(digest_size=12)
        for start, end in zip(starts[row], ends[row], strict=True):
            hashed.update(whole.ids[start:end].tobytes() + b"|")
        earlier = first.setdefault(hashed.digest(), row)
        if earlier != row:
            count += 1
            if earlier in again or len(again) < SHOWN_DUPLICATES:
                again[earlier].append(int(whole.lines[row]))
    return {
        "rows": count,
        "examples": [
            {"line": int(whole.lines[row]), "again": lines[:SHOWN_DUPLICATES]} for row, lines in again.items()
        ],
    }


def _batches(spec: JobSpec, used: TokenDataset, whole: TokenDataset) -> dict[str, Any]:
    """Steps, batches and padding of the first epoch on all ranks, and the steps of the whole run.
    A stream is cut into steps block by block, as training does it, and its epoch is its first pass."""
    packed, ranks = isinstance(spec.batching, Packed), range(spec.resources.gpus)
    steps = batches = slots = tokens = 0
    parts = _blocks(spec, whole) if spec.data.streaming else {0: used}
    for number, part in parts.items():
        if spec.data.streaming:
            orders = [streaming.order_of(spec, part, number, rank=rank, world=len(ranks)) for rank in ranks]
        else:
            orders = [build_order(spec, part.sizes(packed=packed), rank=rank, world=len(ranks)) for rank in ranks]
        here = orders[0].steps_of(0)
        steps += here
        tokens += sum(part.lengths)
        for rows in (rows for order in orders for step in range(here) for rows in order.window(step) if rows):
            batches += 1
            sizes = [part.sizes(packed=packed)[row] for row in rows]
            slots += sum(sizes) if packed else len(rows) * max(sizes)
    found: dict[str, Any] = {
        "steps": steps,
        "batches": batches,
        "padding_share": round(1 - tokens / slots, 4),
        "total_steps": run_steps(spec, orders[0].steps_of),
    }
    if isinstance(spec.batching, Packed) and spec.batching.share_prompts and used.trained > 1:
        found["shared_tokens"] = sum(part.shared_tokens() for part in parts.values())
    return found | ({"blocks": len(parts), "block_rows": streaming.BLOCK_ROWS} if spec.data.streaming else {})


def _blocks(spec: JobSpec, whole: TokenDataset) -> dict[int, TokenDataset]:
    """The rows in use of each block of a stream, by its number; training skips blocks without any."""
    found = {}
    for number, start in enumerate(range(0, len(whole), streaming.BLOCK_ROWS)):
        block = whole.selected(np.arange(start, min(start + streaming.BLOCK_ROWS, len(whole))))
        used, _ = fitted(spec, block)
        if len(used):
            found[number] = used
    return found


# --- samples -----------------------------------------------------------------------------------------------


def _samples(used: TokenDataset, whole: TokenDataset, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows spread evenly over the file, as runs of text that is learned or is not; of a pair its sequences, one after
    the other, each with its name."""
    count = min(SAMPLES, len(used))
    rows = [at * len(used) // count for at in range(count)]
    # A line can be several rows (pieces of a split one), so a row's whole one is found by where its tokens are.
    numbers = [row * used.sequences + place for row in rows for place in range(used.trained)]
    origins = np.searchsorted(whole.starts, used.starts[numbers], side="right") - 1
    found = []
    for number, origin in zip(numbers, origins, strict=True):
        row, place = divmod(number, used.sequences)
        (ids, learned), length = used.sequence(number), used.sequence_lengths[number]
        about: dict[str, Any] = {
            "line": int(used.lines[row]),
            "tokens": length,
            "label_tokens": used.sequence_labels[number],
            "cut_from": whole.sequence_lengths[origin] if length < whole.sequence_lengths[origin] else None,
            "segments": segments(ids.tolist(), learned.tolist(), tokenizer),
        }
        if used.trained > 1:
            about["sequence"] = PAIR[place]
        for name, of_tokens in used.token_values.items():
            marked = of_tokens[used.starts[number] : used.ends[number]][learned.numpy()]
            about[f"{name}s"] = [float(value) for value in marked]
        about |= {name: float(values[row]) for name, values in used.values.items() if values.ndim == 1}
        found.append(about)
    return found


def segments(ids: list[int], learned: list[bool], tokenizer: Any) -> list[dict[str, Any]]:
    """{"text", "learned"} for each run of tokens; of long rows the middle is {"text": "", "left_out": tokens}."""
    if len(ids) > SHOWN_HEAD + SHOWN_TAIL:
        left_out = len(ids) - SHOWN_HEAD - SHOWN_TAIL
        return [
            *segments(ids[:SHOWN_HEAD], learned[:SHOWN_HEAD], tokenizer),
            {"text": "", "learned": False, "left_out": left_out},
            *segments(ids[-SHOWN_TAIL:], learned[-SHOWN_TAIL:], tokenizer),
        ]
    found: list[dict[str, Any]] = []
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or learned[at] != learned[start]:
            text = tokenizer.decode(ids[start:at], clean_up_tokenization_spaces=False)
            found.append({"text": text, "learned": learned[start]})
            start = at
    return found
