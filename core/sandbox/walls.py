"""The walls around the sandbox: namespaces, a file system of its own, a user of its own, no capabilities."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from core.sandbox import kernel

BOX = "/box"
"""The only folder that programs can write to; each has one of its own below it."""
DEVICES = ("/dev/null", "/dev/urandom")
_USERS = (range(1_600_000_000, 2_000_000_000), range(61_184, 65_520))
"""Numbers that belong to nobody: far above any account, or those of systemd's DynamicUser= where a container maps no
more than 65,536."""


class Wall(Exception):
    """A wall cannot be put up here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Nobody:
    uid: int
    gid: int
    root: bool
    """Whether this process is root and gives that up, rather than an ordinary user in a user namespace."""


@cache
def readable() -> tuple[str, ...]:
    """Folders that programs can read: Python's library and packages, and the shared libraries that these need. They are
    as this process first found them: once it is enclosed, links to them are gone."""
    paths = sysconfig.get_paths()
    wanted = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    wanted += ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    found: list[str] = []
    for path in sorted({os.path.realpath(one) for one in wanted if Path(one).exists()}):
        if not any(path == other or path.startswith(f"{other}/") for other in found):
            found.append(path)
    return tuple(found)


def separate() -> Nobody:
    """Leave all namespaces of the machine, but that of processes: the next child is the first of a new one."""
    if os.geteuid() == 0:
        _leave(kernel.NAMESPACES)
        nobody = _nobodys()
        return Nobody(nobody, nobody, root=True)
    user = Nobody(os.getuid(), os.getgid(), root=False)
    _leave(kernel.NAMESPACES | kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user.uid} {user.uid} 1")
    Path("/proc/self/gid_map").write_text(f"{user.gid} {user.gid} 1")
    return user


def _leave(flags: int) -> None:
    try:
        kernel.unshare(flags)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EINVAL, errno.ENOSYS):
            raise
        raise Wall(
            f"this process may not make namespaces ({error.strerror}). On Ubuntu set `sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0`, elsewhere see that user.max_user_namespaces is not 0; a "
            "container needs `--security-opt seccomp=unconfined --security-opt apparmor=unconfined` for a worker that "
            "is not root, and `--cap-add SYS_ADMIN` as well for one that is"
        ) from error


def _nobodys() -> int:
    """A user's number that this process may take; it may be fewer in a container."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    mapped = [range(int(first), int(first) + int(count)) for first, _, count in (line.split() for line in lines)]
    numbers = random.SystemRandom()
    for users in _USERS:
        number = numbers.choice(users)
        if any(number in one for one in mapped):
            return number
    raise Wall("root of this container has no second user to become; map at least 65,520 users into it")


def enclose(user: Nobody, files_bytes: int, folders: Sequence[str] = ()) -> None:
    """Give this process, the first of its namespace, files of its own; then take from it all it has. `folders`: those
    of packages that it sees beside those of Python."""
    modules = [os.path.realpath(path) for path in sys.path if path.startswith("/")]
    try:
        _furnish(user, files_bytes, folders)
    except OSError as error:
        raise Wall(f"its file system cannot be made: {error}") from error
    if user.root:
        os.setgroups([])
        _drop_bounding()
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = [path for path in (*modules, *folders) if Path(path).exists()]


def _drop_bounding() -> None:
    number = 0
    try:
        while True:
            kernel.prctl(kernel.PR_CAPBSET_DROP, number)
            number += 1
    except OSError as error:
        if error.errno != errno.EINVAL:  # beyond the last capability
            raise


def _furnish(user: Nobody, files_bytes: int, folders: Sequence[str]) -> None:
    os.umask(0o022)  # a worker's is 0o077, and who is inside could then not pass the folders above those it may read
    shown = [*readable(), *folders]
    links = [(path, str(Path(path).readlink())) for path in ("/lib", "/lib64") if Path(path).is_symlink()]
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    quiet = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "/tmp", "tmpfs", quiet, "size=1m,nr_inodes=1024,mode=755")  # noqa: S108 - only a place
    Path("/tmp/old").mkdir()  # noqa: S108 - in a file system of this process
    kernel.pivot_root("/tmp", "/tmp/old")  # noqa: S108
    os.chdir("/")
    for path in (*shown, *DEVICES):
        if Path(f"/old{path}").is_dir():
            Path(path).mkdir(parents=True, mode=0o755, exist_ok=True)
        else:
            Path(path).parent.mkdir(parents=True, mode=0o755, exist_ok=True)
            Path(path).touch()
        kernel.mount(f"/old{path}", path, None, kernel.MS_BIND | kernel.MS_REC)
        if path not in DEVICES:
            kernel.read_only(path)
    for path, target in links:
        if not os.path.lexists(path):
            Path(path).symlink_to(target)
    Path(BOX).mkdir(mode=0o755)
    inodes = f"nr_inodes={max(1024, files_bytes >> 13)}"
    owner = f"uid={user.uid},gid={user.gid}"
    kernel.unmount("/old")
    Path("/old").rmdir()
    kernel.read_only("/", recursive=False)
    kernel.mount("tmpfs", BOX, "tmpfs", quiet | kernel.MS_NOEXEC, f"size={files_bytes},{inodes},mode=700,{owner}")
