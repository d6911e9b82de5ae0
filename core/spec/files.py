"""From the data axis to the order of a run: every source with its paths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.spec.axes.data import Data, Mixture, Single, Source, singles
from core.spec.run.orders import DataFiles, DataOrder

Located = Callable[[Single, str], tuple[list[Path], dict[str, Any]]]
"""From a source and its field to its files, and where they came from. Raises for what is not there."""


def data_orders(data: Data, located: Located) -> tuple[DataOrder, DataOrder | None]:
    """What to train on, and what to evaluate on."""
    train = _order(data.train, "data.train", located)
    if data.split is not None:
        held_out = DataOrder(
            # Held-out rows are read once each, however often training draws them.
            sources=[one.model_copy(update={"weight": None}) for one in train.sources],
            part="eval",
            split=data.split,
        )
        return train.model_copy(update={"part": "train", "split": data.split}), held_out
    if data.eval is None:
        return train, None
    order = _order(data.eval, "data.eval", located)
    return train, order


def _order(source: Source, field: str, located: Located) -> DataOrder:
    files = []
    for place, one in singles(source, field):
        paths, origin = located(one, place)
        named = [str(path) for path in paths]
        files.append(DataFiles(field=place, paths=named, format=one.format, columns=one.columns, origin=origin))
    if not isinstance(source, Mixture):
        return DataOrder(sources=files)
    weighted = [file.model_copy(update={"weight": one.weight}) for file, one in zip(files, source.sources, strict=True)]
    return DataOrder(sources=weighted, stopping_strategy=source.stopping_strategy, seed=source.seed)
