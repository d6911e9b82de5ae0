"""Why a device file may not be used, and what to do about it: in a container, and on a bare machine.

The group of /dev/kfd and /dev/dri/renderD* is `render` on most distributions and `video` on some. In a container only
its number counts, and the image may call that number something else, or nothing
(https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html, ROCm/ROCm-docker#90).
"""

from __future__ import annotations

import getpass
import grp
import os
import stat
from collections.abc import Mapping
from pathlib import Path

DEVICES = "--device /dev/kfd --device /dev/dri"


def refusal(device: Path, root: Path, environ: Mapping[str, str]) -> str | None:
    """What keeps this process from `device` and the way out; None when it may read and write it."""
    if os.access(device, os.R_OK | os.W_OK, effective_ids=True):
        return None
    inside = contained(root, environ)
    try:
        found = device.stat()
    except FileNotFoundError:
        if inside:
            return f"is not in this container: start it with `{DEVICES}`"
        return f"is missing: a container is started with `{DEVICES}`; on a bare machine, is the amdgpu driver loaded?"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return explain(stat.S_IMODE(found.st_mode), found.st_gid, (os.getegid(), *os.getgroups()), inside=inside)


def explain(mode: int, group: int, groups: tuple[int, ...], *, inside: bool) -> str:
    """For a device of this mode and group that a process in `groups` may not open. `inside`: a container."""
    name = group_name(group)
    called = f"{name} ({group})" if name else f"{group}, which has no name here"
    if mode & 0o060 != 0o060:
        return f"may not be opened by any group (mode {mode:o}): `chmod 660` it, or mend the udev rule"
    if group in groups:
        return (
            f"may not be opened although this process is in its group {called}: a device cgroup or a security module?"
        )
    if inside:
        return (
            f"may not be opened: the container lacks the group {called}; start it with `{DEVICES} --group-add {group}`"
        )
    if not name:
        return (
            f"may not be opened: it belongs to the group {called}; `sudo groupadd -g {group} render`, then add yourself"
        )
    return f"may not be opened: the group {called} is missing; `sudo usermod -aG {name} {user()}`, then log in again"


def contained(root: Path, environ: Mapping[str, str]) -> bool:
    """Whether this is a container: Docker and Podman leave a file, Kubernetes and systemd-nspawn a variable."""
    marks = (root / ".dockerenv", root / "run/.containerenv")
    return any(mark.exists() for mark in marks) or bool({"KUBERNETES_SERVICE_HOST", "container"} & set(environ))


def group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return ""


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "$USER"
