"""The serving child's loop in a thread, and a client that speaks its frames."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.spec.run.folder import ORDER_FILE
from core.spec.run.frames import Frame, receive, send
from core.spec.run.orders import ServingOrder
from core.train.base.stop import Stop
from core.train.serving.serve import serve
from tests.support import session


class ServingChild:
    """The child over a model, in a thread of this process, which has torch already."""

    def __init__(self, run_dir: Path, model_dir: Path, **order: Any) -> None:
        run_dir.mkdir(parents=True)
        given = session.order(model_dir, run_dir / "unused").model_dump(exclude={"session_dir", "pass_tokens", "slots"})
        (run_dir / ORDER_FILE).write_text(ServingOrder(**{**given, **order}).model_dump_json())
        self.stream, self._theirs = socket.socketpair()
        self.stop, self.code = Stop(), -1
        self._thread = threading.Thread(target=self._serve, args=(run_dir,))
        self._thread.start()
        self.stream.settimeout(60)
        hello = receive(self.stream)
        assert hello is not None and hello.header == {"ready": True}

    def _serve(self, run_dir: Path) -> None:
        with self._theirs:
            self.code = serve(run_dir, self._theirs, self.stop)

    def send(self, header: dict[str, Any]) -> None:
        send(self.stream, Frame(header))

    def next(self) -> dict[str, Any]:
        frame = receive(self.stream)
        assert frame is not None
        return frame.header

    def ask(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """Send all at once; of each its texts and reasons by choice, its log-probabilities, and its end or error."""
        for number, request in enumerate(requests):
            self.send({"id": str(number), "request": {"most_tokens": 128, "temperature": 0.0} | request})
        found: list[dict[str, Any]] = [{"texts": {}, "reasons": {}, "logprobs": {}, "frames": 0} for _ in requests]
        open_ = set(range(len(requests)))
        while open_:
            header = self.next()
            number = int(header["id"])
            mine = found[number]
            mine["frames"] += 1
            for piece in header.get("pieces", ()):
                index = piece["index"]
                mine["texts"][index] = mine["texts"].get(index, "") + piece["text"]
                mine["logprobs"].setdefault(index, []).extend([piece["logprobs"]] if "logprobs" in piece else [])
                if "finish_reason" in piece:
                    mine["reasons"][index] = piece["finish_reason"]
            if "done" in header or "error" in header:
                mine["done"], mine["error"] = header.get("done"), header.get("error")
                open_.remove(number)
        return found

    def end(self) -> int:
        self.stop.requested = True
        self._thread.join()
        self.stream.close()
        return self.code


def tokens(answer: dict[str, Any], index: int = 0) -> Sequence[int]:
    """Tokens of a choice, of a request with log-probabilities."""
    return [one["id"] for one in answer["logprobs"][index]]
