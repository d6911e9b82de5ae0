"""What schemathesis loads (SCHEMATHESIS_HOOKS): every request has a good key, also after a request has revoked it.

Some requests revoke keys, disable users and take rights away: that is what they are for. A request that
is refused for its key says nothing of its route, so the next one comes with a new key, made on the box.
"""

from __future__ import annotations

import ast
import json
import os
import threading
from typing import Any

import schemathesis

from api.auth import keys
from core.db.engine import Database

_parse, _parsing = ast.parse, threading.RLock()


def _parse_alone(*args: Any, **named: Any) -> Any:
    """Run ast.parse in one thread at a time. CPython 3.11 counts the depth of all threads together, and raises
    SystemError when hypothesis reads the source of a lambda in two of schemathesis's threads at once."""
    with _parsing:
        return _parse(*args, **named)


ast.parse = _parse_alone  # type: ignore[assignment]

_lock = threading.Lock()
_database = Database(os.environ["EFT_DATABASE_URL"])
_key = ""


def _good_key() -> str:
    global _key
    with _lock:
        if not _key:
            made = keys.create(_database, project="fuzz", user="fuzz", name="fuzz", box_admin=True)
            assert made is not None
            _key = made
        return _key


@schemathesis.serializer("application/jsonl", "application/x-ndjson", "application/vnd.apache.parquet", "text/csv")
def as_bytes(context: Any, value: Any) -> bytes:
    """Of a file: what was made up, as it is."""
    return value if isinstance(value, bytes) else json.dumps(value, default=str).encode(errors="replace")


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if "wait" in (case.query or {}):  # a preview that no worker does is waited for up to a minute
        case.query["wait"] = case.query["wait"] if str(case.query["wait"]).startswith(("-", "n")) else 0
    if not case.path.startswith(("/healthz", "/readyz", "/version")):
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {_good_key()}"}


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    global _key
    if response.status_code in (401, 403):
        with _lock:
            _key = ""
