"""Answers that are scored: the metrics of an evaluation by generation."""

from __future__ import annotations

from typing import Any

from core.errors import SpecError
from core.spec.axes.evaluation.generation import GreedyGeneration, NoGeneration, metric_names
from core.train.data.dataset import TokenDataset
from core.train.evaluation.answer_metrics import score
from core.train.evaluation.samples import Answering, prompt_of, spread

ScoredAnswer = dict[str, Any]
"""{"line": of the file, "prompt", "reference", "answer", "new_tokens", "finished": the model ended by itself,
"scores": by the name of the metric}."""


class AnswerScorer:
    """Answers held-out prompts and scores the answers, any number of times."""

    def __init__(self, answering: Answering, dataset: TokenDataset, wanted: NoGeneration | GreedyGeneration) -> None:
        """SpecError when rows have no prompt to answer."""
        self.answering, self.wanted = answering, wanted
        rows = spread(wanted.rows, len(dataset)) if isinstance(wanted, GreedyGeneration) else []
        self.lines = [int(dataset.lines[row]) for row in rows]
        self.prompts = [prompt_of(dataset, row) for row in rows]
        odd = next((line for line, one in zip(self.lines, self.prompts, strict=True) if one.continued), None)
        if odd is not None:
            raise SpecError(
                f"the held-out row in line {odd} has no prompt that could be answered; give rows with a prompt and a "
                "completion, or remove `evaluation.generation`",
                field="evaluation.generation",
                code="no_prompt_to_answer",
            )
        self._stops = answering.stops(self.prompts)

    def without_slots(self) -> str | None:
        """Why the answers are not generated in slots; None: they are, or none are wanted."""
        if isinstance(self.wanted, NoGeneration) or not self.prompts:
            return None
        return self.answering.without_slots(self.prompts, self.wanted.max_new_tokens)

    def answers(self) -> dict[int, ScoredAnswer]:
        """Generate and score this rank's answers, by the number of their prompt."""
        wanted = self.wanted
        if isinstance(wanted, NoGeneration):
            return {}
        found = self.answering.answer(self.prompts, self._stops, wanted.max_new_tokens)
        return {at: self._scored(wanted, at, answer) for at, answer in found.items()}

    def _scored(self, wanted: GreedyGeneration, at: int, answer: list[int]) -> ScoredAnswer:
        text, prompt = self.answering.text, self.prompts[at]
        given = text(answer)
        reference = text([token for token in prompt.reference if token not in self._stops])
        names = metric_names(wanted.metrics)
        return {
            "line": self.lines[at],
            "prompt": text(prompt.ids),
            "reference": reference,
            "answer": given,
            "new_tokens": len(answer),
            "finished": len(answer) < wanted.max_new_tokens,
            "scores": {
                name: score(metric, given, reference) for name, metric in zip(names, wanted.metrics, strict=True)
            },
        }


def means(answers: list[ScoredAnswer]) -> dict[str, float]:
    """The metrics over all answers."""
    return {name: sum(one["scores"][name] for one in answers) / len(answers) for name in answers[0]["scores"]}
