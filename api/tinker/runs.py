"""What was trained and saved, as Tinker's SDK lists it."""

from __future__ import annotations

import hashlib
import json
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from api.tinker import bases, door
from api.tinker.door import ADAPTER, Door
from api.tinker.forms import bodies
from core.db.tables import SessionSave
from core.errors import NotFound, SpecError
from core.jobs.lifecycle.sessions import copies, records, saves
from core.jobs.lifecycle.sessions.records import FoundSession
from core.jobs.lifecycle.sessions.saves import Saved
from core.jobs.policies.volume import VolumeLimits

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
MOST = 1000


def weights_info(of: Door, path: str) -> dict[str, Any]:
    """Base and shape of saved weights. Raises NotFound."""
    found, row = of.saved(path)
    return {
        "base_model": door.base_model(found),
        "is_lora": True,
        "lora_rank": _rank_in(of.folder(found.row.id, row.folder)),
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }


def rank(of: Door, found: FoundSession) -> int | None:
    """Rank of a model's adapter, as it was made or loaded; None where that has gone since."""
    try:
        _, first, _ = of.sessions.look(of.actor, found.row.id, 1)
    except NotFound:
        return None  # it was opened a moment ago
    if first.operation["op"] == "load":
        folder = Path(first.operation["folder"])
        return _rank_in(folder) if folder.is_dir() else None
    return int(first.operation["method"]["r"])


def _rank_in(folder: Path) -> int:
    return int(json.loads((folder / "adapter_config.json").read_bytes())["r"])


def training_runs(of: Door, offset: int, limit: int) -> dict[str, Any]:
    with of.app.database.read() as session:
        found, count = records.matching(session, of.actor, door.RUNS, offset=offset, limit=limit)
    told = [training_run(of, one) for one in found]
    return {"training_runs": told, "cursor": {"offset": offset, "limit": limit, "total_count": count}}


def training_run(of: Door, found: FoundSession) -> dict[str, Any]:
    """A TrainingRun."""
    with of.app.database.read() as session:
        saved, _ = saves.page(session, of.actor, found.row.id, limit=MOST)
    last = {kind: next((_checkpoint(of, found, one) for one in saved if one.row.kind == kind), None) for kind in TYPES}
    return {
        "training_run_id": door.model_id(found),
        "base_model": door.base_model(found),
        "model_owner": found.row.owner_id,
        "is_lora": True,
        "lora_rank": rank(of, found),
        "corrupted": found.status == "failed",
        "last_request_time": _time(found.row.used_at),
        "last_checkpoint": last["weights"],
        "last_sampler_checkpoint": last["sampler_weights"],
        "user_metadata": {k: v for k, v in found.row.spec.get("metadata", {}).items() if k != bases.SHOWN} or None,
    }


def checkpoints(of: Door, model_id: str | None, offset: int, limit: int) -> dict[str, Any]:
    """What a model has saved, or all models of the project."""
    hosts: dict[str, FoundSession] = {}
    only = None if model_id is None else of.run(model_id).row.id
    with of.app.database.read() as session:
        rows, count = saves.page(session, of.actor, only, offset=offset, limit=limit)
        for one in rows:
            if one.row.session_id not in hosts:
                hosts[one.row.session_id] = records.find(session, of.actor, one.row.session_id)
    told = [_checkpoint(of, hosts[one.row.session_id], one) for one in rows]
    return {"checkpoints": told, "cursor": {"offset": offset, "limit": limit, "total_count": count}}


def expire(of: Door, model_id: str, kind: str, label: str, ttl_seconds: float | None) -> None:
    """Let saved weights be gone so many seconds from now; None: never. Raises NotFound."""
    _, row = of.saved_as(model_id, kind, label)
    with of.app.database.write() as session:
        saves.expire(session, of.actor, row, ttl_seconds)


def publish(of: Door, model_id: str, kind: str, label: str, wanted: bool) -> None:
    """Let all projects of the box read saved weights, or no others any more. Raises NotFound."""
    _, row = of.saved_as(model_id, kind, label)
    with of.app.database.write() as session:
        saves.publish(session, of.actor, row, wanted)


def sessions(of: Door, offset: int, limit: int) -> dict[str, Any]:
    with of.app.database.read() as session:
        found, _ = records.matching(session, of.actor, door.ALL, offset=offset, limit=limit)
    return {"sessions": list(dict.fromkeys(door.parts(one)[0] for one in found))}


def session(of: Door, session_id: str) -> dict[str, Any]:
    """Its models and samplers. Raises NotFound for one that has made none."""
    with of.app.database.read() as open_session:
        found = records.beginning(open_session, of.actor, door.named(session_id, ""))
    if not found:
        raise NotFound("there is no such session in this project, or it has made no model", field="session_id")
    samplers = [one for one in found if door.parts(one)[1].startswith("s")]
    return {
        "training_run_ids": [door.model_id(one) for one in found if one not in samplers],
        "sampler_ids": [one.row.id for one in samplers],
    }


def copy(of: Door, source: Door, wish: bodies.CopyWish, once: str) -> str:
    """Tinker's path of a copy that belongs to the project of `of`, made of what `source` may read. The same `once`
    again is the same copy. Raises NotFound, SpecError, Conflict."""
    found, row = source.saved(wish.source_path)
    if wish.session_id is not None:
        if not door.SESSION.fullmatch(wish.session_id) or wish.model_seq_id is None:
            words = "a copy of a session needs a `session_id` that `create_session` made, and a `model_seq_id`"
            raise SpecError(words, field="session_id", code="invalid_value")
        name = door.named(wish.session_id, f"m{wish.model_seq_id}")
    else:
        asked = f"{of.actor.project_id}/{once}/{wish.source_path}" if once else secrets.token_hex(16)
        name = door.named(hashlib.sha256(asked.encode()).hexdigest()[:32], "m0")
    base = bases.of_session(found.row.spec)
    document = {"name": name, "model": base.model, "metadata": {bases.SHOWN: base.shown}}
    spec, job = of.sessions.checked(of.actor, document)
    bounds = VolumeLimits.of(of.app.settings)
    with of.app.database.write() as session:
        made, saved = copies.write(
            session,
            of.actor,
            of.app.layout,
            spec,
            job,
            row,
            model=ADAPTER,
            ttl_seconds=wish.ttl_seconds,
            bounds=bounds,
        )
        return door.tinker_path(made, saved)


def _checkpoint(of: Door, found: FoundSession, saved: Saved) -> dict[str, Any]:
    row: SessionSave = saved.row
    folder = of.folder(row.session_id, row.folder)
    return {
        "checkpoint_id": f"{row.kind}/{row.label}",
        "checkpoint_type": TYPES[row.kind],
        "time": _time(saved.done_at),
        "tinker_path": door.tinker_path(found, row),
        "size_bytes": sum(path.stat().st_size for path in folder.glob("*") if path.is_file()),
        "public": row.published_at is not None,
        "user_metadata": row.about or None,
        "expires_at": None if row.expires_at is None else _time(row.expires_at),
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()
