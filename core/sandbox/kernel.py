"""What the sandbox asks of the kernel, by the numbers of its interfaces: namespaces, mounts, Landlock, seccomp."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from core.sandbox import syscalls

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0200_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 24, 38, 22
SECCOMP_MODE_FILTER = 2

_PIVOT_ROOT, _MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_SELF, _CAPSET = 155, 442, 444, 445, 446, 126
_CAP_VERSION_3 = 0x2008_0522
_FS_READ = 0b1100
"""Read a file, read a folder."""

_libc = ctypes.CDLL(None, use_errno=True)


def supported() -> str | None:
    """Why this machine's kernel interfaces are not those that the sandbox is written for; None where they are."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "its filter of system calls is written for Linux on x86-64"
    if landlock_version() < 1:
        return "the kernel has no Landlock (CONFIG_SECURITY_LANDLOCK, and `landlock` in the kernel's `lsm=`)"
    return None


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    data = None if options is None else options.encode()
    name = None if kind is None else kind.encode()
    _check(_libc.mount(source.encode(), target.encode(), name, ctypes.c_ulong(flags), data), f"mount {target}")


def read_only(target: str, *, recursive: bool = True) -> None:
    """Take from a mount (and those below it) writing, set-user-id programs and devices."""
    attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    _syscall(_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE * recursive, attributes, len(attributes))


def pivot_root(new: str, old: str) -> None:
    _syscall(_PIVOT_ROOT, new.encode(), old.encode())


def unmount(target: str) -> None:
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Give up all capabilities, for good."""
    number = 0
    while _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:  # EINVAL beyond the last; EPERM without CAP_SETPCAP
        number += 1
    header = struct.pack("<Ii", _CAP_VERSION_3, 0)
    _syscall(_CAPSET, header, bytes(24))
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def landlock_version() -> int:
    """Version of Landlock's interface; 0 where the kernel has none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(readable: list[str], writable: list[str], devices: list[str]) -> None:
    """Restrict this process, once and for all: files below these paths, no TCP, no signals or abstract sockets
    outside (the last three where the kernel knows them)."""
    version = landlock_version()
    files = (1 << 13) - 1
    files |= (1 << 13) * (version >= 2) | (1 << 14) * (version >= 3) | (1 << 15) * (version >= 5)
    rules = struct.pack("<Q", files)
    if version >= 4:
        rules += struct.pack("<Q", 0b11)
    if version >= 6:
        rules += struct.pack("<Q", 0b11)
    handle = _syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    written = files & ~(1 | (1 << 6) | (1 << 9) | (1 << 11) | (1 << 15))  # no program, no devices, no sockets
    for paths, rights in ((readable, _FS_READ), (writable, written), (devices, 0b0110)):
        for path in paths:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("<Qi", rights if place_is_folder(place) else rights & (0b0111 | 1 << 14) & files, place)
            _syscall(_LANDLOCK_ADD, handle, 1, rule, 0)
            os.close(place)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    _syscall(_LANDLOCK_SELF, handle, 0)
    os.close(handle)


def place_is_folder(descriptor: int) -> bool:
    return (os.fstat(descriptor).st_mode & 0o170000) == 0o040000


def filter_system_calls() -> None:
    """Allow this process, once and for all, what `syscalls` lists."""
    code = syscalls.program(os.getpid())
    held = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(held))
    wanted = ctypes.create_string_buffer(described, len(described))
    _check(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), wanted, 0, 0), "prctl seccomp")


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    given = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _check(int(_libc.syscall(ctypes.c_long(number), *given)), f"system call {number}")


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
