"""The parameters that full fine-tuning trains where it is not all of them, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from core.errors import SpecError
from core.plan.models.shape import EMBEDDING, HEAD
from core.spec.axes.method import TrainedPart

FIELD = "method.train"
_NORM = re.compile(r"(norm|\bln_)[^.]*\.(weight|bias)$|\bln_[^.]*\.")


def layers_of(part: TrainedPart, count: int) -> frozenset[int]:
    """Numbers of the layers that are trained. SpecError for layers that a model of `count` layers does not have."""
    match part.layers:
        case "all":
            return frozenset(range(count))
        case "none":
            return frozenset()
        case str(words):
            chosen: Sequence[int]
            asked = int(words.split()[1])
            chosen = range(asked) if words.startswith("first") else range(count - asked, count)
        case numbers:
            asked, chosen = max(numbers) + 1, numbers
    if asked > count:
        raise SpecError(
            f"the model has {count} layers, numbered from 0, and `{part.layers}` asks for more", field=f"{FIELD}.layers"
        )
    return frozenset(chosen)


def trained_names(part: TrainedPart, names: Iterable[str], list_name: str, count: int, *, tied: bool) -> frozenset[str]:
    """Those of a model's parameters that are trained. `list_name`: path of its blocks; `tied`: the output head is the
    embedding. SpecError where a part that is asked for does not exist."""
    if part.layers != "none" and not count:
        raise SpecError("the model has no list of layers to choose from", field=f"{FIELD}.layers")
    if part.head and tied and not part.embeddings:
        raise SpecError(
            "the model's output head is its embedding, so one is not trained without the other: set "
            "`method.train.embeddings` too, or remove `head`",
            field=f"{FIELD}.head",
        )
    layers = layers_of(part, count)
    chosen: set[str] = set()
    found = {"embeddings": False, "head": tied, "norms": False}
    for name in names:
        if name.startswith(f"{list_name}.") and list_name:
            number = int(name.removeprefix(f"{list_name}.").partition(".")[0])
            kind = "norms" if _NORM.search(name) else "layer"
            wanted = number in layers
        else:
            kind = "head" if HEAD.match(name) else "embeddings" if EMBEDDING.search(name) else "norms"
            wanted = False
        found[kind] = True
        if wanted or (kind != "layer" and getattr(part, kind)):
            chosen.add(name)
    for kind, there in found.items():
        if kind != "layer" and getattr(part, kind) and not there:
            raise SpecError(f"the model has no {kind} that could be trained", field=f"{FIELD}.{kind}")
    return frozenset(chosen)
