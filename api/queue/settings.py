"""What this installation is set up with, as far as the queue depends on it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from core.jobs.policies import budget
from core.jobs.policies.budget import Budget
from core.jobs.views.explain import QueueSettings

if TYPE_CHECKING:
    from api.deps import AppState


def queue_settings(app: AppState) -> QueueSettings:
    settings = app.settings
    limits = Budget.of(settings)
    free = shutil.disk_usage(settings.root).free
    with app.database.read() as session:
        room = budget.room(session, limits, free, settings.min_free_bytes)
    return QueueSettings(
        free=room.left + settings.min_free_bytes,
        reserve=settings.min_free_bytes,
        half_life=settings.fairshare_half_life_hours * 3600.0,
        silent_after=settings.lease_seconds,
        over=room.over,
        budget=limits,
        leave_seconds=settings.stop_grace_seconds + settings.gpu_clear_seconds,
    )
