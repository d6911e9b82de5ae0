"""A machine as a text file: what discovery reads of it, so that it can be looked at again elsewhere.

    eft machine 1
    machine: what a person would call it
    source: recorded by `eft doctor --record`, or the documents it was written from
    === environment
    HIP_VISIBLE_DEVICES=0,1
    === file sys/class/kfd/kfd/topology/nodes/1/gpu_id
    51111
    === unreadable sys/class/kfd/kfd/topology/nodes/2/properties
    === device dev/kfd 0660 992 shut
    === tool 0 amd-smi list -e --json
    [{"gpu": 0, …}]
    === expect
    {"gpus": […]}

Paths are relative to `/`. A device has its mode, its group's number, and whether the process could `open` it. A tool
has its exit status (`killed` when it hung or flooded) and what it wrote to standard output. `expect` is for tests. A
line of content that begins with `===` or a backslash gets a backslash before it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

HEAD = "eft machine 1"


class RecordingError(ValueError):
    """The text is no recording; the message names the line."""


@dataclass(frozen=True, slots=True)
class DeviceFile:
    """A device file."""

    mode: int
    group: int
    open: bool


@dataclass(slots=True)
class Recording:
    """One machine."""

    machine: str
    source: str
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    devices: dict[str, DeviceFile] = field(default_factory=dict)
    tools: dict[tuple[str, ...], tuple[int | None, str]] = field(default_factory=dict)
    """(exit status, output) by name and arguments; status None: it was killed."""
    expect: dict[str, Any] = field(default_factory=dict)


def render(recording: Recording) -> str:
    """The text; `parse` is its inverse."""
    lines = [HEAD, f"machine: {recording.machine}", f"source: {recording.source}"]
    if recording.environment:
        lines += ["=== environment", *(f"{name}={value}" for name, value in recording.environment.items())]
    for path, content in recording.files.items():
        lines += [f"=== file {path}", *_escaped(content)]
    lines += [f"=== unreadable {path}" for path in recording.unreadable]
    for path, device in recording.devices.items():
        lines.append(f"=== device {path} {device.mode:04o} {device.group} {'open' if device.open else 'shut'}")
    for command, (status, output) in recording.tools.items():
        lines += [f"=== tool {'killed' if status is None else status} {' '.join(command)}", *_escaped(output)]
    if recording.expect:
        lines += ["=== expect", json.dumps(recording.expect, indent=1, ensure_ascii=False)]
    return "\n".join(lines) + "\n"


def _escaped(content: str) -> list[str]:
    return [f"\\{line}" if line.startswith(("===", "\\")) else line for line in content.splitlines()]


def parse(text: str) -> Recording:
    """Raises RecordingError."""
    lines = text.splitlines()
    if not lines or lines[0] != HEAD:
        raise RecordingError(f"line 1 is not `{HEAD}`")
    recording = Recording("", "")
    heading, content = "", list[str]()
    expect = ""
    for number, line in enumerate([*lines[1:], "=== end"], start=2):
        if not line.startswith("==="):
            content.append(line[1:] if line.startswith("\\") else line)
            continue
        words = heading.split(" ")
        body = "\n".join(content) + ("\n" if content else "")
        match words:
            case [""]:
                about = dict(part.split(": ", 1) for part in content if ": " in part)
                recording.machine, recording.source = about.get("machine", ""), about.get("source", "")
            case ["environment"]:
                recording.environment = dict(part.split("=", 1) for part in content if "=" in part)
            case ["file", path]:
                recording.files[path] = body
            case ["unreadable", path]:
                recording.unreadable.append(path)
            case ["device", path, mode, group, "open" | "shut" as access]:
                recording.devices[path] = DeviceFile(int(mode, 8), int(group), access == "open")
            case ["tool", status, *command] if command:
                recording.tools[tuple(command)] = (None if status == "killed" else int(status), body)
            case ["expect"]:
                expect = body
            case _:
                raise RecordingError(f"line {number - len(content) - 1}: `=== {heading}` is not known")
        heading, content = line[3:].strip(), []
    if expect:
        recording.expect = json.loads(expect)
    if not recording.source:
        raise RecordingError("there is no `source:`")
    return recording
