"""What is sent: signed JSON after Standard Webhooks (https://www.standardwebhooks.com), or one line for a chat."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, Literal, assert_never

from api.view import iso
from core.base.addresses import parse
from core.db.tables import Delivery
from core.jobs.base.deliveries import PIPELINE_EVENTS, SWEEP_EVENTS, TEST

Kind = Literal["standard", "chat"]
DISCORD = ("discord.com", "discordapp.com")
MOST_CHARACTERS = 500
"""Longest chat message, characters; Discord takes 2000."""
TIMES = ("created_at", "started_at", "finished_at")


def new_secret() -> str:
    """24 random bytes, as the standard writes them."""
    return "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()


def sign(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """`v1,` and the HMAC-SHA256 of id, time and body."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def valid(kept: Iterable[Mapping[str, Any]], now: float) -> list[str]:
    """The secrets that sign now, the newest first."""
    return [one["secret"] for one in kept if one["until"] is None or one["until"] > now]


def message(
    kind: Kind, url: str, delivery: Delivery, signing: Iterable[str], timestamp: int, site: str
) -> tuple[dict[str, str], bytes]:
    """Headers and body of one attempt. The body is the same in all of them."""
    headers = {"content-type": "application/json", "user-agent": "eft-webhooks"}
    match kind:
        case "standard":
            body = _dumps(document(delivery, site))
            headers |= {
                "webhook-id": delivery.id,
                "webhook-timestamp": str(timestamp),
                "webhook-signature": " ".join(sign(secret, delivery.id, timestamp, body) for secret in signing),
            }
        case "chat":
            body = _dumps(chat(url, line(delivery, site)))
        case _ as never:
            assert_never(never)
    return headers, body


def document(delivery: Delivery, site: str) -> dict[str, Any]:
    """The signed body: type, timestamp, data."""
    data = {name: iso(value) if name in TIMES else value for name, value in delivery.data.items()}
    if delivery.job_id is not None:
        data["url"] = f"{site}/jobs/{delivery.job_id}"
    elif delivery.type in (*PIPELINE_EVENTS, *SWEEP_EVENTS):
        data["url"] = f"{site}/{delivery.type.partition('.')[0]}s/{data['id']}"
    return {"type": delivery.type, "timestamp": iso(delivery.created_at), "data": data}


def line(delivery: Delivery, site: str) -> str:
    """For people: what became of which job, why, and where to look."""
    data = delivery.data
    if delivery.type == TEST:
        return f"eft: a test of the webhook {_plain(data['name'])}"
    name = f"{_plain(data['name'])} ({data['id']})" if data["name"] else data["id"]
    kind, _, word = delivery.type.partition(".")
    reason = _plain(data["reason"])
    text = f"{name} {word}" + (f": {reason}" if reason and reason != word else "")
    return f"{text[:MOST_CHARACTERS]} {site}/{kind}s/{data['id']}"


def chat(url: str, text: str) -> dict[str, Any]:
    """Slack's and Mattermost's form; Discord's for Discord (its `…/slack` takes Slack's)."""
    target = parse(url)
    if target.host.lower().removeprefix("canary.").removeprefix("ptb.") in DISCORD and not target.path.endswith(
        "/slack"
    ):
        return {"content": text, "allowed_mentions": {"parse": []}}
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def _plain(text: str) -> str:
    """Render one line without mentions (`@all`)."""
    return " ".join(text.split()).replace("@", "@\u200b")


def _dumps(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
