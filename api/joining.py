"""The API's side of what holds an installation together: the mark on its data root, and the words of its jobs."""

from __future__ import annotations

from api.deps import Installation
from core import __version__
from core.health import Check
from core.jobs import installation
from core.jobs.installation import OtherDataRoot
from core.storage.layout import HalfRestored
from core.storage.store import StoreAway


def join(here: Installation) -> None:
    """Raises OtherDataRoot, HalfRestored or StoreAway, or what a database says that is away or not migrated."""
    installation.check_data_root(here.database, here.store, f"the API on {here.settings.node}")
    installation.announce(here.database, __version__)


def data_root(here: Installation) -> Check:
    """For /readyz, once the database is known to answer: it is the one that all see, and can be reached."""
    try:
        join(here)
    except (OtherDataRoot, HalfRestored, StoreAway) as error:
        return Check(False, error.message)
    return Check(True, here.store.where)
