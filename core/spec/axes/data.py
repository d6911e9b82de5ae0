"""The data axis: where rows come from and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, assert_never, get_args

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from core.spec.axes.model import HubId, LocalPath, Revision
from core.spec.axes.rendering import ModelTemplate, Rendering
from core.spec.axes.rollout.games import wrong_game, wrong_game_options
from core.spec.axes.rollout.tasks import tasks, wrong_name, wrong_settings
from core.spec.base import SpecModel, short_form

RowFormat = Literal[
    "messages", "sharegpt", "instruction", "prompt_completion", "text", "preference", "kto", "stepwise", "prompt"
]
FORMATS: tuple[RowFormat, ...] = get_args(RowFormat)
"""What a row can be (docs/data.md); `auto` is settled from the rows themselves, never guessed."""

Format = Literal[
    "auto", "messages", "sharegpt", "instruction", "prompt_completion", "text", "preference", "kto", "stepwise",
    "prompt",
]  # fmt: skip
Column = Literal[
    "messages", "conversations", "tools", "system", "instruction", "input", "prompt", "completion", "output", "text",
    "chosen", "rejected", "margin", "label", "completions", "labels", "reference",
]  # fmt: skip
"""Names that a mapping can give to columns."""

UNSENT = "file-0000000000000000000000"
"""Ids that begin so stand, in a dry run, for files that are still to be uploaded; no file ever gets one."""
FileId = Annotated[str, StringConstraints(pattern=r"^file-[0-9a-z]{26}$")]
ColumnName = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Columns = Annotated[dict[Column, ColumnName], Field(max_length=len(get_args(Column)))]
_SPLIT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(\[(-?[0-9]{1,12}%?)?:(-?[0-9]{1,12}%?)?\])?"
HubSplit = Annotated[str, StringConstraints(pattern=rf"^{_SPLIT}(\+{_SPLIT}){{0,15}}$")]
HubFile = Annotated[str, StringConstraints(pattern=r"^[^/\x00-\x1f\x7f][^\x00-\x1f\x7f]{0,299}$")]


class Readable(SpecModel):
    """Common fields of all sources."""

    format: Format = "auto"
    """Row format (docs/data.md): `messages`, `sharegpt`, `instruction`, `prompt_completion`, `text`, `preference`,
    `kto`, `stepwise` or `prompt`. Needed only if rows match two of them."""
    columns: Columns = Field(default={})
    """Mapping from field names to the file's columns: `{prompt: question, completion: answer}`."""

    @model_validator(mode="after")
    def _told_apart(self) -> Readable:
        theirs = list(self.columns.values())
        if double := next((name for name in theirs if theirs.count(name) > 1), None):
            raise ValueError(f"`columns` gives the column `{double[:40]}` two names")
        return self


class FileSource(Readable):
    """A file uploaded with `POST /files`."""

    type: Literal["file"] = "file"
    id: FileId
    """Id from `POST /files`. `format` and `columns` given at upload need not be repeated."""


class PathSource(Readable):
    """A JSONL, JSON, CSV or Parquet file on the worker, below one of the allowed roots."""

    type: Literal["path"] = "path"
    path: LocalPath
    """Full path of the file."""


class HubDataset(Readable):
    """A dataset on the Hugging Face hub. Its data files are downloaded to the data root before a GPU is held; its code
    is never run."""

    type: Literal["hub"] = "hub"
    id: HubId
    """Repository id, e.g. `openai/gsm8k`."""
    revision: Revision = "main"
    """Branch, tag or commit. Pinned to a commit when the job is prepared; the run record names that commit."""
    config: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$")] | None = None
    """Subset; required if there are several."""
    split: HubSplit = "train"
    """Split, as named by the files or the dataset card. With a slice (`train[:10%]`, `train[100:200]`) a part of its
    rows, and with `+` several parts: the notation of `datasets`."""
    files: Annotated[list[HubFile], Field(max_length=1000)] = Field(default=[])
    """Names or patterns (`data/*.parquet`) of files, in order, instead of `config` and `split`; a slice of `split` then
    counts their rows."""


def _known_task(name: str) -> str:
    if (why := wrong_name(name)) is not None:
        raise ValueError(why)
    return name


TaskName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_known_task)]
MOST_PROBLEMS = 1 << 20
"""Problems of one seed: those of another begin behind them."""


class TaskRows(SpecModel):
    """Problems of a task of reasoning-gym (docs/tasks.md), generated before a GPU is held. The same fields make the
    same problems; another seed makes others. The reward `task` verifies answers to them."""

    type: Literal["task"] = "task"
    name: TaskName
    """Task, e.g. `chain_sum`."""
    size: Annotated[int, Field(ge=1, le=MOST_PROBLEMS)] = 1000
    """Problems."""
    seed: Annotated[int, Field(ge=0, lt=2**32 // MOST_PROBLEMS)] = 0
    """Seed of the problems. Held-out ones have another than those that are trained on."""
    level: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Level of difficulty, 0 the easiest. Default: the defaults of the task's options."""
    options: Annotated[dict[str, Any], Field(max_length=100)] = Field(default={})
    """Options of the task, which take precedence over those of its level: `{max_terms: 3}`."""
    instruction: Annotated[str, StringConstraints(min_length=1, max_length=100_000)] | None = None
    """Text behind each question, such as the form in which the answer is expected."""
    format: Literal["prompt", "prompt_completion"] = "prompt"
    """`prompt`: for stages that learn from answers. `prompt_completion`: with the right answer as the completion, for
    `sft`."""

    @property
    def columns(self) -> dict[Column, str]:
        """Columns are written by the names of the format."""
        return {}

    @model_validator(mode="after")
    def _task_has_them(self) -> TaskRows:
        if (why := wrong_settings(self.name, self.level, self.options)) is not None:
            raise ValueError(why)
        if self.format == "prompt_completion" and not tasks()[self.name].answered:
            raise ValueError(f"problems of `{self.name}` have no answer of their own to learn: set `format: prompt`")
        return self

    def problems_of(self) -> tuple[str, str, int | None, str]:
        """What the problems depend on, beside their number."""
        return self.name, str(self.seed), self.level, repr(sorted(self.options.items()))


def _known_game(name: str) -> str:
    if (why := wrong_game(name)) is not None:
        raise ValueError(why)
    return name


GameName = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_known_game)]


class GameRows(SpecModel):
    """Openings of a game of textarena (docs/games.md), generated before a GPU is held. The same fields make the same
    games; another seed makes others. `stage.environment: game` plays them."""

    type: Literal["game"] = "game"
    name: GameName
    """Game, e.g. `GuessTheNumber-v0`."""
    size: Annotated[int, Field(ge=1, le=MOST_PROBLEMS)] = 1000
    """Games."""
    seed: Annotated[int, Field(ge=0, lt=2**32 // MOST_PROBLEMS)] = 0
    """Seed of the games. Held-out ones have another than those that are trained on."""
    options: Annotated[dict[str, Any], Field(max_length=100)] = Field(default={})
    """Options of the game: `{max_number: 10}`."""
    instruction: Annotated[str, StringConstraints(min_length=1, max_length=100_000)] | None = None
    """Text behind what the game says at first, such as the form in which moves are expected."""
    format: Literal["prompt"] = "prompt"
    """Games are played by stages that learn from answers."""

    @property
    def columns(self) -> dict[Column, str]:
        """Columns are written by the names of the format."""
        return {}

    @model_validator(mode="after")
    def _game_has_them(self) -> GameRows:
        if (why := wrong_game_options(self.name, self.options)) is not None:
            raise ValueError(why)
        return self

    def problems_of(self) -> tuple[str, str, str]:
        """What the games depend on, beside their number."""
        return self.name, str(self.seed), repr(sorted(self.options.items()))


Generated = TaskRows | GameRows
"""Rows that a library makes."""


def _expand_source(value: str) -> dict[str, Any]:
    return {"type": "file", "id": value} if value.startswith("file-") else {"type": "path", "path": value}


EXAMPLE_FILE = "file-01kar3v8x5m2h6n9qst4wyz0bc"

Single = FileSource | PathSource | HubDataset | TaskRows | GameRows
SingleField = Annotated[Single, Field(discriminator="type"), short_form(_expand_source, EXAMPLE_FILE)]


class Weighted(SpecModel):
    """One source of a mixture."""

    source: SingleField
    """Source of the rows."""
    weight: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Relative frequency of drawing from this source. Either all sources have a weight or none."""


class Mixture(SpecModel):
    """Several sources as one. Without weights every row occurs once. With weights each next row is drawn from a source
    by its weight; the rows of each source keep their order until training shuffles them."""

    type: Literal["mixture"] = "mixture"
    sources: Annotated[list[Weighted], Field(min_length=1, max_length=64)]
    """The sources; a plain source has no weight."""
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """With weights: end of an epoch, when the first source is exhausted or when every source has been read once
    (shorter ones restart). The names are those of `datasets.interleave_datasets`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the draws."""

    @model_validator(mode="after")
    def _weighted(self) -> Mixture:
        if len({one.weight is None for one in self.sources}) > 1:
            raise ValueError("give every source of a mixture a `weight`, or none")
        return self


def _expand_weighted(value: Any) -> Any:
    return value if isinstance(value, dict) and "source" in value else {"source": value}


def _expand_mixture(value: Any) -> Any:
    """A list of sources is a mixture; sources inside need not say `source`."""
    if isinstance(value, list):
        value = {"type": "mixture", "sources": value}
    if isinstance(value, dict) and value.get("type") == "mixture" and isinstance(value.get("sources"), list):
        value = value | {"sources": [_expand_weighted(one) for one in value["sources"]]}
    return _expand_source(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class written_as:  # noqa: N801 -- reads as a word inside Annotated[…]
    """Other ways to write a value, told in the JSON schema of the input."""

    expand: Callable[[Any], Any]
    schema: Callable[[dict[str, Any]], list[dict[str, Any]]]
    """From the schema of the value to those of the other ways."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler(schema)
        return whole if handler.mode == "serialization" else {"anyOf": [*self.schema(whole), whole]}


_SHORT = {"type": "string", "description": "Short form.", "examples": [EXAMPLE_FILE]}
_LIST = {"type": "array", "description": "Several sources: a mixture.", "items": {"type": ["string", "object"]}}

Source = Annotated[
    FileSource | PathSource | HubDataset | TaskRows | GameRows | Mixture,
    Field(discriminator="type"),
    written_as(_expand_mixture, lambda whole: [_SHORT, _LIST]),
]


class HashSplit(SpecModel):
    """Hold out rows by a hash of their content: the same row is on the same side in every file, order and format, and
    equal rows are never on both sides."""

    type: Literal["hash"] = "hash"
    eval_fraction: Annotated[float, Field(gt=0, lt=1)]
    """Share of rows to hold out."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the hash."""


class Data(SpecModel):
    """Training rows, and optionally held-out rows."""

    train: Source
    """Training rows. A list of sources is a mixture."""
    eval: Source | None = None
    """Held-out rows for the evaluation; never trained on."""
    split: HashSplit | None = None
    """Hold out a part of `train` instead of using `eval`."""
    streaming: bool = False
    """Read and tokenise the training rows during the run, 10,000 at a time, shuffled among themselves: for files larger
    than memory and cache. Requires training.max_steps, because the number of rows is unknown."""
    rendering: Rendering = ModelTemplate()
    """Conversion of rows to text and tokens. A plain string names a template family."""

    @model_validator(mode="after")
    def _one_eval(self) -> Data:
        if self.eval is not None and self.split is not None:
            raise ValueError("held-out rows come from `eval` or from `split`, not from both")
        return self


def _expand_data(value: Any) -> Any:
    return {"train": value} if isinstance(value, str | list) else value


DataField = Annotated[Data, written_as(_expand_data, lambda whole: [_SHORT, _LIST])]


def singles(source: Source, field: str) -> list[tuple[str, Single]]:
    """The sources that a source is made of, each with its field's path."""
    match source:
        case Mixture():
            return [(f"{field}.sources[{at}].source", one.source) for at, one in enumerate(source.sources)]
        case FileSource() | PathSource() | HubDataset() | TaskRows() | GameRows():
            return [(field, source)]
        case _ as never:
            assert_never(never)


def format_of(source: Source) -> Format:
    """The format of all rows of a source if the spec says it, else `auto`."""
    formats = {one.format for _, one in singles(source, "")}
    return formats.pop() if len(formats) == 1 else "auto"
