"""Requests that survive a restart of the server, and errors that say what the server said."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from eft.config import Config
from eft.errors import ApiError, EftClientError, Fault, Unreachable

Param = str | int | float | bool | Sequence[str] | None
Params = Mapping[str, Param]
T = TypeVar("T")

BUSY = frozenset({429, 502, 503, 504})
"""Answers that mean: not now. Everything else is final."""
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0


class Transport:
    """One HTTP connection pool. Not for use by several threads at once."""

    def __init__(self, config: Config, *, timeout: float, patience: float, user_agent: str) -> None:
        self.config = config
        self.patience = patience
        self._persisting = False
        """Inside `persist`: whoever called it tries again, with a patience of their own."""
        headers = {"User-Agent": user_agent}
        if config.api_key:
            headers["Authorization"] = f"Bearer {config.api_key}"
        # Redirects are not followed: the key must not travel to another address. Loopback needs no proxy.
        self._http = httpx.Client(
            base_url=config.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            trust_env=not config.loopback,
        )

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

        Raises ApiError for an error answer, Unreachable when none came within `patience` seconds.
        """

        def once() -> httpx.Response:
            with self.stream(
                method, path, params=params, content=content, files=files, headers=headers, timeout=timeout
            ) as r:
                r.read()
                return r

        return self.persist(once) if idempotent and not self._persisting else once()

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
        accept: frozenset[int] = frozenset(),
    ) -> Generator[httpx.Response, None, None]:
        """One try, the answer's body unread. Error answers raise ApiError, except the statuses in `accept`.

        `timeout` is the longest silence in seconds.
        """
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
                if not response.is_success and response.status_code not in accept:
                    response.read()
                    raise api_error(response)
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
            outer, self._persisting = self._persisting, True
            try:
                return attempt()
            except EftClientError as error:
                pause = backoff(error, delay)
                if pause is None or time.monotonic() + pause > deadline:
                    raise
                if on_gap is not None:
                    on_gap(error)
            finally:
                self._persisting = outer
            time.sleep(pause)
            delay = min(delay * 2, LONGEST_DELAY)


def backoff(error: EftClientError, delay: float) -> float | None:
    """Seconds to wait before the next try (with jitter, so that clients do not come back in step); None: do not try."""
    if isinstance(error, ApiError):
        if error.status not in BUSY:
            return None
        if error.retry_after is not None:
            return error.retry_after
    elif not isinstance(error, Unreachable):
        return None
    return delay * random.uniform(0.75, 1.25)  # noqa: S311 -- no secret hangs on it


def api_error(response: httpx.Response) -> ApiError:
    """The one error shape; words of our own when something that is not eft answered."""
    request_id = response.headers.get("x-request-id")
    after = response.headers.get("retry-after", "")
    retry_after = min(float(after), 60.0) if after.isdigit() else None
    try:
        body = response.json()["error"]
        return ApiError(
            str(body["message"]),
            status=response.status_code,
            code=str(body["code"]),
            field=body.get("field"),
            faults=tuple(Fault(str(f["code"]), str(f["message"]), f.get("field")) for f in body.get("faults") or ()),
            request_id=body.get("request_id") or request_id,
            retry_after=retry_after,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not an answer of eft: a proxy's page, another service on that port.
        words = " ".join(response.text.split())[:200] or response.reason_phrase
        return ApiError(
            f"{response.request.url.host} answered {response.status_code}: {words}",
            status=response.status_code,
            code=f"http_{response.status_code}",
            request_id=request_id,
            retry_after=retry_after,
        )
