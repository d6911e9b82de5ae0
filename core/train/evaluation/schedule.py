"""When a run is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from core.spec.axes.runtime import HeldOut, NoEvaluation


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """The steps after which a run of `total_steps` is evaluated; step 0 is the untrained model."""

    evaluation: HeldOut | NoEvaluation
    total_steps: int

    def due(self, step: int) -> bool:
        """Whether it is evaluated after this step."""
        if isinstance(self.evaluation, NoEvaluation):
            return False
        if step == 0:
            return self.evaluation.at_start
        return step == self.total_steps or (
            self.evaluation.eval_steps is not None and step % self.evaluation.eval_steps == 0
        )

    def left(self, step: int) -> int:
        """Evaluations that are still to come after this step."""
        if isinstance(self.evaluation, NoEvaluation):
            return 0
        every = self.evaluation.eval_steps
        between = 0 if every is None else (self.total_steps - 1) // every - step // every
        return max(0, between) + 1
