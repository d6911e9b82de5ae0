"""Parts of URL paths made of what callers give: nothing given may lead to another route."""

from __future__ import annotations

import re
from urllib.parse import quote

from eft.errors import UsageFault

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FULL_ID = re.compile(r"[a-z]+-[0-9a-z]{26}")


def identity(text: str, listed_by: str = "`eft ls` and `eft files ls` list them") -> str:
    # An empty one or `..` would ask for something else.
    if not _ID.fullmatch(text):
        raise UsageFault(f"{text!r} is not an id; {listed_by}")
    return text


def is_id(text: str) -> bool:
    """A full id, which means the same object in a year; a name, a beginning and `last` may not."""
    return _FULL_ID.fullmatch(text) is not None


def name(text: str, words: str = "is neither an id nor a name") -> str:
    if not text or text in (".", ".."):
        raise UsageFault(f"{text!r} {words}")
    return quote(text, safe="")


def handle(text: str, listed_by: str) -> str:
    """An id, the beginning of one, a name, or `last`. Raises UsageFault for what is none of them."""
    if not text.strip() or text in (".", "..") or "/" in text or not text.isprintable():
        raise UsageFault(f"{text!r} is neither an id nor a name; {listed_by}")
    return quote(text, safe="")


def job(job_id: str) -> str:
    return f"/jobs/{handle(job_id, '`eft ls` lists them')}"


def checkpoint(job_id: str, checkpoint_id: str) -> str:
    return f"{job(job_id)}/checkpoints/{handle(checkpoint_id, '`eft checkpoints list` lists them')}"


def pipeline(pipeline_id: str) -> str:
    return f"/pipelines/{handle(pipeline_id, '`eft pipelines ls` lists them')}"


def model(model_id: str) -> str:
    return f"/models/{handle(model_id, '`eft models list` lists them')}"


def session(session_id: str) -> str:
    return f"/sessions/{handle(session_id, '`eft sessions list` lists them')}"


def sweep(sweep_id: str) -> str:
    return f"/sweeps/{handle(sweep_id, '`eft sweep ls` lists them')}"


def file(file_id: str) -> str:
    return f"/files/{handle(file_id, '`eft files ls` lists them')}"


def node(node_name: str) -> str:
    return f"/nodes/{name(node_name, 'is not a node; `eft nodes` shows them')}"


def webhook(webhook_id: str) -> str:
    return f"/webhooks/{handle(webhook_id, '`eft webhooks list` lists them')}"
