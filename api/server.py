"""Serve the API on the address of the settings until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import logging.config
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn

from api import joining
from api.app import create_app
from api.context import request_id
from api.events.hub import Hub
from api.http import connections
from core import command, descriptors, health, logfile
from core.errors import EftError
from core.settings import SettingsError, crosses_in_clear, make_root, settings
from core.storage.store import StoreAway

log = logging.getLogger("eft.api")

GRACE_SECONDS = 10
"""For requests under way when the server stops."""


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id.get()
        return True


LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"request_id": {"()": _RequestId}},
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"}},
    "handlers": {
        "stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["request_id"]},
    },
    "root": {"level": "INFO", "handlers": ["stderr"]},
    "loggers": {"alembic": {"level": "WARNING"}},
}


class Server(uvicorn.Server):
    """Tells the hub of a signal: uvicorn waits for open replies, and an event stream would never end by itself."""

    hub: Hub

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(connections.quiet_about_accept)
        await super().startup(sockets)
        connections.listen_longer(self.servers)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.hub.close_soon()


def main() -> None:
    _parser().parse_args()
    if (file := settings().log_file) is not None:
        logfile.keep(file, settings().log_bytes, settings().log_files)
    logging.config.dictConfig(LOGGING)
    open_at_once = descriptors.raise_limit()
    try:
        make_root(settings())
    except SettingsError as error:  # it may be a disk that is mounted in a moment: started again
        print(f"eft api: {error}", file=sys.stderr, flush=True)
        raise SystemExit(command.EXIT_FAILED) from None
    try:
        app = create_app(settings())
        state = app.state.eft
        checks = health.database(state.database)
        for name, check in checks.items():
            if not check.ok:
                log.warning("%s: %s; requests will fail until that is mended", name, check.detail)
        if all(check.ok for check in checks.values()):
            joining.join(state)
    except EftError as error:
        print(f"eft api: {error}", file=sys.stderr, flush=True)
        raise SystemExit(command.EXIT_NOT_NOW if isinstance(error, StoreAway) else command.EXIT_CONFIG) from None
    if (words := crosses_in_clear(settings())) is not None:
        log.warning("%s", words)
    connections.Connection.bounds = connections.ConnectionLimits.within(
        open_at_once,
        settings().max_connections,
        settings().max_connections_per_address,
        settings().trusted_proxies,
    )
    config = uvicorn.Config(
        app,
        http=connections.Connection,
        ws="none",
        backlog=connections.ACCEPTED_AT_ONCE,
        proxy_headers=bool(settings().trusted_proxies),
        forwarded_allow_ips=list(settings().trusted_proxies),
        host=settings().host,
        port=settings().port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=connections.IDLE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = Server(config)
    server.hub = state.hub
    server.run()


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m api",
        description="Serve the API until SIGTERM or SIGINT, on EFT_HOST and EFT_PORT. There are no options: all of it "
        "is settings, from the environment (docs/settings.md).",
        epilog="exit status: 78: starting again will not help before somebody has changed something; 75: it may",
    )
