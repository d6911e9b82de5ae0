"""What this installation is set up with, as far as the queue depends on it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from core.jobs.explain import Desk

if TYPE_CHECKING:
    from api.deps import Installation


def desk(here: Installation) -> Desk:
    settings = here.settings
    return Desk(
        shutil.disk_usage(settings.root).free,
        settings.min_free_bytes,
        settings.fairshare_half_life_hours * 3600.0,
        settings.lease_seconds,
    )
