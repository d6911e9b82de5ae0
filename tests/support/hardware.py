"""Boxes that are not here: /sys, /dev and the drivers' programs as recorded (core/hardware/recording.py)."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.hardware.recording import Recording, parse

MACHINES = Path(__file__).parents[1] / "unit" / "fixtures" / "machines"
NOBODY = 65534


def recording(name: str) -> Recording:
    return parse((MACHINES / f"{name}.txt").read_text())


def unpack(name: str, root: Path) -> Path:
    """The recorded machine `name` below `root`: sys/, dev/ and, as real programs, bin/."""
    return lay_out(recording(name), root)


def lay_out(machine: Recording, root: Path) -> Path:
    for path, content in machine.files.items():
        _file(root / path).write_text(content)
    for path in machine.unreadable:
        _file(root / path).chmod(0)
    for path, device in machine.devices.items():
        file = _file(root / path)
        if device.open:
            file.chmod(0o666)
        else:
            if os.geteuid() != 0:
                pytest.skip("only root may give a file to another group")
            os.chown(file, 0, device.group)
            file.chmod(device.mode)
    programs: dict[str, list[str]] = {}
    for number, ((program, *arguments), (status, output)) in enumerate(machine.tools.items()):
        said = _file(root / f"said/{number}")
        said.write_text(output)
        end = "exec /bin/sleep 60" if status is None else f"exit {status}"
        arm = f"{shlex.quote(' '.join(arguments))}) /bin/cat {shlex.quote(str(said))}; {end};;"
        programs.setdefault(program, []).append(arm)
    for program, arms in programs.items():
        file = _file(root / "bin" / program)
        file.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *arms, "esac", 'echo "not recorded: $*" >&2; exit 64']))
        file.chmod(0o755)
    return root


def environment(machine: Recording, root: Path) -> dict[str, str]:
    return {"PATH": str(root / "bin")} | machine.environment


def _file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


@contextmanager
def readable_folder() -> Iterator[Path]:
    """A folder that everybody may read, for what root must look at as somebody else."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        yield root


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may open everything; here it is somebody who may not. Another user stays who he is."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
