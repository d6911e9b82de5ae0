"""What an answer means, whichever client asked: errors, and how long to wait before asking again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import httpx

from eft.errors import ApiError, EftClientError, Fault, Unreachable

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
            return error.retry_after
    elif not isinstance(error, Unreachable):
        return None
    return delay * random.uniform(0.75, 1.25)  # noqa: S311 -- no secret hangs on it


def api_error(response: httpx.Response) -> ApiError:
    """The one error shape; words of our own when something that is not eft answered. The body has been read."""
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
