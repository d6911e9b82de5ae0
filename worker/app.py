"""The Celery application: `celery -A worker.app worker`, or `python -m worker`, which is the same.

Celery is the doorbell (docs/architecture.md, principle 2). A task is acknowledged at once and runs in a thread; what
must not be lost is in the database. So: no result backend, no late acknowledgement, no redelivery, no revoking.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from celery import Celery, bootsteps, signals
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

import core
from core import command, logfile, private
from core.errors import EftError
from core.settings import SettingsError, make_root, settings
from worker import messages
from worker.agent.agent import Agent
from worker.attempt.context import DATABASE_AWAY
from worker.preflight import joining
from worker.preflight.node import NotNow, Refused
from worker.upkeep.housekeeping import BrokerAway

QUEUE = "eft"
if Path(__file__).resolve().parent.parent != core.HOME:
    sys.exit(f"`core` comes from {core.HOME}, not from this checkout: start the worker with `python -m worker` there")


class EftCelery(Celery):  # type: ignore[misc]
    """A worker without gossip, mingle and heartbeats however it is started: workers have nothing to say to one another,
    and a node's heartbeat is in the database."""

    @cached_property
    def Worker(self) -> Callable[..., Any]:  # noqa: N802 -- Celery's name
        plain = self.subclass_with_self("celery.apps.worker:Worker")
        quiet = {"without_gossip": True, "without_mingle": True, "without_heartbeat": True}
        return lambda **options: plain(**options | quiet)


messages.install(settings())
app = EftCelery("eft", broker=settings().celery_broker_url, include=["worker.tasks"], set_as_current=True)
app.conf.update(
    worker_pool="threads",
    task_acks_late=False,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    task_ignore_result=True,
    task_publish_retry=False,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options={
        "visibility_timeout": 3600,
        "unacked_restore_interval": 10,
        "unacked_restore_throttle": 1,
        "socket_timeout": 10,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 10,
        "max_retries": 0,  # of one publishing; a consumer reconnects for ever (above)
    },
    task_default_queue=QUEUE,
    task_serializer="json",
    accept_content=["json"],
    worker_hijack_root_logger=True,
    worker_log_format="%(asctime)s %(levelname)s %(name)s: %(message)s",
)

_agent: Agent | None = None


def agent() -> Agent:
    """The agent of this process, once Celery has begun to start a worker."""
    assert _agent is not None, "no worker runs in this process"
    return _agent


def publish(job_id: str) -> None:
    """Ring the bell. Raises BrokerAway."""
    try:
        app.send_task("eft.wake", args=[job_id], retry=False)
    except (OperationalError, RedisError, OSError) as error:
        raise BrokerAway(str(error)) from error


def backlog() -> int:
    """Rings that no worker has heard yet. Raises BrokerAway."""
    try:
        with app.connection_for_write() as connection:
            return int(connection.default_channel.client.llen(QUEUE))
    except (OperationalError, RedisError, OSError) as error:
        raise BrokerAway(str(error)) from error


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
def _prepare(conf: Any, **_: Any) -> None:
    """Find the box's slots before the pool is made: one thread a slot."""
    global _agent
    private.umask()
    if (file := settings().log_file) is not None:
        logfile.keep(file, settings().log_bytes, settings().log_files)
    try:
        joining.check_broker_is_named(settings())
        make_root(settings())
        _agent = Agent(settings())
        joining.check_broker(_agent.site.database, settings())
    except (Refused, EftError) as refusal:
        _leave_unprepared(str(refusal), command.EXIT_NOT_NOW if isinstance(refusal, NotNow) else command.EXIT_CONFIG)
    except SQLAlchemyError as error:
        away = isinstance(error, DATABASE_AWAY)
        _leave_unprepared(command.database_words(error), command.EXIT_NOT_NOW if away else command.EXIT_CONFIG)
    except SettingsError as error:  # it may be a disk that is mounted in a moment: started again
        _leave_unprepared(str(error), command.EXIT_FAILED)
    except OSError as error:
        _leave_unprepared(command.os_words(error), command.EXIT_FAILED)
    except Exception as error:  # a defect: Celery would log it, go on, and fail over there being no agent
        traceback.print_exc()
        _leave_unprepared(f"a defect of eft: {type(error).__name__}: {error}", command.EXIT_FAILED)
    assert _agent is not None
    conf.worker_concurrency = len(_agent.slots)


def _leave_unprepared(words: str, status: int) -> NoReturn:
    print(f"eft worker: {words}", file=sys.stderr, flush=True)
    raise SystemExit(status) from None


@signals.worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _leave(**_: Any) -> None:
    agent().leave()


class AgentStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Starts before the first message is heard; stops after the last, while the pool's threads still hand back."""

    requires = {"celery.worker.components:Pool"}  # noqa: RUF012 -- Celery's interface
    name = "eft.Agent"

    def start(self, parent: Any) -> None:
        try:
            agent().start(publish, backlog)
        except DATABASE_AWAY as error:
            print(f"eft worker: {command.database_words(error)}", file=sys.stderr, flush=True)
            raise SystemExit(command.EXIT_NOT_NOW) from None

    def stop(self, parent: Any) -> None:
        agent().stop()
        # All is handed back; a broker that does not answer must not keep the process from ending.
        last_resort = threading.Timer(10.0, os._exit, args=(0,))
        last_resort.daemon = True
        last_resort.start()

    terminate = stop


app.steps["worker"].add(AgentStep)
