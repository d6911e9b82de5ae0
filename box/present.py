"""Whether there is an installation where the settings say: asked before anything is opened, which would make files."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import make_url

from core.settings import Settings


def absent(settings: Settings) -> str | None:
    """Why there is none, in words with the way out; None: there may be one."""
    url = make_url(settings.sqlalchemy_url)
    nowhere = f"there is no installation at {settings.root}; EFT_DATA names where it is"
    if not settings.root.is_dir():
        return f"{nowhere}, and `eft up` makes one"
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).is_file()):
        return f"{nowhere}: {url.database or 'its database'} is missing"
    return None
