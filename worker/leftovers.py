"""What a child that was killed leaves half-written: a checkpoint may be as large as the memory of a GPU. And the folder
in which the ranks of a job of several found each other."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from core.spec.run.folder import CHECKPOINTS, RANKS, UNFINISHED

log = logging.getLogger("eft.worker")


def clear(folder: Path) -> None:
    """Remove unfinished checkpoints from the run folder of an attempt whose processes are gone. Never raises OSError:
    the next attempt goes on without it, and tries again."""
    for left in [*(folder / CHECKPOINTS).glob(f"{UNFINISHED}*"), *folder.glob(f"{RANKS}*")]:
        try:
            shutil.rmtree(left)
        except FileNotFoundError:
            continue  # somebody else was at it
        except OSError as error:
            log.warning("%s stays: %s", left, error)
