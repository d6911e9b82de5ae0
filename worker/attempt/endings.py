"""How an attempt ends without a word of its child: it could not be started, or this worker failed."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from core.errors import EftError
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Failed, NoRoom, Outcome
from worker import orders

log = logging.getLogger("eft.worker")


class NotStarted(Exception):
    """No child was started; this is the outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@contextmanager
def starting(claim: Claim) -> Iterator[None]:
    """Raises NotStarted for whatever keeps a child from being started."""
    try:
        yield
    except orders.ModelGone as error:
        raise NotStarted(Failed("machine", error.code, error.message, prepare_again=True)) from error
    except EftError as error:
        raise NotStarted(Failed("user", error.code, error.message, error.field)) from error
    except ValidationError as error:
        log.error("spec of %s: %s", claim.label, error)
        words = "this version cannot read the job's spec; submit it again"
        raise NotStarted(Failed("internal", "stale_spec", words)) from error
    except OSError as error:
        words = f"the process could not be started: {error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotStarted(NoRoom(words)) from error
        raise NotStarted(Failed("machine", "spawn_failed", words)) from error


def defect(error: Exception) -> Failed:
    """In words that cannot fail themselves: what `error` says may be what cannot be written."""
    return Failed("internal", "worker_error", f"the worker failed: {type(error).__name__}; see its log")
