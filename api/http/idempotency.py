"""Idempotency-Keys: a retried POST gets the first answer again, and nothing is done twice.

The row of a key has what was asked, as a hash, and what was answered. Requests are compared as JSON values, so that
white space, the order of fields and YAML in place of JSON make no difference.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from api.errors import BadRequest, Gone
from core.db.tables import IdempotencyKey, Job
from core.errors import EftError
from core.jobs.base.transitions import Actor

_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?")


class IdempotencyKeyReused(EftError):
    """The same key came with another body."""

    code = "idempotency_key_reused"
    status = 422


def checked(key: str) -> str:
    """The key. Raises BadRequest for one that cannot be used."""
    if not _KEY.fullmatch(key):
        raise BadRequest("an Idempotency-Key has 1 to 255 printable ASCII characters", field="idempotency-key")
    return key


def fingerprint(path: str, document: Any) -> str:
    """SHA-256 of the route and the canonical JSON of the body."""
    try:
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # a YAML date, say: refused later, and never the same as a stored one
        canonical = "no JSON"
    return hashlib.sha256(b"\0".join((path.encode(), canonical.encode()))).hexdigest()


def take(session: Session, actor: Actor, key: str, asked: str, status: int = 201) -> bool:
    """Insert the key of a request with this fingerprint. A second request with it waits here for the first one's
    commit, and then gets False."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    taken = session.execute(
        dialect.insert(IdempotencyKey)
        .values(
            project_id=actor.project_id,
            owner_id=actor.user_id,
            key=key,
            request_sha256=asked,
            status=status,
            body={},
        )
        .on_conflict_do_nothing()
        .returning(IdempotencyKey.key)
    ).one_or_none()
    return taken is not None


def keep(session: Session, actor: Actor, key: str, body: dict[str, Any]) -> None:
    """Store the answer to a key that `take` has inserted. A job's spec stands in the job's own row, not here too."""
    body = body | {"spec": None, "submitted": None} if _is_job(body) else body
    whose = (IdempotencyKey.project_id == actor.project_id, IdempotencyKey.key == key)
    session.execute(update(IdempotencyKey).where(*whose).values(body=body))


def known(session: Session, actor: Actor, key: str, *asked: str) -> tuple[int, dict[str, Any]] | None:
    """Status and body of the first answer; None: the key is new. A request may have several fingerprints.

    Raises IdempotencyKeyReused, and Gone where that answer was a job which has been deleted since.
    """
    whose = (IdempotencyKey.project_id == actor.project_id, IdempotencyKey.key == key)
    row = session.execute(select(IdempotencyKey).where(*whose)).scalar_one_or_none()
    if row is None:
        return None
    if row.request_sha256 not in asked:
        words = "this Idempotency-Key came before with another body; take a new key for a new request"
        raise IdempotencyKeyReused(words, field="idempotency-key")
    body = row.body
    if _is_job(body) and body["spec"] is None:
        job = session.get(Job, body["id"])
        if job is None:
            words = f"`{body['id']}`, which this Idempotency-Key made, was deleted; take a new key for a new job"
            raise Gone(words, field="idempotency-key")
        body = body | {"spec": job.spec, "submitted": job.submitted}
    return row.status, body


def _is_job(body: dict[str, Any]) -> bool:
    return str(body.get("id", "")).startswith("job-")
