"""A real HTTP server that speaks the part of the hub that huggingface_hub uses, and can misbehave on the way."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "a" * 40
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FIRST, SECOND = SHARDS


def safetensors(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """The format written by hand: fp32 ones."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in tensors.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + struct.pack("<f", 1.0) * (position // 4)


def tiny_model() -> dict[str, bytes]:
    """A Llama of twice 128 k parameters in two shards, and the clutter real repositories have."""
    first, second = {"model.embed_tokens.weight": (1000, 128)}, {"lm_head.weight": (1000, 128)}
    index = dict.fromkeys(first, SHARDS[0]) | dict.fromkeys(second, SHARDS[1])
    return {
        "config.json": json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": index}).encode(),
        SHARDS[0]: safetensors(first),
        SHARDS[1]: safetensors(second),
        "consolidated.safetensors": safetensors({"everything.again": (10, 10)}),
        "README.md": b"# never read",
        "pytorch_model.bin": b"\x80\x04pickle",
        "modeling_evil.py": b"raise SystemExit('code of the model ran')",
        "tokenizer_evil.py": b"raise SystemExit('code of the model ran')",
        "original/model.safetensors": b"not at the top",
    }


@dataclass
class Hub:
    """What the server has, what goes wrong on the way, and what it was asked."""

    repo: str = "team/tiny"
    kind: str = "model"
    """model or dataset."""
    card: dict[str, Any] = field(default_factory=dict)
    """Metadata of a data set's card."""
    files: dict[str, bytes] = field(default_factory=tiny_model)
    commit: str = COMMIT
    sha256: dict[str, str] = field(default_factory=dict)
    """Hashes it states for large files (Git LFS)."""
    gated: bool = False
    secret: str | None = None
    """The token without which it shows nothing."""
    broken: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    """File → bytes after which its connection is dropped, once."""
    trickle: str | None = None
    """File of which only the first half comes, while the client waits."""
    flowing: threading.Event = field(default_factory=threading.Event)
    seen: list[str] = field(default_factory=list)
    url: str = ""

    def asked(self, name: str) -> list[str]:
        return [line for line in self.seen if line.split()[1].endswith(f"/{name}")]


class Handler(BaseHTTPRequestHandler):
    """model_info, and HEAD and GET of /ID/resolve/REVISION/FILE with ETag, X-Repo-Commit and ranges."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.seen.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if hub.broken:
            return self.refuse(503, "")
        if hub.secret is not None and self.headers.get("Authorization") != f"Bearer {hub.secret}":
            return self.refuse(401, "RepoNotFound")
        if info := re.fullmatch(rf"/api/{hub.kind}s/{re.escape(hub.repo)}/revision/(.+)", path):
            if info[1] not in ("main", hub.commit):
                return self.refuse(404, "RevisionNotFound")
            return self.send(json.dumps(self.describe()).encode(), {"Content-Type": "application/json"}, body=body)
        below = "" if hub.kind == "model" else f"{hub.kind}s/"
        if file := re.fullmatch(rf"/{below}{re.escape(hub.repo)}/resolve/(?:main|{hub.commit})/(.+)", path):
            if hub.gated:
                return self.refuse(403, "GatedRepo")
            if file[1] not in hub.files:
                return self.refuse(404, "EntryNotFound")
            return self.send_file(file[1], body=body)
        return self.refuse(404, "RepoNotFound")

    def describe(self) -> dict[str, Any]:
        siblings = []
        for name, data in self.hub.files.items():
            sibling: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": "0" * 40}
            if name in self.hub.sha256:
                sibling["lfs"] = {"sha256": self.hub.sha256[name], "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        about = {"id": self.hub.repo, "sha": self.hub.commit, "siblings": siblings, "tags": []}
        if self.hub.kind == "model":
            return about | {"modelId": self.hub.repo}
        return about | {"private": False, "downloads": 0, "likes": 0, "cardData": self.hub.card}

    def send_file(self, name: str, *, body: bool) -> None:
        data = self.hub.files[name]
        etag = self.hub.sha256.get(name) or hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(data[start:], headers, body=body, status=206 if start else 200, name=name)

    def send(
        self, data: bytes, headers: dict[str, str], *, body: bool, status: int = 200, name: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        stop = self.hub.cut.pop(name, None) if name is not None else None
        if stop is not None:
            self.wfile.write(data[:stop])
            self.close_connection = True
        elif name is not None and name == self.hub.trickle:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.hub.flowing.set()
            while self.hub.trickle == name:
                time.sleep(0.02)
            self.close_connection = True
        else:
            self.wfile.write(data)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """`seen` has it."""


@contextmanager
def serving(address: str = "127.0.0.1") -> Iterator[Hub]:
    """The server on a free port of this machine; `Hub.url` goes into HF_ENDPOINT."""
    with listening(Handler, address) as hub:
        yield hub


@contextmanager
def listening(handler: type[Handler], address: str = "127.0.0.1") -> Iterator[Hub]:
    """The server with `handler`."""
    state = Hub()
    http = ThreadingHTTPServer((address, 0), type("BoundHandler", (handler,), {"hub": state}))
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield state
    finally:
        state.trickle = None
        http.shutdown()
        thread.join()
        http.server_close()
