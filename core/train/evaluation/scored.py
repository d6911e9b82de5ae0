"""Answers that are scored: the metrics of an evaluation by generation."""

from __future__ import annotations

from typing import Any

from core.errors import DataError, SpecError
from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.evaluation.generation import GreedyGeneration, NoGeneration, PythonMetric, metric_names
from core.spec.axes.rollout.reward import PythonReward
from core.train.data.dataset import TokenDataset
from core.train.evaluation.answer_metrics import score
from core.train.evaluation.samples import Answering, prompt_of, spread
from core.train.rollout.rewards import extracted
from core.train.rollout.sandboxed.programs import AnsweredPrompt, Value, values_of

ScoredAnswer = dict[str, Any]
"""{"line": of the file, "prompt", "reference", "answer", "new_tokens", "finished": the model ended by itself,
"scores": by the name of the metric}."""


class AnswerScorer:
    """Answers held-out prompts and scores the answers, any number of times."""

    def __init__(self, answering: Answering, dataset: TokenDataset, wanted: NoGeneration | GreedyGeneration) -> None:
        """SpecError when rows have no prompt to answer; NoSandbox where a metric is code of users and this machine
        cannot run it."""
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
        metrics = wanted.metrics if isinstance(wanted, GreedyGeneration) else []
        self._sandbox = ProgramSandbox() if any(isinstance(one, PythonMetric) for one in metrics) else None

    def without_slots(self) -> str | None:
        """Why the answers are not generated in slots; None: they are, or none are wanted."""
        if isinstance(self.wanted, NoGeneration) or not self.prompts:
            return None
        return self.answering.without_slots(self.prompts, self.wanted.max_new_tokens)

    def answers(self) -> dict[int, ScoredAnswer]:
        """Generate and score this rank's answers, by the number of their prompt. DataError where a function of users
        gives no number."""
        wanted = self.wanted
        if isinstance(wanted, NoGeneration):
            return {}
        found = self.answering.answer(self.prompts, self._stops, wanted.max_new_tokens)
        told = {at: self._told(wanted, at, answer) for at, answer in found.items()}
        for name, metric in zip(metric_names(wanted.metrics), wanted.metrics, strict=True):
            if isinstance(metric, PythonMetric):
                self._called(name, metric, list(told.values()))
            else:
                for one in told.values():
                    one["scores"][name] = score(metric, one["answer"], one["reference"])
        return told

    def _told(self, wanted: GreedyGeneration, at: int, answer: list[int]) -> ScoredAnswer:
        text, prompt = self.answering.text, self.prompts[at]
        return {
            "line": self.lines[at],
            "prompt": text(prompt.ids),
            "reference": text([token for token in prompt.reference if token not in self._stops]),
            "answer": text(answer),
            "new_tokens": len(answer),
            "finished": len(answer) < wanted.max_new_tokens,
            "scores": {},
        }

    def _called(self, name: str, metric: PythonMetric, answers: list[ScoredAnswer]) -> None:
        """Score answers by a function of the user's, in one call; 0 where `extract` finds nothing."""
        texts: list[str] = []
        asked: list[AnsweredPrompt] = []
        scored: list[ScoredAnswer] = []
        for one in answers:
            given, right = extracted(metric.extract, one["answer"]), extracted(metric.extract, one["reference"])
            one["scores"][name] = 0.0
            if given is not None and right is not None:
                scored.append(one)
                texts.append(given)
                asked.append(AnsweredPrompt(one["line"], one["prompt"], {"references": right}))
        if not scored:
            return
        assert self._sandbox is not None
        function = PythonReward(source=metric.source, function=metric.function, seconds=metric.seconds)
        values: list[Value] = values_of(function, texts, asked, self._sandbox)
        for one, value in zip(scored, values, strict=True):
            if not isinstance(value, float):
                raise DataError(
                    f"the metric `{name}` gave no number for the answer to the held-out row in line {one['line']}: "
                    f"{value}",
                    field="evaluation.generation.metrics",
                    code="metric_failed",
                )
            one["scores"][name] = value


def means(answers: list[ScoredAnswer]) -> dict[str, float]:
    """The metrics over all answers."""
    return {name: sum(one["scores"][name] for one in answers) / len(answers) for name in answers[0]["scores"]}
