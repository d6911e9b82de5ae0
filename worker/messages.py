"""Celery's connection to the broker: foreign messages are dropped, and an absent broker is named by its setting.

A shared Redis has other writers. kombu's channel raises what decoding raises, which ends the worker. A lost ring costs
nothing: the housekeeper rings again while a job waits.
"""

from __future__ import annotations

import logging
from queue import Empty
from typing import Any

from celery.worker.consumer import consumer
from kombu.transport import redis

from core.settings import Settings

log = logging.getLogger("eft.worker")


class Channel(redis.Channel):
    """kombu's, without an end at what it cannot read."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            log.warning("dropped something from the queue that is not a message: %r", error)
            raise Empty from error


def broker_place(settings: Settings) -> str:
    """The broker as its setting names it."""
    return "the broker at EFT_BROKER_URL" if settings.broker_url else "the embedded broker (EFT_BROKER_URL is not set)"


def install(settings: Settings) -> None:
    """Set up every connection of this process: a URL `redis+socket://` leaves no other place to name a transport."""
    redis.Transport.Channel = Channel
    consumer.CONNECTION_ERROR = f"{broker_place(settings)} cannot be reached, %s: %s\n%s"
