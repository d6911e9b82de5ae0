"""The data axis: where rows come from and how they are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from core.spec.base import SpecModel, short_form
from core.spec.model import LocalPath

FORMATS = ("messages", "prompt_completion", "instruction", "text")
"""Row formats the trainer can render; `auto` is settled from the rows themselves, never guessed."""

Format = Literal["auto", "messages", "prompt_completion", "instruction", "text"]
FileId = Annotated[str, StringConstraints(pattern=r"^file-[0-9a-z]{26}$")]


class FileSource(SpecModel):
    """A file uploaded with `POST /files`."""

    type: Literal["file"] = "file"
    id: FileId
    """As `POST /files` answered."""
    format: Format = "auto"
    """What a row is: chat `messages`, `prompt`/`completion`, `instruction`/`input`/`output`, or `text`."""


class PathSource(SpecModel):
    """A JSONL file on the worker, below one of the roots the administrator allows."""

    type: Literal["path"] = "path"
    path: LocalPath
    """Full path of the file."""
    format: Format = "auto"
    """As for an uploaded file."""


def _expand_source(value: str) -> dict[str, Any]:
    return {"type": "file", "id": value} if value.startswith("file-") else {"type": "path", "path": value}


Source = Annotated[
    FileSource | PathSource, Field(discriminator="type"), short_form(_expand_source, "file-01kar3v8x5m2h6n9qst4wyz0bc")
]


class Data(SpecModel):
    """What to train on, and optionally what to hold out."""

    train: Source
    """Training rows."""
    eval: Source | None = None
    """Held-out rows for the evaluation; never trained on."""


DataField = Annotated[Data, short_form(lambda value: {"train": value}, "file-01kar3v8x5m2h6n9qst4wyz0bc")]
