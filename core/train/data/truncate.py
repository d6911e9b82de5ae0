"""Examples longer than training.max_length, and what became of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, assert_never

import numpy as np
import numpy.typing as npt

from core.errors import DataError, SpecError
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.stage import CPT
from core.spec.job import JobSpec
from core.train.data.dataset import TokenDataset

Truncation = Literal["refuse", "cut_left", "cut_right", "split"]
SHOWN = 5


@dataclass(slots=True)
class DataReport:
    """What became of a file's rows; part of the run record."""

    rows: int = 0
    """Rows in use. A row of several sequences (a pair) is used or left out as a whole."""
    tokens: int = 0
    label_tokens: int = 0
    truncated: int = 0
    """Rows longer than max_length, or with a sequence that is: cut, or split."""
    pieces: int = 0
    """Rows in use that are pieces of a split row."""
    dropped: int = 0
    """Rows with nothing left to learn after that, in one of their sequences."""
    longest: int = 0
    """Tokens of the longest row (of its longest sequence) before truncation."""
    cut_prompts: int = 0
    """Prompt/completion rows whose tokens merge across the border."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def truncate(whole: TokenDataset, max_length: int, policy: Truncation) -> tuple[TokenDataset, DataReport]:
    """The rows within max_length (>= 2) that have something to learn: views of the same tokens. DataError when none
    has, or when the policy is to refuse longer rows and there are some."""
    cut, report = cut_rows(whole, max_length, policy)
    if not len(cut):
        raise nothing_to_learn(max_length, report.longest, _longest_line(whole))
    return cut, report


def _longest_line(whole: TokenDataset) -> int | None:
    if not len(whole):
        return None
    lengths = np.asarray(whole.sequence_lengths, dtype=np.int64).reshape(-1, whole.sequences).max(axis=1)
    return int(whole.lines[int(lengths.argmax())])


def nothing_to_learn(max_length: int, longest: int, line: int | None = None) -> DataError:
    """`line`: where the longest row is."""
    where = "" if line is None else f" (line {line})"
    return DataError(
        f"no row has anything to learn within training.max_length = {max_length} tokens; the longest row{where} has "
        f"{longest}. Raise training.max_length, or shorten the prompts",
        field="training.max_length",
    )


def cut_rows(whole: TokenDataset, max_length: int, policy: Truncation) -> tuple[TokenDataset, DataReport]:
    """As `truncate`; the answer may be without rows."""
    starts, ends, lines, values = whole.starts, whole.ends, whole.lines, whole.values
    lengths = ends - starts
    longest = lengths.reshape(-1, whole.sequences).max(axis=1)
    over = longest > max_length
    rows = np.arange(len(whole))
    match policy:
        case "refuse":
            if over.any():
                raise _refused(whole, longest, over, max_length)
        case "cut_left":
            # All sequences of an example lose as much, so that they go on from the same prompt.
            starts = np.minimum(starts + np.repeat(np.maximum(0, longest - max_length), whole.sequences), ends)
        case "cut_right":
            ends = np.minimum(ends, starts + max_length)
        case "split":
            if whole.sequences > 1:
                raise SpecError(
                    "the two answers of a pair belong together, so such rows cannot be split; set "
                    "`training.truncation` to `cut_left` or `cut_right`",
                    field="training.truncation",
                )
            # A piece begins with the last token of the one before: to predict from, not to learn again.
            stride = max_length - 1
            pieces = np.maximum(1, -(-(lengths - 1) // stride))
            rows = np.repeat(rows, pieces)
            number = np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts = starts[rows] + number * stride
            ends = np.minimum(starts + max_length, ends[rows])
            lines, values = lines[rows], {name: of_rows[rows] for name, of_rows in values.items()}
        case _ as never:
            assert_never(never)
    cut = whole.replaced(starts, ends, lines, values)
    labels = np.asarray(cut.sequence_labels, dtype=np.int64).reshape(-1, whole.sequences)
    kept = np.flatnonzero((labels > 0).all(axis=1))
    if len(kept) < len(cut):
        cut = cut.selected(kept)
    report = DataReport(
        rows=len(cut),
        tokens=sum(cut.lengths),
        label_tokens=sum(cut.label_counts),
        truncated=int(over.sum()),
        pieces=int(over[rows[kept]].sum()) if policy == "split" else 0,
        dropped=len(whole) - len(np.unique(rows[kept])),
        longest=int(longest.max()) if len(whole) else 0,
    )
    return cut, report


def _refused(
    whole: TokenDataset, longest: npt.NDArray[np.int64], over: npt.NDArray[np.bool_], max_length: int
) -> DataError:
    found = np.flatnonzero(over)
    shown = ", ".join(f"line {whole.lines[row]} has {longest[row]}" for row in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return DataError(
        f"{len(found)} rows are longer than training.max_length = {max_length} tokens ({shown}{more}); raise it, or "
        "let training.truncation cut or split them",
        field="training.max_length",
    )


# --- what a job does with its rows ------------------------------------------------------------------------


def fitted(spec: JobSpec, whole: TokenDataset) -> tuple[TokenDataset, DataReport]:
    """The rows as the job trains on them, and what became of them; there may be none. DataError as `cut_rows`."""
    limit = spec.training.max_length
    if isinstance(spec.stage, RolloutStage):
        return _prompts(whole, limit - spec.stage.max_completion_length, spec.training.truncation)
    if isinstance(spec.stage, CPT) and spec.stage.across and len(whole):
        return _across(whole, limit)
    return cut_rows(whole, limit, spec.training.truncation)


def fitted_or_refused(spec: JobSpec, whole: TokenDataset) -> tuple[TokenDataset, DataReport]:
    """As `fitted`; DataError when no row has anything to learn."""
    used, report = fitted(spec, whole)
    if not len(used):
        raise nothing_to_learn(spec.training.max_length, report.longest, _longest_line(whole))
    return used, report


def _prompts(whole: TokenDataset, room: int, policy: Truncation) -> tuple[TokenDataset, DataReport]:
    """The prompts within `room` tokens; nothing of them is learned. DataError where one is longer, unless its beginning
    may be cut off."""
    lengths = whole.ends - whole.starts
    over = lengths > room
    if over.any() and policy != "cut_left":
        found = np.flatnonzero(over)
        shown = ", ".join(f"row {whole.lines[row]} has {lengths[row]}" for row in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise DataError(
            f"{len(found)} prompts are longer than the {room} tokens that training.max_length leaves beside an answer "
            f"of stage.max_completion_length ({shown}{more}); change one of the two, shorten the prompts, or set "
            "training.truncation to `cut_left`",
            field="training.max_length",
        )
    used = whole.replaced(np.maximum(whole.starts, whole.ends - room), whole.ends, whole.lines, whole.values)
    longest = int(lengths.max()) if len(whole) else 0
    return used, DataReport(rows=len(used), tokens=sum(used.lengths), truncated=int(over.sum()), longest=longest)


def _across(whole: TokenDataset, limit: int) -> tuple[TokenDataset, DataReport]:
    """Rows of `limit` tokens of all documents end to end; each has the line of the document that it begins in. Every
    token but the very first is learned: the first of a document is predicted from the end of the one before."""
    learned = np.broadcast_to(np.True_, whole.ids.shape)
    first, last, lines = whole.starts[:1], whole.ends[-1:], whole.lines[:1]
    used, report = cut_rows(TokenDataset(whole.ids, learned, first, last, lines), limit, "split")
    begun = np.searchsorted(whole.starts, used.starts, side="right") - 1
    found = TokenDataset(used.ids, used.learned, used.starts, used.ends, whole.lines[begun])
    found.held = whole.held
    longest = int((whole.ends - whole.starts).max())
    return found, replace(report, truncated=0, pieces=0, dropped=0, longest=longest)
