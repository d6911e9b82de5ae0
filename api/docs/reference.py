"""`/openapi.json`, and `/docs`: that document as one page of plain HTML, made here: no script, nothing from elsewhere.

Both are made once for the life of the process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from api.auth.policy import PUBLIC, Policy
from api.http.ranges import matches

router = APIRouter(include_in_schema=False, dependencies=[PUBLIC])

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; } h3 { margin: 2rem 0 0; font-size: 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .9em; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; } td { padding: .2rem .75rem .2rem 0; vertical-align: top; }
nav a { display: inline-block; margin-right: 1rem; }
"""


@router.get("/openapi.json")
async def openapi_json(request: Request) -> Response:
    return _made_once(request, "openapi.json", lambda document: JSONResponse(document))


@router.get("/docs")
async def docs(request: Request) -> Response:
    headers = {"content-security-policy": POLICY}
    return _made_once(request, "docs", lambda document: HTMLResponse(page(document), headers=headers))


def _made_once(request: Request, name: str, make: Callable[[dict[str, Any]], Response]) -> Response:
    """The reply, or 304 where the client has it already (If-None-Match)."""
    made: dict[str, Response] = request.app.state.__dict__.setdefault("reference", {})
    if name not in made:
        reply = make(request.app.openapi())
        reply.headers["etag"] = f'"{hashlib.sha256(bytes(reply.body)).hexdigest()}"'
        reply.headers["cache-control"] = "no-cache"
        made[name] = reply
    reply = made[name]
    if matches(request.headers.get("if-none-match"), reply.headers["etag"]):
        return Response(status_code=304, headers={"etag": reply.headers["etag"], "cache-control": "no-cache"})
    return Response(reply.body, headers=dict(reply.headers))


def page(document: dict[str, Any]) -> str:
    info = document["info"]
    sections, links = [], []
    for tag in document.get("tags", []):
        name = str(tag["name"])
        links.append(f'<a href="#{escape(name)}">{escape(name)}</a>')
        operations = [
            _operation(method, path, operation, document)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if name in operation.get("tags", [])
        ]
        sections.append(
            f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(tag["description"])}</p>{"".join(operations)}'
        )
    title = f"{info['title']} {info['version']}"
    links.append('<a href="openapi.json">openapi.json</a>')
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1><p>{escape(info.get('description', ''))}</p><nav>{''.join(links)}</nav>"
        f"{''.join(sections)}</body></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    parts = [
        f"<h3><code>{method.upper()} {escape(path)}</code> {escape(operation.get('summary', ''))}</h3>",
        *(f"<p>{escape(text)}</p>" for text in operation.get("description", "").split("\n\n") if text.strip()),
    ]
    if (policy := operation.get("x-eft-policy")) is not None and policy["key"]:
        needs = Policy.of(policy).words()
        parts.append(f"<p>Needs: {escape(needs)}.</p>")
    rows = [
        f"<tr><td><code>{escape(given['name'])}</code></td><td>{escape(given['in'])}</td>"
        f"<td>{escape(given.get('description', ''))}</td></tr>"
        for given in operation.get("parameters", [])
    ]
    if rows:
        parts.append(f"<table>{''.join(rows)}</table>")
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        for example in _examples(content, document)[:1]:
            parts.append(f"<p>Body, <code>{escape(media)}</code>:</p>{_shown(example)}")
    for status, reply in operation["responses"].items():
        if not status.startswith("2"):
            continue
        for media, content in reply.get("content", {}).items():
            for example in _examples(content, document)[:1]:
                parts.append(f"<p>{escape(status)}, <code>{escape(media)}</code>:</p>{_shown(example)}")
    return "".join(parts)


def _examples(content: dict[str, Any], document: dict[str, Any]) -> list[Any]:
    if "example" in content:
        return [content["example"]]
    if "examples" in content:
        return [entry["value"] for entry in content["examples"].values()]
    schema = content.get("schema", {})
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return list(schema.get("examples", []))


def _shown(example: Any) -> str:
    text = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
    return f"<pre>{escape(text)}</pre>"
