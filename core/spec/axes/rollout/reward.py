"""The rewards of a stage that learns from answers it samples: pure functions of an answer and the row of its prompt."""

from __future__ import annotations

import ast
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from core.base.addresses import NotAllowed, parse
from core.spec.axes.model import HubModel, JobModel, LocalModel, RegistryModel, short_model
from core.spec.base import SpecModel, by_type, short_form


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression of Python: {error}") from error
    return pattern


def _has_a_group(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups < 1:
        raise ValueError("put parentheses around what is to be compared, as in `<answer>(.*?)</answer>`")
    return pattern


Pattern = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_compiles)]
Extract = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_has_a_group)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]


class RewardTerm(SpecModel):
    """Common fields of rewards; not an arm."""

    type: str
    name: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,40}$")] | None = None
    """Name of the reward in metrics and rollouts. Default: its type; a second one of a type needs a name."""
    weight: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """Factor in the sum of all rewards."""


class ExactReward(RewardTerm):
    """1 where the answer is the value of a column, else 0."""

    type: Literal["exact"] = "exact"
    column: Annotated[str, Field(min_length=1, max_length=200)] = "reference"
    """Column of the rows that holds the right answer."""
    extract: Extract | None = None
    """Regular expression whose first group is compared (its last match in the answer, `.` matching line ends); without
    a match the reward is 0. Default: the whole answer is compared."""
    ignore_case: bool = False
    """Compare without regard to case. White space at both ends never counts."""


class NumberReward(RewardTerm):
    """1 where the last number of the answer equals that of a column, else 0. Thousands separators, currency and percent
    signs are dropped."""

    type: Literal["number"] = "number"
    column: Annotated[str, Field(min_length=1, max_length=200)] = "reference"
    """Column of the rows that holds the number, alone or as the last one of a text."""
    extract: Extract | None = None
    """As in `exact`: the number is looked for in the first group alone."""
    tolerance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest relative difference that counts as equal."""


class RegexReward(RewardTerm):
    """1 where a regular expression is found in the answer, else 0."""

    type: Literal["regex"] = "regex"
    pattern: Pattern
    """Regular expression of Python; `.` does not match line ends unless it begins with `(?s)`."""
    whole: bool = False
    """The whole answer must match, white space at both ends aside."""


class FormatReward(RewardTerm):
    """1 where the answer is exactly these sections in this order, each `<tag>…</tag>`, with nothing but white space
    between and around them; else 0."""

    type: Literal["format"] = "format"
    tags: Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,39}$")]], Field(min_length=1)] = Field(
        default=["think", "answer"]
    )
    """Names of the sections."""


class LengthReward(RewardTerm):
    """1 where the answer has at most `most` tokens, falling linearly to 0 at `most + slack`."""

    type: Literal["length"] = "length"
    least: Annotated[int, Field(ge=0)] = 0
    """Answers with fewer tokens get 0."""
    most: Annotated[int, Field(ge=1)]
    """Tokens up to which the reward is 1."""
    slack: Annotated[int, Field(ge=0)] = 0
    """Tokens over which it falls to 0."""


class KeywordsReward(RewardTerm):
    """Share of words that occur in the answer; 0 where one of `never` does."""

    type: Literal["keywords"] = "keywords"
    words: Annotated[list[Word], Field(max_length=1000)] = Field(default=[])
    """Words or phrases that should occur, compared without regard to case."""
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Column of the rows with further words: a list of strings, or one string."""
    never: Annotated[list[Word], Field(max_length=1000)] = Field(default=[])
    """Words or phrases that must not occur."""

    @model_validator(mode="after")
    def _something_is_looked_for(self) -> KeywordsReward:
        if not self.words and self.column is None and not self.never:
            raise ValueError("name `words`, a `column` or words that must `never` occur")
        return self


class JsonSchemaReward(RewardTerm):
    """1 where the answer is JSON that a JSON Schema (draft 2020-12) allows, else 0. The answer may be in a fence."""

    type: Literal["json_schema"] = "json_schema"
    document: dict[str, Any] | None = None
    """The JSON Schema. A `$ref` may point into the document only; nothing is fetched."""
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Column of the rows that holds the JSON Schema, as an object."""

    @model_validator(mode="after")
    def _one_schema(self) -> JsonSchemaReward:
        if (self.document is None) == (self.column is None):
            raise ValueError("give the schema itself as `document`, or name the `column` that holds it")
        if self.document is not None and (why := wrong_schema(self.document)) is not None:
            raise ValueError(f"not a JSON Schema: {why}")
        return self


def _parsed(source: str) -> str:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a source of Python: {error}") from error
    return source


PythonSource = Annotated[str, Field(min_length=1, max_length=1_000_000), AfterValidator(_parsed)]
PythonName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]


class PythonReward(RewardTerm):
    """What a Python function of yours answers for a batch of answers. It runs in a sandbox: without network, files or
    keys (docs/security.md)."""

    type: Literal["python"] = "python"
    source: PythonSource
    """Source of a module. It is executed anew for each batch, with the packages of the trainer's environment."""
    function: PythonName = "reward"
    """Function in it that takes lists of equal length by name, those that it has parameters for: `prompts`,
    `completions` and columns of the rows. It returns a list of as many numbers, as reward functions for TRL do."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time of a batch at most."""


class CodeReward(RewardTerm):
    """Share of tests that the answer passes as a Python program, in a sandbox (docs/security.md). The program is the
    last fenced block of the answer, or the whole answer."""

    type: Literal["code"] = "code"
    column: Annotated[str, Field(min_length=1, max_length=200)] = "tests"
    """Column of the rows with the tests: a list of objects `{input, output}`, each a run of the program that reads
    `input` and must print `output`; or of sources that are run behind the program and must reach their end, as with
    `assert`; one alone may stand for a list."""
    all: bool = True
    """1 where all tests are passed, else 0; `false`: the share of those that are."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Time of a test at most."""


class MathReward(RewardTerm):
    """1 where the answer is mathematically that of a column, else 0, as math-verify reads LaTeX, numbers, sets and
    intervals: 1/2, 0.5 and \\boxed{\\frac{1}{2}} are the same. It is computed in a sandbox, since an expression may
    take for ever (docs/security.md)."""

    type: Literal["math"] = "math"
    column: Annotated[str, Field(min_length=1, max_length=200)] = "reference"
    """Column of the rows that holds the right answer: alone, as LaTeX or a number, or in `$…$` or `\\boxed{…}` in a
    text."""
    extract: Extract | None = None
    """As in `exact`: the first group is the answer, alone. Default: the last expression of the answer, one in
    `\\boxed{…}` before others."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Time of an answer at most; one that takes longer gets 0, and the rollouts say so."""


class TaskReward(RewardTerm):
    """What the verifier of a problem's own task says of the answer, mostly 1 or 0, for rows that `data` has from a task
    (docs/tasks.md). It is computed in a sandbox (docs/security.md)."""

    type: Literal["task"] = "task"
    column: Annotated[str, Field(min_length=1, max_length=200)] = "task"
    """Column of the rows that holds the problem, as rows of a task have it."""
    extract: Extract | None = None
    """As in `exact`: the first group is the answer. Default: the whole answer, white space at its ends aside. Verifiers
    mostly expect the result and nothing else."""
    seconds: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Time of an answer at most; one that takes longer gets 0, and the rollouts say so."""


def _plain_url(url: str) -> str:
    try:
        parse(url)
    except NotAllowed as error:
        raise ValueError(str(error)) from error
    return url


class HttpReward(RewardTerm):
    """What an endpoint of yours answers to a POST of prompts, completions and rows (docs/rollouts.md). Private
    addresses are refused unless the administrator allows them with EFT_REWARD_ALLOW."""

    type: Literal["http"] = "http"
    url: Annotated[str, Field(min_length=1, max_length=2000), AfterValidator(_plain_url)]
    """Where the batches are sent to, `http://…` or `https://…`. The administrator may give it a token with
    EFT_REWARD_TOKENS."""
    batch_size: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Answers of a request at most."""
    parallel: Annotated[int, Field(ge=1, le=64)] = 4
    """Requests at the same time at most."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Time of a request at most, from the lookup of the name to the end of the response."""
    retries: Annotated[int, Field(ge=0, le=100)] = 5
    """Further tries where there is no answer, or one of 408, 425, 429, 500, 502, 503 and 504: after 1, 2, 5, 10 and
    then each time 30 s, or what `Retry-After` says. What fails then is left to `reward_error`."""


RewardModelSource = Annotated[
    JobModel | RegistryModel | HubModel | LocalModel, Field(discriminator="type"), short_form(short_model)
]
"""Where a reward model comes from."""


class ModelReward(RewardTerm):
    """What a reward model gives a prompt and an answer, rendered by its own chat template as the rows that it was
    trained on: the number that its head puts out at the last token (docs/rollouts.md). It is loaded beside the model
    that is trained."""

    type: Literal["model"] = "model"
    model: RewardModelSource
    """The reward model: a job of `stage: reward` that has succeeded, its entry of the registry, or a folder or hub
    repository with a sequence classifier of one label."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Answers that are scored at once; fewer once the device had no memory for them."""
    max_length: Annotated[int, Field(ge=1, le=131_072)] | None = None
    """Tokens of a prompt and its answer at most, as the reward model counts them. What is longer is left to
    `reward_error`. Default: the positions that the reward model was built for."""

    @model_validator(mode="after")
    def _no_adapter_to_use(self) -> ModelReward:
        if isinstance(self.model, JobModel | RegistryModel) and self.model.adapter is not None:
            raise ValueError("a reward model is used as it is: remove `model.adapter`")
        return self


class EnvironmentReward(RewardTerm):
    """What `stage.environment` of type `python` or `game` said that the episode is worth; 0 where it said nothing."""

    type: Literal["environment"] = "environment"


def wrong_schema(document: dict[str, Any]) -> str | None:
    """Why an object is no JSON Schema; None: it is one."""
    from jsonschema import Draft202012Validator, SchemaError  # takes longer to import than all arms together

    try:
        Draft202012Validator.check_schema(document)
    except SchemaError as error:
        return f"{error.json_path}: {error.message[:500]}"
    return None


ProgramReward = PythonReward | CodeReward | MathReward | TaskReward
"""Rewards that are computed in the sandbox."""
TextReward = ExactReward | NumberReward | RegexReward | FormatReward | LengthReward | KeywordsReward | JsonSchemaReward
"""Rewards that are functions of one answer, which we wrote."""
RewardArm = Annotated[
    ExactReward
    | NumberReward
    | RegexReward
    | FormatReward
    | LengthReward
    | KeywordsReward
    | JsonSchemaReward
    | PythonReward
    | CodeReward
    | MathReward
    | TaskReward
    | HttpReward
    | ModelReward
    | EnvironmentReward,
    Field(discriminator="type"),
    short_form(by_type),
]


def names_of(rewards: list[Any]) -> list[str]:
    """Names of rewards in metrics."""
    return [one.name or one.type for one in rewards]


def each_named_once(rewards: list[Any]) -> list[Any]:
    names = names_of(rewards)
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise ValueError(f"two rewards are called `{doubled}`; give them a `name`")
    return rewards


RewardError = Literal["fail", "zero", "skip"]
"""What becomes of an answer whose reward cannot be computed."""
Rewards = Annotated[list[RewardArm], Field(min_length=1, max_length=20), AfterValidator(each_named_once)]
