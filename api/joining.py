"""The API's side of what holds an installation together: the mark on its data root, and the words of its jobs."""

from __future__ import annotations

from api.deps import AppState
from core import __version__
from core.health import HealthCheck
from core.jobs import installation
from core.jobs.installation import OtherDataRoot
from core.storage.layout import HalfRestored
from core.storage.store import StoreAway


def join(app: AppState) -> None:
    """Raises OtherDataRoot, HalfRestored or StoreAway, or what a database says that is away or not migrated."""
    installation.check_data_root(app.database, app.store, f"the API on {app.settings.node}")
    installation.announce(app.database, __version__)


def data_root(app: AppState) -> HealthCheck:
    """For /readyz, once the database is known to answer: it is the one that all see, and can be reached."""
    try:
        join(app)
    except (OtherDataRoot, HalfRestored, StoreAway) as error:
        return HealthCheck(False, error.message)
    return HealthCheck(True, app.store.where)
