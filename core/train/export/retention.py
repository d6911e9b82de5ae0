"""How much of the tuning an exported model has kept: 1 − KL(tuned‖exported) / KL(tuned‖base).

Both divergences are means over the positions of the same rows. 1 is the tuned model itself, 0 is as far from it as the
base model is, and a negative figure is farther.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional

ROWS, TOKENS = 16, 64
"""Most rows, and most tokens of each, that logits are compared on."""
LOGIT_BYTES = 128 * 2**20
"""Bound of one model's logits over these rows."""
LEAST_TUNING = 0.01
"""Nats a token. Where the tuned model is closer to its base, the share that is lost cannot be told from rounding, and
the loss is held against this figure instead."""
SLICE = 64
"""Positions that are compared at once."""

RowsOf = Literal["held_out", "training"]


@dataclass(frozen=True, slots=True)
class Retention:
    """What was found; part of the job's result."""

    reader: str
    """Library that has read the files, with its version."""
    rows_of: RowsOf
    """Rows that were compared: held out, or trained on where no rows are held out."""
    rows: int
    positions: int
    kl_base: float | None
    """Mean of KL(tuned‖base), nats a token. None where it is no finite number."""
    kl_exported: float | None
    """Mean of KL(tuned‖exported), nats a token. None where it is no finite number."""
    same_choice: float
    """Share of positions with the same most likely token."""
    retention: float | None
    """Share of the tuning that is kept. None where the tuned model is too close to its base to tell (`kl_base`)."""
    required: float
    """Least retention with which the format is released."""

    def fault(self) -> str | None:
        """Why the format is not released; None when it is."""
        if self.kl_exported is None or self.kl_base is None:
            return "its logits are not finite numbers"
        if self.retention is not None and self.retention < self.required:
            return f"it has kept {self.retention:.4f} of the tuning, and {self.required:g} is required"
        allowed = (1 - self.required) * LEAST_TUNING
        if self.retention is None and self.kl_exported > allowed:
            return (
                f"it is {self.kl_exported:.2g} nats a token from the tuned model, which is itself only "
                f"{self.kl_base:.2g} from its base; {allowed:.2g} is allowed"
            )
        return None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    tuned: Tensor, base: Tensor, exported: Tensor, *, rows: int, rows_of: RowsOf, required: float, reader: str
) -> Retention:
    """Compare three times logits [positions, vocabulary], float32; a score [positions, 1] is compared as that of a
    better answer (Bradley and Terry), with 0 for the worse one."""
    if tuned.shape[-1] == 1:
        tuned, base, exported = (functional.pad(scores, (0, 1)) for scores in (tuned, base, exported))
    to_base, to_exported = _divergence(tuned, base), _divergence(tuned, exported)
    told = to_base is not None and to_exported is not None and to_base >= LEAST_TUNING
    return Retention(
        reader=reader,
        rows_of=rows_of,
        rows=rows,
        positions=len(tuned),
        kl_base=to_base,
        kl_exported=to_exported,
        same_choice=float((exported.argmax(-1) == tuned.argmax(-1)).float().mean()),
        retention=1 - to_exported / to_base if told and to_base and to_exported is not None else None,
        required=required,
    )


def _divergence(tuned: Tensor, other: Tensor) -> float | None:
    """Mean of KL(tuned‖other) over the positions; None where it is no finite number."""
    total = 0.0
    for place in range(0, len(tuned), SLICE):
        p = tuned[place : place + SLICE].double().log_softmax(-1)
        q = other[place : place + SLICE].double().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
    return max(total, 0.0) / len(tuned) if math.isfinite(total) else None


def probes(rows: Sequence[Tensor], vocabulary: int) -> list[Tensor]:
    """A few rows of ids, spread over those given and cut to TOKENS, such that their logits fit into LOGIT_BYTES."""
    room = max(2, LOGIT_BYTES // (4 * vocabulary * TOKENS))
    count = min(len(rows), ROWS, room)
    return [rows[place * len(rows) // count][:TOKENS] for place in range(count)]
