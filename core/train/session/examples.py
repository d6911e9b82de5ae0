"""Examples of an operation: tokens and numbers per token, from a body of tensors to batches.

Arrays are flat, example after example: `lengths` says how many tokens each has. `targets` are what the model is to say
after each token; NO_TARGET where nothing is asked. Without them, each token's target is the next one of its example.
With `targets` [tokens, choices] each token has several, and `weights` are of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from core.train.batch import IGNORE_INDEX, Batch
from core.train.session.faults import BadOperation

NO_TARGET = -100
NUMBERS = ("weights", "logprobs", "advantages", "sequence_ratio_mask", "gradients")
"""Arrays of float32, one number a token."""
CHOICES = "choices"
"""Several targets of each token, int64 [n, choices], among the values of an example."""
MOST_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class SessionExample:
    tokens: Tensor
    """int64 [n]"""
    targets: Tensor
    """int64 [n]; NO_TARGET where nothing is asked"""
    values: Mapping[str, Tensor]
    """float32 [n] by name"""

    @property
    def asked(self) -> Tensor:
        """bool [n]: where there is a target."""
        return self.targets != NO_TARGET


def read_tensors(body: bytes) -> dict[str, Tensor]:
    """Tensors of a body in safetensors' form. BadOperation for anything else."""
    try:
        return load(body)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadOperation(
            f"the body is not valid safetensors: {error}", field="body", code="invalid_tensors"
        ) from error


def read_examples(tensors: Mapping[str, Tensor], vocabulary: int, longest: int | None) -> list[SessionExample]:
    """Examples of a forward pass. BadOperation names what is wrong with them. `longest`: positions of the model."""
    if odd := sorted(tensors.keys() - {"tokens", "lengths", "targets", *NUMBERS}):
        words = f"there is no array `{odd[0]}`; arrays are tokens, lengths, targets, {', '.join(NUMBERS)}"
        raise BadOperation(words, field=odd[0])
    rows = read_rows(tensors, vocabulary, longest)
    lengths = [len(row) for row in rows]
    total = sum(lengths)
    wide = _choices(tensors, total)
    targets = (
        _shifted(rows)
        if "targets" not in tensors
        else list(torch.split(_ids(tensors, "targets", total, wide), lengths))
    )
    joined = torch.cat(targets)
    if bool(((joined != NO_TARGET) & ((joined < 0) | (joined >= vocabulary))).any()):
        raise BadOperation(f"a target is neither {NO_TARGET} nor below {vocabulary}", field="targets")
    values: dict[str, list[Tensor]] = {}
    for name in NUMBERS:
        if name in tensors:
            values[name] = list(torch.split(_numbers(tensors[name], name, total, wide), lengths))
    if wide is not None:
        if bool((joined == NO_TARGET).any()) or "weights" not in values:
            words = "several targets a token need `weights` of their shape; 0 where nothing is asked"
            raise BadOperation(words, field="weights")
        values[CHOICES], targets = targets, [one[:, 0] for one in targets]
    return [
        SessionExample(row, target, {name: parts[at] for name, parts in values.items()})
        for at, (row, target) in enumerate(zip(rows, targets, strict=True))
    ]


def read_rows(tensors: Mapping[str, Tensor], vocabulary: int, longest: int | None) -> list[Tensor]:
    """Rows of `tokens` by `lengths`."""
    for name in ("tokens", "lengths"):
        if name not in tensors:
            raise BadOperation(f"the array `{name}` is missing", field=name)
    lengths = tensors["lengths"]
    if lengths.dim() != 1 or lengths.is_floating_point() or not len(lengths) or int(lengths.min()) < 1:
        raise BadOperation("`lengths` is a list of whole numbers above 0, one for each example", field="lengths")
    counts = [int(count) for count in lengths]
    if longest is not None and max(counts) > longest:
        words = f"an example has {max(counts)} tokens, and the model has {longest} positions"
        raise BadOperation(words, field="lengths", code="beyond_positions")
    tokens = _ids(tensors, "tokens", sum(counts))
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise BadOperation(f"a token is not between 0 and {vocabulary - 1}", field="tokens")
    return list(torch.split(tokens, counts))


def _choices(tensors: Mapping[str, Tensor], total: int) -> int | None:
    """Targets of each token; None: one, in a flat array."""
    found = tensors.get("targets")
    if found is None or found.dim() != 2:
        return None
    if not 1 <= found.shape[1] <= MOST_CHOICES:
        words = f"a token has 1 to {MOST_CHOICES} targets; this has {found.shape[1]}"
        raise BadOperation(words, field="targets")
    return int(found.shape[1])


def _shape(total: int, wide: int | None) -> tuple[int, ...]:
    return (total,) if wide is None else (total, wide)


def _ids(tensors: Mapping[str, Tensor], name: str, total: int, wide: int | None = None) -> Tensor:
    found = tensors[name]
    if found.is_floating_point() or found.dtype == torch.bool or found.shape != _shape(total, wide):
        words = f"`{name}` has {total} whole numbers, the sum of `lengths`; this is {found.dtype} {list(found.shape)}"
        raise BadOperation(words, field=name)
    return found.long()


def _numbers(found: Tensor, name: str, total: int, wide: int | None) -> Tensor:
    if not found.is_floating_point() or found.shape != _shape(total, wide):
        shape = f"{list(_shape(total, wide))}, the sum of `lengths`"
        words = f"`{name}` is floats of shape {shape}; this is {found.dtype} {list(found.shape)}"
        raise BadOperation(words, field=name)
    if not bool(found.isfinite().all()):
        raise BadOperation(f"`{name}` has a number that is not finite", field=name)
    return found.float()


def _shifted(rows: list[Tensor]) -> list[Tensor]:
    end = torch.tensor([NO_TARGET])
    return [torch.cat([row[1:], end]) for row in rows]


def last_targets(example: SessionExample, count: int) -> SessionExample:
    """The same without targets that are not among the last tokens, so many."""
    targets = example.targets.clone()
    targets[: max(0, len(targets) - 1 - count)] = NO_TARGET
    return replace(example, targets=targets)


def passes(examples: list[SessionExample], tokens: int, together: int = 1) -> Iterator[list[int]]:
    """Places of the examples that go through the model at once: `tokens` at most with padding, in their order, groups
    of `together` never apart."""
    taken: list[int] = []
    widest = 0
    for first in range(0, len(examples), together):
        group = list(range(first, min(first + together, len(examples))))
        wider = max(widest, *(len(examples[at].tokens) + 1 for at in group))
        if taken and wider * (len(taken) + len(group)) > tokens:
            yield taken
            taken, wider = [], max(len(examples[at].tokens) + 1 for at in group)
        taken, widest = taken + group, wider
    if taken:
        yield taken


def batch_of(examples: list[SessionExample], pad_token_id: int) -> Batch:
    """One pass. A target is the label of the next place, so that each row has one place more than tokens; what stands
    there is seen by no token."""
    lengths = tuple(len(example.tokens) + 1 for example in examples)
    ids = torch.full((len(examples), max(lengths)), pad_token_id)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, example in enumerate(examples):
        ids[row, : len(example.tokens)] = example.tokens
        labels[row, 1 : lengths[row]] = torch.where(example.asked, example.targets, IGNORE_INDEX)
    counts = tuple(int(example.asked.sum()) for example in examples)
    names = examples[0].values.keys()
    values = {name: torch.cat([one.values[name][one.asked] for one in examples]) for name in names}
    return Batch(ids, labels, lengths, sum(counts), counts=counts, token_values=values)


def spread(examples: list[SessionExample], found: list[Tensor]) -> Tensor:
    """Numbers of the targets in the places of their tokens, 0 elsewhere: [all tokens], or [all tokens x choices];
    float32, or whole numbers as they are."""
    parts = []
    for example, numbers in zip(examples, found, strict=True):
        kind = torch.float32 if numbers.is_floating_point() else numbers.dtype
        whole = torch.zeros(len(example.tokens), *numbers.shape[1:], dtype=kind)
        whole[example.asked] = numbers.cpu()
        parts.append(whole.flatten())
    return torch.cat(parts)
