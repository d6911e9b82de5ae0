"""The origin of a job's weights: hashes of data, spec, chat template and code, and the same of the jobs before it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.db.tables import Artifact, Attempt, Job
from core.jobs.admission.auto_method import effective


def of_job(session: Session, job: Job) -> list[dict[str, Any]]:
    """The job itself, then the jobs that its model is made of, nearest first."""
    return [entry(session, job), *(job.lineage or [])]


def entry(session: Session, job: Job) -> dict[str, Any]:
    """One generation; null for values that no attempt has reported yet."""
    spec = effective(job.spec, job.settled, job.adjusted or {})
    record = _record(session, job)
    data = record.get("data") or {}
    environment = record.get("environment") or {}
    weights = {
        row.path: row.sha256
        for row in session.execute(select(Artifact.path, Artifact.sha256).where(Artifact.job_id == job.id))
        if row.path.startswith(("adapter/", "model/")) and row.path.endswith((".safetensors", "_config.json"))
    }
    return {
        "job": job.id,
        "name": job.name,
        "pipeline": job.pipeline_id,
        "stage": spec.stage.type,
        "method": spec.method.type,
        "model": _model(job, record),
        "spec_sha256": _hash(job.spec),
        "data": {"train": _data(data.get("train")), "eval": _data(data.get("eval"))},
        "template_sha256": (data.get("rendering") or {}).get("template_sha256"),
        "code": {"eft": (environment.get("versions") or {}).get("eft"), "sha256": record.get("code")},
        "checkpoint": None,
        "reward_models": [
            {"reward": one["reward"], "job": one["lineage"][0]["job"], "weights": one["lineage"][0]["weights"]}
            for one in job.reward_models or []
        ],
        "weights": weights,
    }


def _record(session: Session, job: Job) -> dict[str, Any]:
    """The run record of the attempt whose weights were handed back, else of the newest that wrote one."""
    handed = session.execute(select(func.max(Artifact.attempt)).where(Artifact.job_id == job.id)).scalar_one()
    query = select(Attempt.run_record).where(Attempt.job_id == job.id, Attempt.run_record.is_not(None))
    if handed is not None:
        query = query.where(Attempt.attempt == handed)
    found = session.execute(query.order_by(Attempt.attempt.desc()).limit(1)).scalar_one_or_none()
    return found or {}


def _model(job: Job, record: dict[str, Any]) -> dict[str, Any]:
    """How the job names its model, and what that was."""
    source = record.get("model") or (job.prepared or {}).get("source") or {}
    shown = {name: source[name] for name in ("commit", "sha256") if name in source}
    if job.chain is not None:
        return {"spec": job.spec["model"], **shown, "jobs": sorted({one["job"] for one in _handed(job.chain)})}
    return {"spec": job.spec["model"], **shown}


def _handed(chain: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in (chain["weights"], chain["adapter"], *chain["merges"]) if one is not None]


def _data(told: dict[str, Any] | None) -> list[str]:
    """SHA-256 of every file, in the order in which they are read."""
    if told is None:
        return []
    return [digest for source in told.get("sources") or [told] for digest in _hashes(source.get("sha256"))]


def _hashes(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _hash(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
