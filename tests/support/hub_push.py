"""The part of the hub that takes files: repositories, branches, Git LFS and commits, over tests/support/hub.py."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.hub import Handler, Hub, listening

LARGE = 4096
"""Bytes from which a file goes by Git LFS."""


@dataclass
class Written:
    """What was pushed."""

    repositories: dict[str, str] = field(default_factory=dict)
    """Repository → visibility."""
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """`repository@branch` → files."""
    messages: list[str] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 → content."""
    uploads: int = 0
    """Large files that came."""


class PushHandler(Handler):
    written: Written

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        self.hub.seen.append(f"POST {path}")
        if self.hub.secret is not None and self.headers.get("Authorization") != f"Bearer {self.hub.secret}":
            return self.refuse(401, "")
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            there = repo in self.written.repositories
            self.written.repositories.setdefault(repo, asked.get("visibility", "public"))
            self.written.branches.setdefault(f"{repo}@main", {})
            return self.tell({"url": f"{self.hub.url}/{repo}", "name": repo}, 409 if there else 200)
        if path == "/api/validate-yaml":
            return self.tell({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.tell(
                {"transfer": "basic", "objects": [self.wanted(one) for one in json.loads(body)["objects"]]}
            )
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)", path):
            repo, verb, branch = found.groups()
            if verb == "branch":
                self.written.branches.setdefault(f"{repo}@{branch}", {})
                return self.tell({})
            if verb == "preupload":
                return self.tell({"files": [self.mode(one) for one in json.loads(body)["files"]]})
            self.commit(self.written.branches[f"{repo}@{branch}"], [json.loads(line) for line in body.splitlines()])
            oid = hashlib.sha1(body).hexdigest()
            return self.tell({"commitUrl": f"{self.hub.url}/{repo}/commit/{oid}", "commitOid": oid})
        return self.refuse(404, "RepoNotFound")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        if hashlib.sha256(data).hexdigest() != oid:
            return self.refuse(400, "")
        self.written.large[oid] = data
        self.written.uploads += 1
        return self.tell({})

    def wanted(self, one: dict[str, Any]) -> dict[str, Any]:
        """What Git LFS answers for an object: where to put it, or nothing when it is there."""
        known = one["oid"] in self.written.large
        actions = {} if known else {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{one['oid']}"}}}
        return {"oid": one["oid"], "size": one["size"], **actions}

    def mode(self, one: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if one["size"] >= LARGE else "regular"
        return {"path": one["path"], "uploadMode": mode, "shouldIgnore": False}

    def commit(self, files: dict[str, bytes], lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.written.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.written.large[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])

    def tell(self, answer: dict[str, Any], status: int = 200) -> None:
        self.send(json.dumps(answer).encode(), {"Content-Type": "application/json"}, body=True, status=status)


@contextmanager
def taking() -> Iterator[tuple[Hub, Written]]:
    """The server; `Hub.url` goes into HF_ENDPOINT."""
    written = Written()
    with listening(type("BoundPushHandler", (PushHandler,), {"written": written})) as hub:
        yield hub, written
