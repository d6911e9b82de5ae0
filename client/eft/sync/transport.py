# Written by client/unasync.py from ../aio/transport.py: change that one.
"""Requests that survive a restart of the server, and errors that say what the server said."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import httpx

from eft.config import Config
from eft.errors import ConfigError, EftClientError, Unreachable
from eft.http.responses import FIRST_DELAY, LONGEST_DELAY, Params, api_error, backoff, document_of, not_eft
from eft.sync import io

T = TypeVar("T")

_persisting: ContextVar[bool] = ContextVar("persisting", default=False)
"""Inside `persist`: whoever called it tries again, with a patience of their own."""


class Transport:
    """One HTTP connection pool, for any number of tasks or threads."""

    def __init__(self, config: Config, *, timeout: float, patience: float, user_agent: str) -> None:
        self.config = config
        self.patience = patience
        headers = {"User-Agent": user_agent}
        if config.api_key:
            headers["Authorization"] = f"Bearer {config.api_key}"
        # Redirects are not followed: the key must not travel to another address. Loopback needs no proxy, and over http
        # no certificates either: to read those of all authorities takes a sixth of a command's processor time.
        plain = config.loopback and config.url.startswith("http:")
        try:
            self._http = httpx.Client(
                base_url=config.url,
                headers=headers,
                timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
                trust_env=not config.loopback,
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True,  # trusts nobody
            )
        except (httpx.InvalidURL, ValueError) as error:  # of the address, or of a proxy's in the environment
            raise ConfigError(
                f"{config.url} cannot be asked: {error}; check EFT_URL, HTTP_PROXY and HTTPS_PROXY"
            ) from error

    def close(self) -> None:
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        content: bytes | None = None,
        files: Any = None,
        headers: Mapping[str, str] | None = None,
        idempotent: bool = True,
        timeout: float | None = None,
    ) -> httpx.Response:
        """Send and read all of the answer. Idempotent requests are sent again while the server is away.

        Raises ApiError for an error answer, Unreachable when none came within `patience` seconds, NotEft.
        """

        def once() -> httpx.Response:
            with self.stream(
                method, path, params=params, content=content, files=files, headers=headers, timeout=timeout
            ) as response:
                response.read()
                if response.headers.get("content-type", "").startswith("text/html"):
                    raise not_eft(response)
                return response

        return self.persist(once) if idempotent and not _persisting.get() else once()

    def json(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        idempotent: bool | None = None,
    ) -> Any:
        """The answer's document. Unless `idempotent` says otherwise, a POST is sent once: whether it was done is not
        known when its answer is lost."""
        content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        typed = {} if body is None else {"Content-Type": "application/json"}
        again = method != "POST" if idempotent is None else idempotent
        answer = self.request(
            method, path, params=params, content=content, headers={**typed, **(headers or {})}, idempotent=again
        )
        return document_of(answer)

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        content: bytes | None = None,
        files: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[httpx.Response]:
        """One try, the answer's body unread. Error answers raise ApiError. `timeout`: longest silence in seconds."""
        given: Any = {key: value for key, value in (params or {}).items() if value is not None}
        try:
            with self._http.stream(
                method,
                path,
                params=given or None,
                content=content,
                files=files,
                headers=dict(headers or {}),
                timeout=httpx.USE_CLIENT_DEFAULT if timeout is None else httpx.Timeout(timeout, connect=10.0),
            ) as response:
                if not response.is_success:
                    response.read()
                    raise api_error(response, self.config)
                yield response
        except httpx.TransportError as error:
            words = str(error) or type(error).__name__
            raise Unreachable(
                f"no answer from {self.config.url}: {words}; is the server up, and EFT_URL right?"
            ) from error
        except (httpx.DecodingError, httpx.InvalidURL) as error:
            raise Unreachable(f"{self.config.url} did not answer in HTTP that can be read: {error}") from error

    def persist(
        self,
        attempt: Callable[[], T],
        patience: float | None = None,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> T:
        """Call `attempt` until it answers, the error is final, or the server was away for `patience` seconds."""
        patience = self.patience if patience is None else patience
        deadline = time.monotonic() + patience
        delay = FIRST_DELAY
        while True:
            before = _persisting.set(True)
            try:
                return attempt()
            except EftClientError as error:
                pause = backoff(error, delay)
                if pause is None or time.monotonic() + pause > deadline:
                    raise
                if on_gap is not None:
                    on_gap(error)
            finally:
                _persisting.reset(before)
            io.sleep(pause)
            delay = min(delay * 2, LONGEST_DELAY)
