"""What a request costs: `python -m bench.api [--db sqlite postgresql] [--runs N] [--seconds S]`.

POST /jobs and GET /jobs/{id} with 8 clients, each asking again as soon as it is answered, against a bare FastAPI
application that inserts and reads one row (bench/peer.py), in turn on the same machine: requests per second, and the
median and the 99th percentile of what a client waits. PostgreSQL is a server of this process with its default
durability, unless EFT_TEST_POSTGRES_URL names one. No rate limit, as nobody else is there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from api.auth import keys
from bench.report import compare, finish, show
from bench.server import Load, Server, load, server
from core.db import migrate
from core.db.engine import Database
from tests.support import postgres

CLIENTS = 8


def urls(kinds: list[str], folder: Path, stack: ExitStack) -> dict[str, tuple[str, str]]:
    """For each kind of database one for us and one for the peer."""
    found: dict[str, tuple[str, str]] = {}
    for kind in kinds:
        if kind == "sqlite":
            found[kind] = (f"sqlite:///{folder / 'ours.db'}", f"sqlite:///{folder / 'peer.db'}")
        else:
            make = stack.enter_context(postgres.databases("-c", "fsync=on"))
            found[kind] = (make(), make())
    return found


def our_server(url: str, folder: Path, stack: ExitStack) -> tuple[Server, dict[str, str], str]:
    """Our API, the headers of a key, and the id of an uploaded file."""
    database = Database(url)
    migrate.upgrade(database)
    key = keys.create(database, project="bench", user="bench", name="bench")
    database.dispose()
    ours = stack.enter_context(started(url, folder))
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return ours, headers, _upload(ours, headers)


def started(url: str, folder: Path) -> AbstractContextManager[Server]:
    """Our API over a database that is there."""
    environment = {
        "EFT_DATA": str(folder / "data"),
        "EFT_DATABASE_URL": url,
        "EFT_RATE_PER_MINUTE": "0",
        "EFT_MIN_FREE_BYTES": "0",
    }
    return server("api", environment, folder / "api.log")


def _upload(ours: Server, headers: dict[str, str]) -> str:
    rows = b"".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}).encode() + b"\n" for n in range(32))
    more = {"Authorization": headers["Authorization"], "Content-Type": "application/octet-stream"}
    return str(_json(ours, "POST", "/files?filename=rows.jsonl", rows, more)["id"])


def _json(target: Server, method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
    connection.request(method, path, body, headers)
    reply = connection.getresponse()
    text = reply.read()
    if reply.status not in (200, 201):
        raise SystemExit(f"{method} {path}: {reply.status} {text!r}")
    found: dict[str, Any] = json.loads(text)
    return found


def measure(ours: Callable[[], Load], peer: Callable[[], Load], runs: int, name: str) -> dict[str, dict[str, Any]]:
    """In turn, order swapped every time; the first pair only warms up."""
    mine, theirs = [], []
    for run in range(runs + 1):
        pair = [ours(), peer()] if run % 2 == 0 else [peer(), ours()][::-1]
        if run:
            mine.append(pair[0])
            theirs.append(pair[1])
    results = {}
    for figure, unit in (("per_second", "/s"), ("p50", "s"), ("p99", "s")):
        key = f"{name}_{figure}"
        results[key] = compare([getattr(r, figure) for r in mine], [getattr(r, figure) for r in theirs])
        show(key, results[key], unit)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--db", nargs="+", choices=("sqlite", "postgresql"), default=["sqlite", "postgresql"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="eft-bench-") as name, ExitStack() as outer:
        folder = Path(name)
        for kind, (our_url, peer_url) in urls(options.db, folder, outer).items():
            with ExitStack() as stack:
                ours, headers, file_id = our_server(our_url, folder, stack)
                environment = {"EFT_DATA": str(folder / "data"), "EFT_DATABASE_URL": peer_url}
                peer = stack.enter_context(server("bench.peer", environment, folder / "peer.log"))
                spec = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": file_id, "training": {"max_steps": 4}}
                body = json.dumps(spec).encode()
                made = [(target, _json(target, "POST", "/jobs", body, headers)["id"]) for target in (ours, peer)]
                posts = [_asking(target, options.seconds, "POST", "/jobs", body, headers) for target, _ in made]
                gets = [_asking(target, options.seconds, "GET", f"/jobs/{id}", b"", headers) for target, id in made]
                results |= measure(posts[0], posts[1], options.runs, f"post_jobs_{kind}_{CLIENTS}_clients")
                results |= measure(gets[0], gets[1], options.runs, f"get_job_{kind}_{CLIENTS}_clients")
    finish(results)


def _asking(
    target: Server, seconds: float, method: str, path: str, body: bytes, headers: dict[str, str]
) -> Callable[[], Load]:
    return lambda: load(target, CLIENTS, seconds, lambda: (method, path, body, headers))


if __name__ == "__main__":
    main()
