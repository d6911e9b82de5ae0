"""What an answer means, whichever client asked: errors, and how long to wait before asking again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from eft.config import Config
from eft.errors import ApiError, EftClientError, Fault, NotEft, Unreachable

Param = str | int | float | bool | Sequence[str] | None
Params = Mapping[str, Param]

BUSY = frozenset({429, 502, 503, 504})
"""Answers that mean: not now. Everything else is final."""
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0
"""Seconds between two tries."""


def backoff(error: EftClientError, delay: float) -> float | None:
    """Seconds to wait before the next try (with jitter, so that clients do not come back in step); None: do not try."""
    if isinstance(error, ApiError):
        if error.status not in BUSY:
            return None
        if error.retry_after is not None:
            return max(error.retry_after, FIRST_DELAY)
    elif not isinstance(error, Unreachable):
        return None
    return delay * random.uniform(0.75, 1.25)  # noqa: S311 -- no secret hangs on it


PROXYS = frozenset({*range(300, 400), 401, 403, 407, 408, 411, 413, 414, 421, 429, 431, *range(500, 600)})
"""Answers that a proxy in front of the service gives in its own words."""


def api_error(response: httpx.Response, config: Config) -> EftClientError:
    """The one error shape; words of our own when something that is not eft answered. The body has been read."""
    request_id = response.headers.get("x-request-id")
    after = response.headers.get("retry-after", "")
    retry_after = min(float(after), 60.0) if after.isdecimal() else None
    try:
        body = response.json()["error"]
        message = str(body["message"])
        if body["code"] == "missing_api_key":
            message = without_key(config)
        return ApiError(
            message,
            status=response.status_code,
            code=str(body["code"]),
            field=body.get("field"),
            faults=tuple(Fault(str(f["code"]), str(f["message"]), f.get("field")) for f in body.get("faults") or ()),
            request_id=body.get("request_id") or request_id,
            retry_after=retry_after,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        # Not an answer of eft: a proxy's page, another service on that port.
        if response.status_code not in PROXYS:
            return not_eft(response)
        words = " ".join(response.text.split())[:200] or response.reason_phrase
        return ApiError(
            f"{response.request.url.host} answered {response.status_code}: {words}",
            status=response.status_code,
            code=f"http_{response.status_code}",
            request_id=request_id,
            retry_after=retry_after,
        )


def without_key(config: Config) -> str:
    """What to do about a request that went without a key."""
    words = f"no API key for {config.url}: `eft login --url {config.url}` asks for one and keeps it, or set EFT_API_KEY"
    return (
        words if config.login is None else f"{words}. The key that is kept is for {config.login}, and goes there only"
    )


def document_of(response: httpx.Response) -> dict[str, Any]:
    """The body of an answer that is not an error. Raises NotEft."""
    try:
        document = response.json()
    except ValueError as error:  # also of bytes that are no text
        raise not_eft(response) from error
    if not isinstance(document, dict):
        raise not_eft(response)
    return document


def not_eft(response: httpx.Response) -> NotEft:
    """For an answer that is not of this API. Its text is not told: it may be a login page."""
    address = f"{response.request.url.scheme}://{response.request.url.netloc.decode()}"
    kind = response.headers.get("content-type", "") or "no content type"
    return NotEft(
        f"{address} answered {response.status_code}, but not as eft does ({kind}): another service, or a proxy that "
        "wants a login? Is EFT_URL right?"
    )
