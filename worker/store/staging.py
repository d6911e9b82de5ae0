"""What one attempt needs of an object store before it starts: its model, its files, the checkpoint to go on from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, assert_never
from urllib.parse import unquote

from sqlalchemy import select

from core.db.engine import Database
from core.db.tables import File
from core.jobs.kinds import Kind
from core.jobs.lifecycle.claims import Claim
from core.spec.axes.data import FileSource, HubDataset, singles
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, Model, RegistryModel
from core.spec.axes.rollout.models import model_rewards
from core.spec.job import JobSpec
from core.spec.run.chain import ModelChain
from core.spec.run.checkpoint_names import best_step, progress_of
from core.spec.run.folder import ARTIFACTS, CHECKPOINTS, SCORES
from core.spec.run.manifest import MANIFEST
from core.spec.run.model_cache import GGUF, MODELS, REFS, entry_of, is_gguf_key, merged_key
from worker.orders import asks_endpoints, pins_of, resume_point
from worker.store.local_cache import Halted, LocalCache

log = logging.getLogger("eft.worker")

NOWHERE = (-1, 0)
"""The progress of a run without a checkpoint."""


class Staging:
    """Brings the inputs of one attempt onto this box, where they stay until `close`."""

    def __init__(self, copies: LocalCache, claim: Claim) -> None:
        self._copies, self._claim = copies, claim
        self._held: list[str] = []
        self._hold(f"runs/{claim.token.job_id}")

    def close(self) -> None:
        self._copies.release(self._held)
        self._held = []

    def _hold(self, key: str) -> None:
        self._copies.hold(key)
        self._held.append(key)

    def bring(self, database: Database, halted: Halted) -> None:
        """Whatever the store does not have is missed later, by whoever opens it. Raises StoreAway, NoSpace, and what
        `halted` raises."""
        spec = JobSpec.model_validate(self._claim.spec)
        self._handed_back(halted)
        if self._claim.kind == Kind.PREPARE:
            self._hold(MODELS)
            self._known_models(spec, halted)
        else:
            self._model(self._claim.prepared or {}, halted)
            self._files(spec, database, halted)
        if self._claim.kind == Kind.TRAIN:
            self._checkpoints(halted)

    def _handed_back(self, halted: Halted) -> None:
        """The weights of the jobs that this one starts from, and of those whose models score its answers."""
        chains = [pin.chain for pin in pins_of(self._claim).values()]
        chains += [] if self._claim.chain is None else [ModelChain.model_validate(self._claim.chain)]
        for one in (handed for chain in chains for handed in chain.handed_back):
            self._hold(f"runs/{one.job}")
            for file in one.files:
                halted()
                key = f"runs/{one.job}/attempt-{one.attempt}/{ARTIFACTS}/{file.path}"
                self._copies.file(key, file.bytes, file.sha256)

    # -- before a model is prepared: what other boxes have brought to the store already

    def _known_models(self, spec: JobSpec, halted: Halted) -> None:
        self._copies.small(f"{MODELS}/{REFS}")
        data = spec.data
        sources = singles(data.train, "data.train") + ([] if data.eval is None else singles(data.eval, "data.eval"))
        names = [source.id for _, source in sources if isinstance(source, HubDataset)]
        chain, pins = self._claim.chain, pins_of(self._claim)
        models = [(spec.model, None if chain is None else ModelChain.model_validate(chain))]
        for _, name, reward in model_rewards(spec.stage):
            models.append((reward.model, pins[name].chain if name in pins else None))
        for model, made_of in models:
            names += self._known_model(model, made_of, halted)
        for ref in (self._copies.layout.models / REFS).glob("*.json"):
            if any(name in unquote(ref.stem) for name in names):
                for key in self._named(json.loads(ref.read_bytes())):
                    self._copies.folder(key, halted)

    def _known_model(self, named: Model, chain: ModelChain | None, halted: Halted) -> list[str]:
        """Bring what was merged for a model; the names of what it stands on."""
        for number in range(1, len(chain.merges) + 1 if chain is not None else 1):
            assert chain is not None
            part = chain.model_copy(update={"merges": chain.merges[:number], "adapter": None})
            self._copies.folder(f"{MODELS}/{merged_key(part.merged_key)}", halted)
        match chain.root if chain is not None and chain.root is not None else named:
            case HubModel(id=name) | GGUFModel(id=str(name)):
                return [name]
            case GGUFModel() | LocalModel() | JobModel() | RegistryModel():
                return []  # on this box
            case _ as never:
                assert_never(never)

    def _named(self, ref: dict[str, Any]) -> Iterable[str]:
        """Entries of the model cache that a ref leads to."""
        if "key" in ref:
            return [f"{MODELS}/{ref['key']}"]
        if ref.get("sha256"):
            found = [entry.key for entry in self._copies.bucket.tree(f"{MODELS}/{GGUF}")]
            keys = [key.removesuffix(f"/{MANIFEST}") for key in found if key.endswith(f"/{MANIFEST}")]
            return [key for key in keys if is_gguf_key(key.removeprefix(f"{MODELS}/"), ref["sha256"])]
        return []

    # -- before a run

    def _model(self, prepared: dict[str, Any], halted: Halted) -> None:
        models = [prepared, *prepared.get("reward_models", ())]
        paths = [one["model_dir"] for one in models if "model_dir" in one]
        paths += [path for one in prepared.get("datasets", ()) for path in one["paths"]]
        for key in dict.fromkeys(entry for path in paths if (entry := entry_of(path)) is not None):
            self._hold(key)
            self._copies.folder(key, halted)

    def _files(self, spec: JobSpec, database: Database, halted: Halted) -> None:
        data = spec.data
        sources = singles(data.train, "data.train") + ([] if data.eval is None else singles(data.eval, "data.eval"))
        ids = {source.id for _, source in sources if isinstance(source, FileSource)}
        if not ids:
            return
        with database.read() as session:
            rows = session.execute(select(File.id, File.bytes, File.sha256).where(File.id.in_(ids))).all()
        for row in rows:
            halted()
            self._hold(f"files/{row.id}")
            self._copies.file(f"files/{row.id}", row.bytes, row.sha256)

    def _checkpoints(self, halted: Halted) -> None:
        """The furthest one of earlier attempts and of the jobs this is a retry of, unless this box has one as far; the
        weights of the best evaluations that stand beside them; and what endpoints have scored."""
        token = self._claim.token
        runs = {token.job_id: token.attempt - 1}
        runs |= {one["job"]: one["attempts"] for one in self._claim.resume_from if "attempts" in one}
        found: list[tuple[tuple[int, int], int, int, str]] = []
        for age, (job_id, attempts) in enumerate(runs.items()):
            if attempts < 1:
                continue
            self._hold(f"runs/{job_id}")
            if asks_endpoints(self._claim.spec):
                for attempt in range(1, attempts + 1):
                    halted()
                    self._copies.small(f"runs/{job_id}/attempt-{attempt}/{SCORES}")
            for entry in self._copies.bucket.tree(f"runs/{job_id}"):
                parts = PurePosixPath(entry.key).parts
                if len(parts) != 6 or parts[3] != CHECKPOINTS or parts[5] != MANIFEST:
                    continue
                key = str(PurePosixPath(*parts[:5]))
                if (there := progress_of(parts[4])) is not None:
                    found.append((there[:2], -age, there.version, key))
                elif best_step(parts[4]) is not None:
                    self._copies.folder(key, halted)
        here = max(
            (
                local[:2]
                for job_id in runs
                for path in self._copies.layout.job(job_id).glob(f"attempt-*/{CHECKPOINTS}/*")
                if (local := progress_of(path.name)) is not None and (path / MANIFEST).is_file()
            ),
            default=NOWHERE,
        )
        for progress, _, _, key in sorted(found, reverse=True):
            if progress <= here or self._copies.folder(key, halted):
                return
        if here == NOWHERE and (point := resume_point(self._claim, self._copies.layout)) is not None:
            self._resume_point(Path(point.folder), halted)

    def _resume_point(self, folder: Path, halted: Halted) -> None:
        """The checkpoint of another job that this one begins with, and the weights of evaluations beside it."""
        self._hold(f"runs/{folder.parents[2].name}")
        beside = str(folder.parent.relative_to(self._copies.layout.root))
        self._copies.folder(f"{beside}/{folder.name}", halted)
        there = {PurePosixPath(entry.key).parts[4] for entry in self._copies.bucket.tree(beside)}
        for name in sorted(there):
            if best_step(name) is not None:
                self._copies.folder(f"{beside}/{name}", halted)
