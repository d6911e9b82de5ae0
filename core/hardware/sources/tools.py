"""Asking the drivers' programs (amd-smi, rocm-smi, nvidia-smi) without trusting them: a limit on time and on output.

Such a program may hang in the driver, flood its output, or be of another version than the one at hand. Whatever it
does, the answer says so and the caller goes on. None of them is a library here, and `amdsmi` from PyPI is never to be
installed beside a ROCm build of PyTorch: torch then counts no devices (pytorch/pytorch#186516).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 15.0
"""amd-smi on a box of 64 partitions takes some."""
OUTPUT_BYTES = 4 << 20
REAP_SECONDS = 1.0
SAID_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a program said."""

    command: tuple[str, ...]
    """Name of the program and its arguments."""
    output: str
    """Its standard output, whatever the encoding makes of it."""
    failed: str | None
    """Why the output is not to be relied on, in words; None after exit status 0."""
    status: int | None
    """Exit status; None: it was killed, or could not be run."""


def find(name: str, environ: Mapping[str, str], root: Path) -> str | None:
    """Path of a program: on PATH, or where ROCm lies when PATH does not know it (as under systemd)."""
    found = shutil.which(name, path=environ.get("PATH", os.defpath))
    return found or shutil.which(name, path=str(root / "opt/rocm/bin"))


def ask(program: str, arguments: Sequence[str], environ: Mapping[str, str], seconds: float = SECONDS) -> ToolOutput:
    """Run `program` in a session of its own and wait; it is killed with all its children beyond `seconds` or beyond
    OUTPUT_BYTES. Never raises."""
    command = (Path(program).name, *arguments)
    try:
        child = subprocess.Popen(
            [program, *arguments],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return ToolOutput(command, "", f"{command[0]} cannot be run: {error.strerror or error}", None)
    out, err, stopped = _read(child, time.monotonic() + seconds)
    if stopped is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    try:
        status = child.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:  # inside a driver call that cannot be interrupted: init will reap it
        return ToolOutput(command, _text(out), f"`{' '.join(command)}` {stopped or 'hangs'} and cannot be killed", None)
    if stopped is not None:
        limit = f"{seconds:.0f} s" if stopped == "did not answer" else f"{OUTPUT_BYTES >> 20} MiB"
        return ToolOutput(command, _text(out), f"`{' '.join(command)}` {stopped} within {limit} and was killed", None)
    if status != 0:
        return ToolOutput(command, _text(out), f"`{' '.join(command)}` failed: {_said(err or out, status)}", status)
    return ToolOutput(command, _text(out), None, 0)


def _read(child: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes, str | None]:
    """(standard output, standard error, why it was not read to the end)."""
    assert child.stdout is not None and child.stderr is not None
    parts: dict[int, bytearray] = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    stopped = None
    with child.stdout, child.stderr, selectors.DefaultSelector() as selector:
        for stream in (child.stdout, child.stderr):
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and stopped is None:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                stopped = "did not answer"
            for key, _ in ready:
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                parts[key.fd] += chunk
                if len(parts[key.fd]) > OUTPUT_BYTES:
                    stopped = "did not end its output"
        out, err = parts.values()
    return bytes(out), bytes(err), stopped


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _said(raw: bytes, status: int) -> str:
    """The end of what it said, on one line."""
    words = " ".join(_text(raw).split())
    return words[-SAID_CHARACTERS:] if words else f"exit status {status}"


def as_json(answer: ToolOutput) -> tuple[Any, str | None]:
    """(the JSON value in an answer, why there is none). Lines before it are passed over: amd-smi and rocm-smi print
    warnings about groups and drivers there."""
    if answer.failed is not None:
        return None, answer.failed
    decoder = json.JSONDecoder()
    for at, character in enumerate(answer.output):
        if character in "[{" and (at == 0 or answer.output[at - 1] == "\n"):
            try:
                return decoder.raw_decode(answer.output, at)[0], None
            except (json.JSONDecodeError, RecursionError):
                continue
    return None, f"`{' '.join(answer.command)}` did not answer in JSON: {_said(answer.output.encode(), 0)}"
