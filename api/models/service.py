"""Deleting a model: the rows in one transaction, the files set aside inside it and deleted after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.db.engine import Database
from core.jobs.lifecycle import retention
from core.jobs.lifecycle.registry import entries
from core.jobs.lifecycle.submit import Actor
from core.removal import delete_tree, set_aside
from core.settings import Settings
from core.storage.layout import Layout
from core.storage.store import Store


def delete(
    database: Database, settings: Settings, layout: Layout, store: Store, actor: Actor, model_id: str
) -> dict[str, Any]:
    """Raises NotFound, and Conflict while another job needs the model."""
    aside: list[tuple[Path, Path]] = []
    try:
        with database.write() as session:
            removed = entries.remove(session, actor, model_id)
            folders = [layout.artifacts(removed.job_id, number) / name for number, name in sorted(removed.folders)]
            folders += [layout.job(export) for export in removed.exports]
            if removed.job_id.startswith("upload-"):
                folders = [layout.job(removed.job_id)]
            if not settings.is_remote:
                for folder in folders:
                    if folder.is_dir():
                        aside.append((folder, set_aside(folder, retention.ASIDE)))
    except BaseException:
        for folder, there in aside:  # the transaction failed at its end: the model is still there
            there.rename(folder)
        raise
    for _, there in aside:
        delete_tree(there)
    if settings.is_remote:
        for folder in folders:
            store.discard(str(folder.relative_to(layout.root)))
    return {"id": model_id, "deleted": True, "freed_bytes": removed.bytes}
