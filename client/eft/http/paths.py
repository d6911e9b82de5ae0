"""Parts of URL paths made of what callers give: nothing given may lead to another route."""

from __future__ import annotations

import re
from urllib.parse import quote

from eft.errors import UsageFault

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def identity(text: str, listed_by: str = "`eft ls` and `eft files ls` list them") -> str:
    # An empty one or `..` would ask for something else.
    if not _ID.fullmatch(text):
        raise UsageFault(f"{text!r} is not an id; {listed_by}")
    return text


def name(text: str, words: str = "is neither an id nor a name") -> str:
    if not text or text in (".", ".."):
        raise UsageFault(f"{text!r} {words}")
    return quote(text, safe="")


def job(job_id: str) -> str:
    return f"/jobs/{identity(job_id)}"


def pipeline(pipeline_id: str) -> str:
    return f"/pipelines/{identity(pipeline_id, '`eft pipelines ls` lists them')}"


def file(file_id: str) -> str:
    return f"/files/{identity(file_id)}"


def node(node_name: str) -> str:
    return f"/nodes/{name(node_name, 'is not a node; `eft nodes` shows them')}"


def webhook(webhook_id: str) -> str:
    return f"/webhooks/{identity(webhook_id, '`eft webhooks list` and `eft webhooks deliveries` list them')}"
