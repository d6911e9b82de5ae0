"""Opens the store that the settings name."""

from __future__ import annotations

from core.settings import Settings
from core.storage.store import Folder, Store


def open_store(settings: Settings) -> Store:
    """The store that these settings name. Raises EftError where EFT_DATA names an object store that cannot be used."""
    if not settings.is_remote:
        return Folder(settings.root)
    from core.storage.bucket import Bucket  # imports an S3 library that few installations have

    return Bucket(settings)
