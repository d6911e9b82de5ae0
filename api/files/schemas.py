"""What the API says about files."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api.view import view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import File

_ID = "file-01kar3v8x5m2h6n9qst4wyz0bc"
_FILE: dict[str, Any] = {
    "id": _ID,
    "filename": "train.jsonl",
    "bytes": 10472,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "rows": 84,
    "format": "messages",
    "report": {
        "container": "jsonl",
        "rows": 84,
        "format": "messages",
        "columns": {},
        "ignored_columns": [],
        "fault_count": 0,
        "faults": [],
        "notices": [],
    },
    "created_at": "2026-11-21T09:20:55.004000Z",
    "links": {"self": f"/files/{_ID}", "content": f"/files/{_ID}/content"},
}


class FileReportView(AttributeDocsModel):
    """What was found in a file that was taken."""

    container: str
    """jsonl, json, csv or parquet: told by its bytes."""
    rows: int
    format: str
    columns: dict[str, str]
    """The mapping it was uploaded with; jobs that train on it need not say it again."""
    ignored_columns: list[str] = Field(default_factory=list)
    """Columns of the file that no row is trained on, by their own names."""
    fault_count: int
    faults: list[Any]
    """Empty: a file with faults is refused with them."""
    notices: list[Any]
    """What is not wrong, but to be known, such as cells that look like formulas."""


class FileView(AttributeDocsModel):
    """An uploaded, checked file."""

    model_config = ConfigDict(json_schema_extra={"examples": [_FILE]})
    id: str
    filename: str
    """As it was named by whoever sent it."""
    bytes: int
    sha256: str
    rows: int
    format: str
    """What its rows are: messages, sharegpt, instruction, prompt_completion, text, preference, kto, prompt."""
    report: FileReportView | None
    """Null for a file of an earlier version."""
    created_at: str
    links: dict[str, str]


class FilePage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [_FILE], "has_more": False, "next": None}]},
    )
    data: list[FileView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


class FileDeleted(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"id": _ID, "deleted": True}]})
    id: str
    deleted: bool


def file_view(file: File) -> dict[str, Any]:
    return view_of(FileView, file, links={"self": f"/files/{file.id}", "content": f"/files/{file.id}/content"})
