"""What the API says about models."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from api.http.body import Body
from api.view import view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Artifact
from core.jobs.lifecycle.registry.entries import TAG
from core.jobs.views.models import DescribedModel

_ID, _JOB = "model-01kar3v8x5m2h6n9qst4wyz0bc", "job-01kar3v8x5m2h6n9qst4wyz0bc"
_COMMIT = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
_HUB = {"type": "hub", "id": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "main", "commit": _COMMIT}
_FORMATS: list[dict[str, Any]] = [
    {
        "folder": "adapter",
        "type": "adapter",
        "quantization": None,
        "released": True,
        "reason": None,
        "retention": None,
        "scores": None,
        "bytes": 19560664,
    },
    {
        "folder": "gguf-Q8_0",
        "type": "gguf",
        "quantization": "Q8_0",
        "released": True,
        "reason": None,
        "retention": 0.99947,
        "scores": None,
        "bytes": 144811456,
    },
]
_LINKS = {name: f"/models/{_ID}/{name}" for name in ("files", "lineage", "tags")}
_MODEL: dict[str, Any] = {
    "id": _ID,
    "name": "voice intents",
    "kind": "adapter",
    "job": _JOB,
    "owner": "ada",
    "project": "lab",
    "tags": ["production"],
    "stage": "sft",
    "method": "lora",
    "base": _HUB,
    "parent": None,
    "formats": _FORMATS,
    "evaluation": {"eval_loss": 0.211, "eval_perplexity": 1.235, "eval_exact_match": 0.98},
    "bytes": 164372120,
    "created_at": "2026-11-21T09:25:31.004000Z",
    "links": {"self": f"/models/{_ID}", "job": f"/jobs/{_JOB}", **_LINKS},
}


class FormatView(AttributeDocsModel):
    """One form in which the model is there."""

    folder: str
    """Folder of its files."""
    type: str
    """adapter or model (what was trained), merged, gguf, lm_eval (a score)."""
    quantization: str | None
    """Type of a GGUF file, e.g. `Q8_0`."""
    released: bool
    """False: it could not be made, or has kept too little of the tuning; `reason` says why."""
    reason: str | None
    retention: float | None
    """Share of the tuning that it has kept (docs/exports.md); null for what was trained, and where it is unknown."""
    scores: dict[str, float] | None
    """Scores of a task of lm-eval by metric and filter, e.g. `acc,none`."""
    bytes: int
    """Size of its files; 0: they were not kept."""


class ModelView(AttributeDocsModel):
    """A model of the registry."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MODEL]})
    id: str
    """That of its job, with `model` in place of `job`."""
    name: str | None
    """The name of its job. Several models of one name are versions; the newest is listed first."""
    kind: str
    """adapter, or model: all weights."""
    job: str
    """Job that made it."""
    owner: str
    """Name of the user who submitted the job."""
    project: str
    tags: list[str]
    stage: str
    """What the job trained: sft, dpo …"""
    method: str
    base: dict[str, Any]
    """Model at the beginning of its lineage, as the first job named it, with its commit or hash."""
    parent: str | None
    """Model that it was trained from; null: from `base` itself."""
    formats: list[FormatView]
    evaluation: dict[str, float | None] | None
    """Figures of the weights that were handed back, on the held-out rows; null: none were."""
    bytes: int
    """Size of all its files."""
    created_at: str
    links: dict[str, str]


class ModelPage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [_MODEL], "has_more": False, "next": None}]},
    )
    data: list[ModelView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


class ModelDeleted(AttributeDocsModel):
    """The model is gone; the job that made it stays, with its events, metrics and log."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": _ID, "deleted": True, "freed_bytes": 164372120}]},
    )
    id: str
    deleted: bool
    freed_bytes: int
    """Size of the files that went."""


_FILE: dict[str, Any] = {
    "path": "adapter/adapter_model.safetensors",
    "kind": "adapter",
    "bytes": 19560664,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "url": f"/models/{_ID}/files/adapter/adapter_model.safetensors",
}


class ModelFile(BaseModel):
    """One file of a model."""

    path: str
    kind: str
    bytes: int
    sha256: str
    url: str


class ModelFiles(BaseModel):
    """In the order of their paths."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_FILE]}]})
    data: list[ModelFile]


class TagChange(Body):
    """Tags to add and to remove: letters, digits, `.`, `_`, `-`; at most 64 characters."""

    add: list[str] = Field(default=[], max_length=32)
    remove: list[str] = Field(default=[], max_length=32)


def model_view(model: DescribedModel) -> dict[str, Any]:
    here = f"/models/{model.id}"
    links = {"self": here, "job": f"/jobs/{model.job}"} | {name: f"{here}/{name}" for name in _LINKS}
    return view_of(ModelView, model, links=links)


def file_view(model_id: str, row: Artifact) -> dict[str, Any]:
    return view_of(ModelFile, row, url=f"/models/{model_id}/files/{quote(row.path)}")


def wrong_tag(tags: list[str]) -> str | None:
    """The first that is no tag."""
    return next((one for one in tags if not TAG.fullmatch(one)), None)
