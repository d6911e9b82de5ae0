"""Every POST may carry an Idempotency-Key: asked again with the same key and the same request, it answers the same and
does nothing twice. The key is taken, the work done and the answer kept in one transaction, so a refusal uses no key up.

A secret in an answer (a new API key, a webhook's secret) is kept sealed by the API key that asked, which the database
does not have: whoever reads the database reads no secret, and the same caller gets the same answer again.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.deps import AppState
from api.http import idempotency
from core.errors import Conflict
from core.jobs.base.transitions import Actor

Body = dict[str, Any]
_SEALED = "sealed:"


@dataclass(frozen=True, slots=True)
class Once:
    """The Idempotency-Key of a request, if it has one."""

    key: str | None
    of: str
    """Path and query of the request."""
    token: bytes
    """The API key that asks; it seals what the answer holds of secrets."""

    def fingerprint(self, document: Any) -> str:
        return idempotency.fingerprint(self.of, document)


async def _once(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(description="The same key with the same request again: the same answer, and nothing is done twice."),
    ] = None,
) -> Once:
    key = None if idempotency_key is None else idempotency.checked(idempotency_key)
    query = "&".join(sorted(f"{name}={value}" for name, value in request.query_params.multi_items()))
    return Once(key, f"{request.url.path}?{query}", request.headers.get("authorization", "").encode("latin-1"))


Asked = Annotated[Once, Depends(_once)]


def earlier(
    app: AppState, principal: Actor, once: Once, document: Any, *, secret: str | None = None
) -> Response | None:
    """The answer that was given before, for routes that do something outside of the transaction first."""
    if once.key is None:
        return None
    with app.database.read() as session:
        return _earlier(session, principal, once, document, secret)


def answer(
    app: AppState,
    principal: Actor,
    once: Once,
    document: Any,
    work: Callable[[Session], Body],
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
    secret: str | None = None,
) -> Response:
    """Do `work` in a transaction and answer with what it returns; or the answer of before, and nothing is done.

    `document` is the body of the request. `secret` names the field of the answer that is one.
    """
    with app.database.write() as session:
        if once.key is None:
            return _reply(work(session), status, headers)
        found = _earlier(session, principal, once, document, secret)
        if found is None and not idempotency.take(session, principal, once.key, once.fingerprint(document), status):
            found = _earlier(session, principal, once, document, secret)
            assert found is not None  # the row that kept us from taking the key
        if found is not None:
            return found
        body = work(session)
        kept = body
        if secret is not None and isinstance(body[secret], str):
            kept = body | {secret: _seal(body[secret], once)}
        idempotency.keep(session, principal, once.key, kept)
        return _reply(body, status, headers)


def _earlier(session: Session, principal: Actor, once: Once, document: Any, secret: str | None) -> Response | None:
    assert once.key is not None
    known = idempotency.known(session, principal, once.key, once.fingerprint(document))
    if known is None:
        return None
    status, body = known
    if secret is not None and isinstance(body[secret], str):
        body = body | {secret: _open(body[secret], once)}
    return _reply(
        body, status, {"idempotency-replayed": "true", **({} if secret is None else {"cache-control": "no-store"})}
    )


def _reply(body: Body, status: int, headers: dict[str, str] | None) -> Response:
    """Made before the commit: what cannot be said is not done."""
    place = {"location": body["links"]["self"]} if status in (201, 202) and "links" in body else {}
    return JSONResponse(body, status, headers={**place, **(headers or {})})


def _stream(once: Once, nonce: bytes, length: int) -> bytes:
    """HMAC-SHA256 in counter mode, under the API key: 238 random bits that the database does not have."""
    blocks = (length + 31) // 32
    made = b"".join(
        hmac.digest(once.token, b"eft answer" + nonce + number.to_bytes(4, "big"), "sha256") for number in range(blocks)
    )
    return made[:length]


def _tag(once: Once, nonce: bytes, covered: bytes) -> bytes:
    return hmac.digest(once.token, b"eft tag" + nonce + covered, "sha256")[:16]


def _seal(text: str, once: Once) -> str:
    nonce, plain = secrets.token_bytes(16), text.encode()
    covered = bytes(a ^ b for a, b in zip(plain, _stream(once, nonce, len(plain)), strict=True))
    return _SEALED + (nonce + _tag(once, nonce, covered) + covered).hex()


def _open(sealed: str, once: Once) -> str:
    """Raises Conflict where another API key asked."""
    raw = bytes.fromhex(sealed.removeprefix(_SEALED))
    nonce, tag, covered = raw[:16], raw[16:32], raw[32:]
    if not hmac.compare_digest(tag, _tag(once, nonce, covered)):
        raise Conflict(
            "this was done with another API key, and the secret in the answer is shown to that key alone: revoke what "
            "was made, or take a new Idempotency-Key",
            code="shown_to_another_key",
            field="idempotency-key",
        )
    return bytes(a ^ b for a, b in zip(covered, _stream(once, nonce, len(covered)), strict=True)).decode()
