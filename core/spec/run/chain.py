"""What a job starts from whose model is another job: pinned by hashes when it is submitted, for all its attempts."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field

from core.spec.axes.model import SourceModel
from core.spec.axes.quantization import FrozenFormat
from core.spec.base import SpecModel


class WeightFile(SpecModel):
    """A file that a job has handed back."""

    path: str
    """Below the artifacts folder of the attempt."""
    bytes: int
    """Size of the file."""
    sha256: str
    """Hash of the file, in hexadecimal."""


class HandedBack(SpecModel):
    """The weights that a job has handed back, with the tokenizer beside them."""

    job: str
    """Id of the job."""
    attempt: int
    """Attempt whose artifacts they are."""
    folder: Literal["adapter", "model"]
    """Folder below the artifacts."""
    files: list[WeightFile]
    """All files of that folder."""
    quantization: FrozenFormat | None = Field(default=None)
    """Format of the weights over which an adapter was trained; it is merged onto these."""

    @property
    def packing(self) -> dict[str, Any] | None:
        return None if self.quantization is None else self.quantization.model_dump(mode="json")

    @property
    def sha256(self) -> str:
        """SHA-256 over names and hashes of the files that hold weights or say how to read them."""
        lines = "".join(f"{one.sha256}  {one.path}\n" for one in sorted(self.files, key=lambda one: one.path))
        return hashlib.sha256(lines.encode()).hexdigest()


class ModelChain(SpecModel):
    """A base model, adapters that are merged into it one after the other, and one that is trained further."""

    root: SourceModel | None = Field(default=None)
    """The base model, pinned to the commit that it was trained at; null: it is `weights`."""
    root_source: dict[str, Any] = Field(default_factory=dict)
    """Source of `root` as it was prepared for the first job of the chain."""
    weights: HandedBack | None = None
    """All parameters, where a job has trained them."""
    merges: list[HandedBack] = Field(default=[])
    """Adapters that are merged into the weights, in this order."""
    adapter: HandedBack | None = None
    """Adapter that is trained further."""

    @property
    def handed_back(self) -> list[HandedBack]:
        """All that the job needs of other jobs."""
        ends = [one for one in (self.weights, self.adapter) if one is not None]
        return [*ends, *self.merges]

    @property
    def newest(self) -> HandedBack | None:
        """What the newest job of the chain has handed back."""
        return self.adapter or (self.merges[-1] if self.merges else self.weights)

    @property
    def jobs(self) -> list[str]:
        """Ids of the jobs whose weights are needed."""
        return sorted({one.job for one in self.handed_back})

    @property
    def merged_key(self) -> str:
        """Name of the merged model in the cache: what it is made of, and nothing else."""
        made_of = {
            "root": None if self.root is None else self.root.model_dump(mode="json"),
            "source": self.root_source,
            "weights": None if self.weights is None else self.weights.sha256,
            "merges": [(one.sha256, one.packing) for one in self.merges],
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


class RewardModelPin(SpecModel):
    """A job's model that scores the answers of another one."""

    reward: str
    """Name of the reward."""
    field: str
    """Where the job names the model."""
    chain: ModelChain
    """What it is made of; its `adapter` has the head."""
    spec: dict[str, Any]
    """The job that trained it, with what `method: auto` came to: how its rows were rendered, and its weights packed."""
    lineage: list[dict[str, Any]]
    """The job that trained it and the jobs behind that one, nearest first."""
