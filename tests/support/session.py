"""The child of a session for tests: its process, and frames to and from it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from core.spec.axes.model import LocalModel
from core.spec.resolve import resolve
from core.spec.run.folder import ORDER_FILE
from core.spec.run.frames import Frame, pack, receive, send
from core.spec.run.orders import SessionOrder
from core.spec.session.job import SessionSpec
from core.train.ranks.env import FOLDER
from core.train.session import __main__ as session_main
from core.train.session.ranks import __main__ as rank_main
from tests.support.trainer import ENVIRONMENT, ROOT, Forked

Arrays = dict[str, np.ndarray[Any, Any]]


def order(model_dir: Path, folder: Path, **spec: Any) -> SessionOrder:
    """The order of a session whose folder is `folder`; `spec` has fields of SessionSpec."""
    asked = SessionSpec(
        model=LocalModel(path=str(model_dir)), **{"precision": "fp32", "resources": {"accelerator": "cpu"}, **spec}
    )
    return SessionOrder(
        job_id="session-test",
        attempt=1,
        spec=resolve(asked.as_job()),
        model_dir=str(model_dir),
        session_dir=str(folder),
        pass_tokens=64,
    )


class SessionClient:
    """One end of the socket pair."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.position = 0
        self.exact = False
        self.about: dict[str, Any] = {}
        """What each header says beside the operation."""

    def hello(self) -> dict[str, Any]:
        frame = receive(self.stream)
        assert frame is not None and frame.header["ready"]
        self.position = frame.header["position"]
        return frame.header

    def ask(self, op: str, arrays: Arrays | None = None, **fields: Any) -> tuple[dict[str, Any], Arrays]:
        """The result of an operation that goes well."""
        header, found = self.answer(op, arrays, **fields)
        assert header["ok"], header
        return header["result"], found

    def answer(self, op: str, arrays: Arrays | None = None, **fields: Any) -> tuple[dict[str, Any], Arrays]:
        self.send(op, arrays, **fields)
        frame = receive(self.stream)
        assert frame is not None, "the child has closed its end"
        assert frame.header["id"] == self.position
        self.record()
        return frame.header, load(frame.body) if frame.body else {}

    def record(self) -> None:
        """Say that the answers so far are written down."""
        send(self.stream, Frame(self.about | {"recorded": self.position}))

    def send(self, op: str, arrays: Arrays | None = None, **fields: Any) -> None:
        self.position += 1
        header = {
            "id": self.position,
            "position": self.position,
            "identity": f"op-{self.position}",
            "exact": self.exact,
            **self.about,
        }
        send(self.stream, Frame(header | {"op": {"op": op, **fields}}, save(arrays) if arrays else b""))

    def ask_together(self, asked: Sequence[tuple[SessionClient, str, Arrays, dict[str, Any]]]) -> list[Arrays]:
        """The arrays of operations that are there when the child looks: of sessions of this child, by their frames."""
        frames, found = b"", dict[int, Arrays]()
        for number, (one, op, arrays, fields) in enumerate(asked):
            one.position += 1
            header = one.about | {"id": number, "position": one.position, "op": {"op": op, **fields}}
            frames += pack(Frame(header, save(arrays)))
        self.stream.sendall(frames)
        for _ in asked:
            frame = receive(self.stream)
            assert frame is not None and frame.header["ok"], frame
            found[frame.header["id"]] = load(frame.body)
        for one in {id(one): one for one, *_ in asked}.values():
            one.record()
        return [found[number] for number in range(len(asked))]

    def snapshot(self) -> None:
        assert self._tell({"snapshot": True})["position"] == self.position

    def beside(self, session_id: str, folder: Path) -> SessionClient:
        """Another session, in the same child."""
        other = SessionClient(self.stream)
        other.about = {"session": session_id}
        other.position = other._tell({"join": str(folder)})["position"]
        return other

    def leave(self) -> None:
        assert self._tell({"leave": True})["position"] == self.position

    def _tell(self, header: dict[str, Any]) -> dict[str, Any]:
        send(self.stream, Frame({"id": 0, **header, **self.about}))
        frame = receive(self.stream)
        assert frame is not None and frame.header["ok"], frame
        result: dict[str, Any] = frame.header["result"]
        return result


class SessionRanks(SessionClient):
    """The ranks of a session, forks of this process, which has imported what they need; a context manager that ends
    them. Nothing stands in for the launcher of several: the death of one is not the end of the others. `cold`: one, as
    a worker without a spare starts it."""

    def __init__(self, run_dir: Path, given: SessionOrder, count: int, cold: bool = False) -> None:
        run_dir.mkdir(parents=True)
        (run_dir / ORDER_FILE).write_text(given.model_copy(update={"world_size": count}).model_dump_json())
        ours, theirs = socket.socketpair()

        def become(rank: int) -> int:
            ours.close()
            arguments = [str(run_dir), str(theirs.fileno())]
            if count == 1:
                return session_main.main(arguments)
            of_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            os.environ.update({name: str(value) for name, value in of_torchrun.items()} | {FOLDER: str(run_dir)})
            if rank:
                theirs.close()
            return rank_main.main(arguments[: 1 if rank else 2])

        self.ranks: list[Forked | subprocess.Popen[bytes]]
        if cold:
            assert count == 1
            command = [sys.executable, "-m", "core.train.session", str(run_dir), str(theirs.fileno())]
            variables = {"PATH": os.defpath} | ENVIRONMENT
            self.ranks = [
                subprocess.Popen(
                    command, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL
                )
            ]
        else:
            self.ranks = [Forked(run_dir, program=partial(become, rank)) for rank in range(count)]
        theirs.close()
        super().__init__(ours)

    def park(self) -> list[int]:
        """Ask the first rank to leave; the exit status of each."""
        self.ranks[0].send_signal(signal.SIGTERM)
        return [rank.wait() for rank in self.ranks]

    def __enter__(self) -> SessionRanks:
        self.hello()
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()


def examples(*rows: list[int], **numbers: list[float]) -> Arrays:
    """Arrays of examples; `numbers` are one for each token of all rows."""
    arrays: Arrays = {
        "tokens": np.array([token for row in rows for token in row], dtype=np.int32),
        "lengths": np.array([len(row) for row in rows], dtype=np.int32),
    }
    return arrays | {name: np.array(values, dtype=np.float32) for name, values in numbers.items()}
