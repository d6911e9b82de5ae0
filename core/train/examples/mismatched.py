"""Examples of one answer, each with the answer of another one beside it: what KTO estimates its divergence from."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from core.errors import DataError
from core.spec.axes.stage import KTO, ProcessReward, Stage
from core.train.data.dataset import TokenDataset
from core.train.examples.steps import last_labels


def arrange(dataset: TokenDataset, stage: Stage, seed: int) -> TokenDataset:
    """The examples as the stage takes them, once all rows are tokens. DataError where they are too few."""
    if not len(dataset):
        return dataset
    match stage:
        case KTO():
            return with_mismatched_answers(dataset, seed)
        case ProcessReward(last_step_only=True):
            return last_labels(dataset)
        case _:
            return dataset


def refuse_one_class(dataset: TokenDataset, stage: Stage) -> None:
    """DataError for training rows of KTO that are all good, or all bad: their loss has no other side."""
    if not isinstance(stage, KTO) or not len(dataset):
        return
    labels = dataset.values["label"] > 0
    if labels.all() or not labels.any():
        said, lacking = ("true", "false") if labels.all() else ("false", "true")
        words = (
            f"all {len(dataset)} rows have the label {said}: KTO learns from good and bad answers. Add rows with the "
            f"label {lacking}, from another file too (`data.train` as a list), or use `stage: sft` on the good answers"
        )
        raise DataError(words, field="data.train", code="one_class")


def with_mismatched_answers(dataset: TokenDataset, seed: int) -> TokenDataset:
    """Examples of two sequences: prompt and answer, and the same prompt with the answer of another row. Which row's
    depends on the seed and the number of rows alone, and no row has its own. Only the first is trained on. DataError
    where there is only one row."""
    rows = len(dataset)
    if rows < 2:
        raise DataError(
            "KTO compares each answer with that of another row, and there is only one row; add rows",
            field="data.train",
        )
    text = f"mismatched {seed} {rows}"
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)
    circle = torch.randperm(rows, generator=generator).numpy()
    other = np.empty(rows, dtype=np.int64)
    other[circle] = np.roll(circle, -1)  # one circle through all rows: none is followed by itself
    ids: list[npt.NDArray[np.int32]] = []
    learned: list[npt.NDArray[np.bool_]] = []
    borders = [_border(dataset, row) for row in range(rows)]
    for row in range(rows):
        start, end = int(dataset.starts[row]), int(dataset.ends[row])
        theirs = int(other[row])
        begin, stop = int(dataset.starts[theirs]) + borders[theirs], int(dataset.ends[theirs])
        ids += [dataset.ids[start:end], dataset.ids[start : start + borders[row]], dataset.ids[begin:stop]]
        learned += [dataset.learned[start:end], dataset.learned[start : start + borders[row]]]
        learned.append(dataset.learned[begin:stop])
    lengths = [len(part) for part in ids]
    whole = np.asarray(lengths, dtype=np.int64).reshape(-1, 3)
    sizes = np.stack([whole[:, 0], whole[:, 1] + whole[:, 2]], axis=1).ravel()
    ends = np.cumsum(sizes)
    return TokenDataset(
        np.concatenate(ids),
        np.concatenate(learned),
        ends - sizes,
        ends,
        dataset.lines,
        sequences=2,
        trained=1,
        values=dataset.values,
    )


def _border(dataset: TokenDataset, row: int) -> int:
    """Tokens before the first learned one."""
    learned = dataset.learned[dataset.starts[row] : dataset.ends[row]]
    return int(np.argmax(learned)) if learned.any() else len(learned)
