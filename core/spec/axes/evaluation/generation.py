"""Metrics of an evaluation that come from answers which the model writes, not from the probabilities of given ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from core.spec.axes.rollout.reward import Extract, PythonName, PythonSource
from core.spec.base import SpecModel, by_type, short_form

PREFIX = "eval_generated/"
"""Beginning of the names of these metrics."""
GeneratedMetricName = Annotated[str, StringConstraints(pattern=rf"^{PREFIX}[a-z0-9_-]{{1,40}}$")]


class AnswerMetric(SpecModel):
    """Common fields of metrics of an answer; not an arm."""

    type: str
    name: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")] | None = None
    """Name after `eval_generated/`. Default: its type; a second one of a type needs a name."""
    extract: Extract | None = None
    """Regular expression whose first group is compared (its last match, `.` matching line ends), in the answer and in
    the row's completion alike; an answer without a match scores 0. Default: the whole text."""


class ExactMatch(AnswerMetric):
    """1 where the answer is the row's completion, white space at both ends aside."""

    type: Literal["exact_match"] = "exact_match"
    ignore_case: bool = False
    """Compare without regard to case."""


class NumberMatch(AnswerMetric):
    """1 where the last number of the answer equals the last number of the completion. Thousands separators, currency
    and percent signs are dropped."""

    type: Literal["number_match"] = "number_match"
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest relative difference that counts as equal."""


class Contains(AnswerMetric):
    """1 where the completion occurs in the answer."""

    type: Literal["contains"] = "contains"
    ignore_case: bool = False
    """Compare without regard to case."""


class TokenF1(AnswerMetric):
    """F1 of the words that answer and completion share, as in SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250): lower
    case, without punctuation and English articles."""

    type: Literal["f1"] = "f1"


class RougeL(AnswerMetric):
    """ROUGE-L: F1 of the longest common subsequence of words (Lin 2004), lower case, letters and digits alone."""

    type: Literal["rouge_l"] = "rouge_l"


class ChrF(AnswerMetric):
    """chrF of each answer, from 0 to 1 (Popović 2015): F2 of character n-grams up to 6, white space aside."""

    type: Literal["chrf"] = "chrf"


class JsonValid(AnswerMetric):
    """1 where the answer is a JSON document. The completion is not compared."""

    type: Literal["json_valid"] = "json_valid"


class ToolCallMatch(AnswerMetric):
    """1 where the answer calls the tools of the completion, in its order, with its arguments: the names equal, the
    arguments equal as JSON. Calls are JSON objects with a `name` and `arguments` (or `parameters`), wherever they stand
    in the text. Where the completion calls none, the answer must call none."""

    type: Literal["tool_call_match"] = "tool_call_match"


class PythonMetric(AnswerMetric):
    """What a Python function of yours returns. It runs in a sandbox, without network, files or keys
    (docs/security.md)."""

    type: Literal["python"] = "python"
    source: PythonSource
    """Source of a module, with the packages of the trainer's environment."""
    function: PythonName = "metric"
    """Function in it that takes lists of equal length by name, those that it has parameters for: `prompts`,
    `completions` (the answers) and `references`. It returns a list of as many numbers; larger ones are better."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time of an evaluation's call at most."""


TextMetric = ExactMatch | NumberMatch | Contains | TokenF1 | RougeL | ChrF | JsonValid | ToolCallMatch
"""Metrics that are functions of two texts, which we wrote."""
AnswerMetricArm = Annotated[
    ExactMatch | NumberMatch | Contains | TokenF1 | RougeL | ChrF | JsonValid | ToolCallMatch | PythonMetric,
    Field(discriminator="type"),
    short_form(by_type),
]


def _each_named_once(metrics: list[Any]) -> list[Any]:
    names = metric_names(metrics)
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ValueError(f"two metrics are called `{doubled.removeprefix(PREFIX)}`; give them a `name`")
    return metrics


def metric_names(metrics: list[Any]) -> list[str]:
    """Names of the metrics in evaluations."""
    return [PREFIX + (one.name or one.type) for one in metrics]


class NoGeneration(SpecModel):
    """No metrics of generated answers."""

    type: Literal["none"] = "none"


class GreedyGeneration(SpecModel):
    """At every evaluation the model answers the prompts of held-out rows with its most likely tokens, and each answer
    is scored against the completion of its row. The means are metrics `eval_generated/…`."""

    type: Literal["greedy"] = "greedy"
    metrics: Annotated[list[AnswerMetricArm], Field(min_length=1, max_length=20), AfterValidator(_each_named_once)]
    """What is measured, e.g. `[exact_match, {type: number_match, extract: '####(.*)'}]`."""
    rows: Annotated[int, Field(ge=1, le=1_000_000)] | None = 100
    """Held-out rows that are answered, spread evenly over the file; null: all of them."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32_768)] = 256
    """Maximum tokens of an answer."""


Generation = Annotated[
    NoGeneration | GreedyGeneration, Field(discriminator="type"), short_form(by_type, otherwise="greedy")
]
