"""The filter of system calls of a program in the sandbox (seccomp), for x86-64.

What is not listed fails with EPERM: sockets, processes, ptrace, mounts, namespaces, keyrings, io_uring, bpf, and
whatever a later kernel adds. Numbers are those of Linux's arch/x86/entry/syscalls/syscall_64.tbl.
"""

from __future__ import annotations

import errno
import struct

ALLOWED = {
    # files: paths are held by the mount namespace and by Landlock
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "dup": 32,
    "dup2": 33, "sendfile": 40, "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77,
    "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "link": 86,
    "unlink": 87, "symlink": 88, "readlink": 89, "umask": 95, "statfs": 137, "fstatfs": 138, "getdents64": 217,
    "fadvise64": 221, "openat": 257, "mkdirat": 258, "newfstatat": 262, "unlinkat": 263, "renameat": 264,
    "linkat": 265, "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "utimensat": 280, "fallocate": 285, "dup3": 292, "pipe2": 293, "preadv": 295, "pwritev": 296, "renameat2": 316,
    "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332, "close_range": 436, "faccessat2": 439,
    "chmod": 90, "fchmod": 91, "fchmodat": 268,
    # memory: RLIMIT_AS bounds it
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "mincore": 27, "madvise": 28,
    # threads and their locks
    "sched_yield": 24, "futex": 202, "set_tid_address": 218, "set_robust_list": 273, "get_robust_list": 274,
    "rseq": 334, "membarrier": 324, "arch_prctl": 158, "exit": 60, "exit_group": 231, "restart_syscall": 219,
    "sched_getaffinity": 204, "getcpu": 309, "gettid": 186,
    # signals within the process
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "pause": 34,
    # time
    "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "gettimeofday": 96, "times": 100, "time": 201,
    "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    # events of the process's own pipes
    "epoll_create": 213, "epoll_wait": 232, "epoll_ctl": 233, "epoll_pwait": 281, "eventfd2": 290, "epoll_create1": 291,
    "epoll_pwait2": 441, "recvfrom": 45, "sendto": 44, "shutdown": 48, "getsockname": 51, "getpeername": 52,
    "getsockopt": 55, "setsockopt": 54,
    # what one is
    "getpid": 39, "uname": 63, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "getuid": 102, "getgid": 104,
    "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getpgid": 121, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getsid": 124, "getrandom": 318, "wait4": 61, "waitid": 247,
}  # fmt: skip
"""System calls that are allowed whatever their arguments."""

CLONE, CLONE3, KILL, TGKILL, PRLIMIT, FCNTL, IOCTL, SOCKETPAIR = 56, 435, 62, 234, 302, 72, 16, 53
CLONE_THREAD = 0x0001_0000
IOCTLS = (0x5401, 0x5413, 0x5421, 0x541B, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONBIO, FIONREAD, FIONCLEX, FIOCLEX."""
FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Descriptors, flags and locks; F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN, which makes the kernel send signals."""

AUDIT_ARCH_X86_64 = 0xC000003E
X32 = 0x4000_0000
_LOAD, _EQUAL, _SET, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _REFUSE, _MISSING = 0x7FFF_0000, 0x0005_0000 | errno.EPERM, 0x0005_0000 | errno.ENOSYS
_KILL = 0x8000_0000


def program(own_pid: int) -> bytes:
    """The filter as an array of `struct sock_filter`. `own_pid`: the only process that signals may go to."""
    made = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, AUDIT_ARCH_X86_64),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER_EQUAL, 0, 1, X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in sorted(ALLOWED.values()):
        made += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    made += [(_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, _MISSING)]  # its flags lie in memory; libc then uses clone
    made += _where(CLONE, 0, [(_SET, CLONE_THREAD)])
    made += _where(KILL, 0, [(_EQUAL, own_pid)])
    made += _where(TGKILL, 0, [(_EQUAL, own_pid)])
    made += _where(PRLIMIT, 0, [(_EQUAL, 0)])
    made += _where(SOCKETPAIR, 0, [(_EQUAL, 1)])  # AF_UNIX: both ends are the process's own
    made += _where(IOCTL, 1, [(_EQUAL, value) for value in IOCTLS])
    made += _where(FCNTL, 1, [(_EQUAL, value) for value in FCNTLS])
    made.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("<HBBI", *one) for one in made)


def _where(number: int, argument: int, tests: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """Allow a call where one of the tests holds for the lower half of an argument (both halves, for signals' targets,
    which are 32 bits wide to the kernel)."""
    body = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for code, value in tests:
        body += [(code, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    body.append((_RETURN, 0, 0, _REFUSE))
    return [(_EQUAL, 0, len(body), number), *body]
