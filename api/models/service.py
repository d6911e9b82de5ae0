"""Deleting a model: the rows in one transaction, the files set aside inside it and deleted after it."""

from __future__ import annotations

from typing import Any

from core.db.engine import Database
from core.jobs.lifecycle import retention
from core.jobs.lifecycle.registry import entries
from core.jobs.lifecycle.submit import Actor
from core.removal import removing
from core.settings import Settings
from core.storage.layout import Layout
from core.storage.store import Store


def delete(
    database: Database, settings: Settings, layout: Layout, store: Store, actor: Actor, model_id: str
) -> dict[str, Any]:
    """Raises NotFound, and Conflict while another job needs the model."""
    with removing(retention.ASIDE) as set_aside, database.write() as session:
        removed = entries.remove(session, actor, model_id)
        folders = [layout.artifacts(removed.job_id, number) / name for number, name in sorted(removed.folders)]
        folders += [layout.job(export) for export in removed.exports]
        if removed.job_id.startswith("upload-"):
            folders = [layout.job(removed.job_id)]
        for folder in () if settings.is_remote else folders:
            set_aside(folder)
    if settings.is_remote:
        for folder in folders:
            store.discard(str(folder.relative_to(layout.root)))
    return {"id": model_id, "deleted": True, "freed_bytes": removed.bytes}
