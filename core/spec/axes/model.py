"""The model axis: where the base model comes from. Resolved to a local folder before a GPU is held."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from core.spec.base import SpecModel, short_form

HubId = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?$"),
]
Revision = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,119}$")]
_OWN_ID = re.compile("(job|model)-[0-9a-z]{26}")
Handle = Annotated[str, StringConstraints(min_length=1, max_length=300, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""An id, the beginning of one, a name, or `last`; the resolved job has the full id."""
LocalPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]


class HubModel(SpecModel):
    """A model on the Hugging Face hub. Only safetensors are read, and no code of the model is run."""

    type: Literal["hub"] = "hub"
    id: HubId
    """Repository id, e.g. `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    revision: Revision = "main"
    """Branch, tag or commit. Pinned to a commit when the job is prepared; the run record names that commit."""


class LocalModel(SpecModel):
    """A folder in Hugging Face format on the worker, below one of the allowed roots."""

    type: Literal["local"] = "local"
    path: LocalPath
    """Full path of the folder."""


class GGUFModel(SpecModel):
    """One GGUF file, converted once to a Hugging Face folder: a local file or a file of a hub repository."""

    type: Literal["gguf"] = "gguf"
    path: LocalPath | None = None
    """Local file, below an allowed root."""
    id: HubId | None = None
    """Hub repository that holds the file."""
    file: LocalPath | None = None
    """File name inside the hub repository."""
    revision: Revision = "main"
    """Branch, tag or commit of that repository."""

    @model_validator(mode="after")
    def _one_source(self) -> GGUFModel:
        local, hub = self.path is not None, self.id is not None or self.file is not None
        if local == hub or (hub and (self.id is None or self.file is None)):
            raise ValueError("a gguf model needs either `path` (a local file) or both `id` and `file` (on the hub)")
        return self


UseOfAdapter = Literal["continue", "merge"] | None


class JobModel(SpecModel):
    """The model that another job of the project has trained (docs/pipelines.md). The job must have succeeded."""

    type: Literal["job"] = "job"
    id: Handle
    """Id of that job, e.g. `job-01kar3v8x5m2h6n9qst4wyz0bc`, the beginning of its id, its name, or `last`, your newest.
    The resolved job has the full id."""
    adapter: UseOfAdapter = Field(default=None)
    """Use of the adapter that the job has trained: `continue` trains it further over the same base model, `merge` adds
    it to the weights first and trains a new adapter, or all parameters. Default: `continue` with a method that trains
    an adapter, otherwise `merge`. Null for a job that trained all parameters."""


class RegistryModel(SpecModel):
    """A model of the project's registry (docs/models.md). The resolved job names the job that made it."""

    type: Literal["registry"] = "registry"
    id: Handle
    """Id of the model, e.g. `model-01kar3v8x5m2h6n9qst4wyz0bc`, the beginning of its id, its name, or `last`."""
    adapter: UseOfAdapter = Field(default=None)
    """Use of the model's adapter, as of the model of a job."""


def short_model(value: str) -> dict[str, Any]:
    """A model that is named by one string."""
    if found := _OWN_ID.fullmatch(value):
        return {"type": "job" if found[1] == "job" else "registry", "id": value}
    if value.endswith(".gguf"):
        return {"type": "gguf", "path": value}
    if value.startswith(("/", "./", "../", "~")):
        return {"type": "local", "path": value}
    name, at, revision = value.partition("@")
    return {"type": "hub", "id": name} | ({"revision": revision} if at else {})


SourceModel = HubModel | LocalModel | GGUFModel
"""Models that no job of this installation has made."""
Model = Annotated[
    SourceModel | JobModel | RegistryModel,
    Field(discriminator="type"),
    short_form(short_model, "HuggingFaceTB/SmolLM2-135M-Instruct"),
]
