"""What comes through the broker and is no message of ours is dropped: a shared Redis has other writers.

kombu's channel raises what decoding raises, which ends the worker. A lost ring costs nothing: the housekeeper rings
again while a job waits.
"""

from __future__ import annotations

import logging
from queue import Empty
from typing import Any

from kombu.transport import redis

log = logging.getLogger("eft.worker")


class Channel(redis.Channel):
    """kombu's, without an end at what it cannot read."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            log.warning("something that is no message was in the queue, and is dropped: %r", error)
            raise Empty from error


def install() -> None:
    """For every connection of this process: a URL `redis+socket://` leaves no other place to name a transport."""
    redis.Transport.Channel = Channel
