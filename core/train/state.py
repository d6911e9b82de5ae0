"""What a run knows of its own course, over all of its attempts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

SAMPLE_CHARS = 4 << 20


@dataclass(slots=True)
class TrainerState:
    """Counters and figures of a run; a stateful part of the engine. Checkpoints hold its fields by their names."""

    window_loss: float = 0.0
    """Sum of the loss over the unfinished window. Under a loss scale it may be no finite number."""
    window_sums: dict[str, float] = field(default_factory=dict)
    """Further sums of the stage over it."""
    window_totals: dict[str, float] = field(default_factory=dict)
    """What its stage computed before its first batch (`Stage.totals`)."""
    window_tokens: int = 0
    window_slots: int = 0
    window_seconds: float = 0.0
    loss_sum: float = 0.0
    """Sum of the mean losses of finished steps."""
    lost_losses: int = 0
    """Finished steps that `loss_sum` does not have: fp16 overflowed in their forward pass."""
    tokens: int = 0
    """Tokens trained on, padding not counted."""
    seconds: float = 0.0
    """Seconds spent in training steps: neither in evaluations nor in checkpoints."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """{"step", "samples"}: what the model answered at each evaluation, oldest first; the oldest but the very first go
    when they are too many."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Scored answers of the latest evaluation, `step` among their fields."""

    loss_rose: bool = False
    """The notice of a loss that rises was written."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"window_loss": self.window_loss if math.isfinite(self.window_loss) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        if self.window_loss is None:
            self.window_loss = math.nan  # JSON has no word for it

    def drop_window(self) -> None:
        self.window_loss, self.window_sums, self.window_totals = 0.0, {}, {}
        self.window_tokens, self.window_slots, self.window_seconds = 0, 0, 0.0

    def keep_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        """Keep the samples of an evaluation. The text of all of them stays below SAMPLE_CHARS, since every checkpoint
        holds it."""
        self.samples.append({"step": step, "samples": samples})
        while len(self.samples) > 2 and sum(map(_chars, self.samples)) > SAMPLE_CHARS:
            del self.samples[1]

    def keep_answers(self, step: int, answers: list[dict[str, Any]]) -> None:
        """Keep the scored answers of an evaluation in place of those before it: the first so many whose text stays
        below SAMPLE_CHARS."""
        self.answers, left = [], SAMPLE_CHARS
        for one in answers:
            left -= sum(len(one[key]) for key in ("prompt", "reference", "answer"))
            if left < 0:
                break
            self.answers.append({"step": step, **one})

    def evaluated(self, step: int) -> dict[str, float] | None:
        """The evaluation after this step, `step` among its values; None where there was none."""
        return next((values for values in self.evaluations if values["step"] == step), None)

    def result(self, steps: int, best: dict[str, Any] | None, *, stopped_early: bool) -> dict[str, Any]:
        """The job's result after so many optimizer steps. `best`: see core/train/checkpoint/best.py."""

        def values(step: int) -> dict[str, float] | None:
            found = self.evaluated(step)
            return None if found is None else {name: value for name, value in found.items() if name != "step"}

        return {
            "train_loss": self.loss_sum / max(1, steps - self.lost_losses),
            "steps": steps,
            "train_seconds": self.seconds,
            "tokens_per_second": self.tokens / max(self.seconds, 1e-9),
            "total_tokens": self.tokens,
            "stopped_early": stopped_early,
            "best": best,
            "eval_before": values(0),
            "eval_after": values(best["step"] if best is not None and best["restored"] else steps),
        }


def _chars(entry: dict[str, Any]) -> int:
    return sum(len(one[key] or "") for one in entry["samples"] for key in ("prompt", "reference", "completion"))
