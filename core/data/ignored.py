"""Columns that a file has and training does not read: told wherever a file is told of, and asked about where one of
them looks like the answer to the text beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from core.data.checker import RowChecker
from core.data.containers.read import values
from core.data.faults import Faults
from core.data.mapping import mapped
from core.errors import Fault
from core.spec.axes.data import RowFormat

if TYPE_CHECKING:  # the whole job, which the check of an upload would import for nothing
    from core.spec.run.orders import DataOrder

GLANCE_ROWS = 200
SHOWN = 20

_LABELS = frozenset(
    [
        *("answer", "category", "class", "completion", "emotion", "intent", "label", "labels", "output", "response"),
        *("sentiment", "summary", "tag", "tags", "target", "topic", "translation"),
    ]
)
_ABOUT = frozenset(
    [
        *("author", "created", "created_at", "dataset", "date", "domain", "file", "filename", "id", "idx", "index"),
        *("key", "lang", "language", "length", "license", "meta", "metadata", "path", "score", "source", "split"),
        *("subset", "time", "timestamp", "title", "tokens", "uid", "url", "uuid"),
    ]
)
"""Columns that say something about a text, and are no answer to it."""


def notices(row_format: RowFormat | None, ignored: Mapping[str, bool]) -> list[Fault]:
    """What is to be known of the columns that a file of this format has besides."""
    if not ignored or row_format is None:
        return []
    shown = ", ".join(f"`{name[:40]}`" for name in list(ignored)[:SHOWN])
    more = f" and {len(ignored) - SHOWN} more" if len(ignored) > SHOWN else ""
    found = [
        Fault("columns_ignored", f"columns ignored, since no row of format `{row_format}` has them: {shown}{more}")
    ]
    label = _label(ignored) if row_format == "text" else None
    if label is not None:
        way_out = mapped({"prompt": "text", "completion": label})
        words = (
            f"the rows are taken as raw text, and `{label[:40]}` is not learned. If `{label[:40]}` is what the model "
            f"shall answer, map both columns: {way_out}"
        )
        if not ignored[label]:
            words += f"; write the values of `{label[:40]}` as text first"
        found.insert(0, Fault("label_ignored", words))
    return found


def template_fields(fields: Iterable[str]) -> list[Fault]:
    """Fields that are refused with a chat template that has no place for them. Which one that is, only a model says."""
    shown = ", ".join(f"`{name}`" for name in fields)
    words = (
        f"the rows have {shown}: with a chat template that has no place for it a row is refused; a preview with the "
        "model says which rows are"
    )
    return [Fault("template_fields", words)] if shown else []


def _label(ignored: Mapping[str, bool]) -> str | None:
    """The column that is probably the answer to the text."""
    for name in ignored:
        if name.lower() in _LABELS or name.lower().endswith(("_label", "_class", "_intent")):
            return name
    others = [name for name in ignored if name.lower().lstrip("_") not in _ABOUT]
    return others[0] if len(ignored) == len(others) == 1 else None


def glance(order: DataOrder) -> list[Fault]:
    """The notices of the files of an order, by their first rows. What is wrong with a file is for its reader to say."""
    found: dict[str, Fault] = {}
    for source in order.sources:
        columns = {str(ours): theirs for ours, theirs in source.columns.items()}
        for path in source.paths:
            faults = Faults(columns)
            checker = RowChecker(source.format, columns, faults)
            everything = source.format == "prompt"
            for _, number, value in islice(values(Path(path), columns, faults, everything=everything), GLANCE_ROWS):
                checker.row(number, value)
            for notice in notices(checker.format, faults.ignored):
                found.setdefault(notice.message, notice)
    return list(found.values())
