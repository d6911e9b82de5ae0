"""Sessions of browsers. A session is a row of `api_keys`, made with the key that signed in: it acts for the same user,
allows no more, is listed and revoked beside the keys, and ends with that key. Its secret is only ever in a cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from api.auth import families, service
from api.auth.policy import Principal, Right, Scope
from core.db.engine import db_now, read_now
from core.db.tables import ApiKey
from core.errors import Forbidden, Unauthorized
from core.jobs.policies import audit
from core.settings import Settings

COOKIE = "eft_session"
TOKEN_HEADER = "x-csrf-token"  # noqa: S105
TOKEN_FIELD = "csrf"  # noqa: S105
MOST = 20
"""Sessions of one user in one project; the oldest ends when another begins."""

_BROWSERS = (("Firefox", "Firefox/"), ("Edge", "Edg/"), ("Chrome", "Chrome/"), ("Safari", "Safari/"))
_SYSTEMS = (("Android", "Android"), ("iOS", "iPhone"), ("iPadOS", "iPad"), ("Windows", "Windows"), ("macOS", "Mac OS"))


def begin(session: Session, principal: Principal, user_agent: str, settings: Settings) -> tuple[str, float]:
    """Make a session with the API key that asks; the cookie's value, and when it ends at the latest.

    Raises Unauthorized where that key ended just now; Forbidden for a key that opens nothing but metrics.
    """
    if principal.scope is Scope.METRICS:
        raise Forbidden("a key of scope `metrics` opens no page: use another key of yours", code="missing_scope")
    query = select(ApiKey.revoked_at).where(ApiKey.id == principal.key_id).with_for_update()
    if session.execute(query).scalar_one() is not None:
        raise Unauthorized("this API key is not known here or has been revoked")
    now = read_now(session)
    until = now + settings.session_hours * 3600
    if principal.expires_at is not None:
        until = min(until, principal.expires_at)
    open_ones = (
        select(ApiKey.id)
        .where(
            ApiKey.owner_id == principal.user_id,
            ApiKey.project_id == principal.project_id,
            ApiKey.session_until.is_not(None),
            ApiKey.revoked_at.is_(None),
            ApiKey.expires_at > db_now(),
        )
        .order_by(ApiKey.id.desc())
    )
    for old in list(session.execute(open_ones).scalars())[MOST - 1 :]:
        families.end(session, principal, old)
    secret, row = service.create(
        session,
        user_id=principal.user_id,
        project_id=principal.project_id,
        name=browser(user_agent),
        scope=principal.scope,
        expires_at=min(now + settings.session_idle_hours * 3600, until),
        created_by=principal.user_id,
        made_with=principal.key_id,
        rights=principal.rights - {Right.SELF_ROTATE},
        session_until=until,
    )
    told = {"name": row.name, "prefix": row.prefix, "user": principal.user_name, "session_until": until}
    audit.record(session, principal, "session.begin", row.id, told, project_id=principal.project_id)
    return secret, until


def end(session: Session, principal: Principal) -> None:
    """Sign out."""
    assert principal.session and principal.key_id is not None
    families.end(session, principal, principal.key_id)


def prolong(session: Session, key_id: str, used_at: float, idle_seconds: float) -> None:
    """Move the end of a session that was used at `used_at` (Unix seconds); API keys and ended sessions stay as they
    are."""
    row = session.execute(
        select(ApiKey.session_until, ApiKey.expires_at).where(
            ApiKey.id == key_id, ApiKey.session_until.is_not(None), ApiKey.expires_at > db_now()
        )
    ).one_or_none()
    if row is None:
        return
    later = min(used_at + idle_seconds, row.session_until)
    session.execute(
        update(ApiKey)
        .where(ApiKey.id == key_id, ApiKey.expires_at < later)
        .values(expires_at=later)
        .execution_options(synchronize_session=False)
    )


def token(secret: str) -> str:
    """What a request that changes something carries beside the cookie: another site can make a browser send the one,
    but cannot read the other."""
    return hmac.new(secret.encode(), b"eft csrf", hashlib.sha256).hexdigest()


def check_token(secret: str, given: str | None) -> None:
    """Raises Forbidden unless `given` is the token of this session."""
    if given is None or not hmac.compare_digest(given.encode(), token(secret).encode()):
        raise Forbidden(
            f"a change by a signed-in browser needs the page's token (`{TOKEN_HEADER}`): load the page again",
            code="missing_csrf_token",
        )


def browser(user_agent: str) -> str:
    """The name of a session: `browser: Firefox on Linux`."""
    program = next((name for name, word in _BROWSERS if word in user_agent), "unknown")
    system = next((name for name, word in _SYSTEMS if word in user_agent), None)
    if system is None and re.search(r"\bLinux\b|\bX11\b", user_agent):
        system = "Linux"
    return f"browser: {program}" + ("" if system is None else f" on {system}")
