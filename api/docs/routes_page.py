"""docs/api.md, every route with what it needs: `python -m api.docs.routes_page` writes it from the OpenAPI document."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from api.app import create_app
from api.auth.policy import Policy
from core import HOME
from core.settings import Settings

PAGE = HOME / "docs" / "api.md"
TOPICS = {
    "jobs": "Jobs",
    "pipelines": "Pipelines",
    "sweeps": "Sweeps",
    "sessions": "Sessions",
    "serving": "Serving",
    "models": "Models",
    "files": "Training data",
    "queue": "Queue, GPUs, quotas",
    "nodes": "Nodes",
    "webhooks": "Webhooks",
    "access": "Keys, users, projects, audit",
    "service": "The service itself",
}
HEAD = """\
# The HTTP API

Generated from the OpenAPI document by `make docs`. A running service provides that document at `/openapi.json`, with
every field of every request and response, and as a page at `/docs`.

| | |
|---|---|
| Address and key | `Authorization: Bearer eft_…`; the clients read them from `EFT_URL` and `EFT_API_KEY` |
| Bodies | JSON; a job also as YAML (`Content-Type: application/yaml`); files as `multipart/form-data` |
| Errors | `{"error": {"code", "message", "field", "faults", "request_id"}}`; [codes](troubleshooting.md) |
| Retries | the same `POST` with the same `Idempotency-Key` takes effect once and returns the same response |
| Lists | newest first, in pages: repeat the request with `after` = `next` of the response while there is one |
| Times | ISO 8601, UTC |
| Too many requests | 429 with `Retry-After` |

[security.md](security.md) explains roles and scopes: a key may do what both its scope and its user's role allow.
*Needs* names the minimum; `box` is the scope of an admin of the box."""


def page() -> str:
    """The whole page. Raises KeyError for a route of a topic that TOPICS does not have."""
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, dict[str, dict[str, Any]]] = create_app(Settings(data=folder)).openapi()["paths"]
    rows: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for path, methods in paths.items():
        for method, operation in methods.items():
            rows[operation["tags"][0]].append(_row(method.upper(), path, operation))
    return "\n".join([HEAD, *_sections(rows)]) + "\n"


def _sections(rows: dict[str, list[str]]) -> Iterator[str]:
    for topic, title in TOPICS.items():
        yield from ("", f"## {title}", "", "| route | needs | |", "|---|---|---|", *rows[topic])


def _row(method: str, path: str, operation: dict[str, Any]) -> str:
    first = operation["description"].split("\n\n")[0]
    words = " ".join(first.split()).replace("|", "\\|")
    return (
        f"| `{method} {path}` | {_needs(Policy.of(operation['x-eft-policy']))} | **{operation['summary']}.** {words} |"
    )


def _needs(policy: Policy) -> str:
    if policy.scope is None:
        return "no key"
    if policy.box == "only":
        return f"admin of the box, `{policy.scope.value}`"
    who = "anybody" if policy.role is None else policy.role.value
    return f"{who}, `{policy.scope.value}`" + ("; or `box`" if policy.box == "also" else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m api.docs.routes_page", description=f"Write docs/{PAGE.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when it is stale")
    if parser.parse_args().check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        sys.exit(0 if fresh else f"{PAGE} is stale: run `python -m api.docs.routes_page`")
    PAGE.write_text(page(), encoding="utf-8")
