"""Attempts to get out of the sandbox. Each source runs to its end, and answers True, only where the attempt worked."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.sandbox.sandbox import ProgramLimits, ProgramSandbox

CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
"""

REFUSED = {
    # network
    "tcp": "import socket; socket.socket()",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "ipv6": "import socket; socket.socket(socket.AF_INET6)",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "packets": "import socket; socket.socket(17, socket.SOCK_RAW)",
    "vsock": "import socket; socket.socket(40)",
    "socket pair of the internet": CALLS + "call(53, 2, 1, 0, (ctypes.c_int * 2)())",
    "name service": "import urllib.request; urllib.request.urlopen('http://example.com', timeout=2)",
    "listening": "import socket; socket.create_server(('127.0.0.1', 0))",
    "server of the loopback": "import http.server; http.server.HTTPServer(('127.0.0.1', 0), None)",
    # processes
    "fork": "import os; os.fork()",
    "fork bomb": "import os\nwhile True: os.fork()",
    "vfork": CALLS + "call(58)",
    "clone without a thread": CALLS + "call(56, 17, 0, 0, 0, 0)",
    "clone into namespaces": CALLS + "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": CALLS + "call(435, ctypes.create_string_buffer(88), 88)",
    "shell": "import os; assert os.system('true') == 0",
    "program": "import subprocess; subprocess.run(['/bin/true'])",
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable])",
    "exec of the loader": "import os; os.execv('/usr/lib64/ld-linux-x86-64.so.2', ['x'])",
    "exec of an own program": (
        "import os\nopen('x', 'w').write('#!/bin/sh')\nos.chmod('x', 0o700)\nos.execv('x', ['x'])"
    ),
    "pool of processes": "import multiprocessing; multiprocessing.Pool(1)",
    "daemon": "import os; os.setsid()",
    # signals
    "signal at the server": "import os; os.kill(os.getppid(), 0)",
    "kill of process 1": "import os; os.kill(1, 9)",
    "kill of all": "import os; os.kill(-1, 9)",
    "kill of the group": "import os; os.killpg(0, 9)",
    "tgkill": CALLS + "call(234, 1, 1, 9)",
    "tkill": CALLS + "call(200, 1, 9)",
    "queued signal": CALLS + "call(129, 1, 9, ctypes.create_string_buffer(128))",
    "descriptor of a process": "import os; os.pidfd_open(1)",
    "signals by a descriptor's owner": "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, 1)",
    # other processes' memory
    "ptrace attach": CALLS + "call(101, 16, 1, 0, 0)",
    "ptrace seize": CALLS + "call(101, 0x4206, 1, 0, 0)",
    "traced by the parent": CALLS + "call(101, 0, 0, 0, 0)",
    "reading memory": CALLS + "call(310, 1, 0, 0, 0, 0, 0)",
    "writing memory": CALLS + "call(311, 1, 0, 0, 0, 0, 0)",
    "kcmp": CALLS + "call(312, 1, 1, 0, 0, 0)",
    # files
    "the root": "import os; os.listdir('/')",
    "passwords": "open('/etc/passwd').read()",
    "the home of root": "import os; os.listdir('/root')",
    "the temporary folder": "import os; os.listdir('/tmp')",
    "a file outside": f"open({str(Path(__file__))!r}).read()",
    "processes": "import os; os.listdir('/proc')",
    "own environment": "open('/proc/self/environ').read()",
    "own memory": "open('/proc/self/mem', 'r+b')",
    "kernel": "import os; os.listdir('/sys')",
    "disks": "open('/dev/sda', 'rb')",
    "memory device": "open('/dev/mem', 'rb')",
    "terminal": "open('/dev/tty', 'w')",
    "shared memory": "import os; os.listdir('/dev/shm')",
    "semaphores": "import multiprocessing; multiprocessing.Lock()",
    "symbolic link": "import os; os.symlink('/etc/passwd', 'x'); open('x').read()",
    "hard link": "import os; os.link(os.__file__, 'x')",
    "dots": "open('../../../../etc/passwd').read()",
    "a neighbour's folder": "import os; os.mkdir('../1000')",
    "listing the neighbours": "import os; os.listdir('..')",
    "writing a library": "import json; open(json.__file__, 'w')",
    "writing beside a library": "import os, json; open(os.path.dirname(json.__file__) + '/x.py', 'w')",
    "removing a library": "import json, os; os.remove(json.__file__)",
    "mode of a library": "import json, os; os.chmod(json.__file__, 0o777)",
    "device of its own": "import os; os.mknod('x', 0o20666, os.makedev(1, 3))",
    "pipe with a name": "import os; os.mkfifo('x')",
    "handle of a file": CALLS + "call(304, -100, ctypes.create_string_buffer(64), 0)",
    "chroot": "import os; os.chroot('.')",
    # rights
    "another user": "import os; os.setuid(0)",
    "another group": "import os; os.setgid(0)",
    "capabilities": CALLS + "call(126, ctypes.create_string_buffer(8), ctypes.create_string_buffer(24))",
    "set-user-id": "import os; open('x', 'w').close(); os.chown('x', 0, 0)",
    "user namespace": CALLS + "call(272, 0x10000000)",
    "mount namespace": CALLS + "call(272, 0x20000)",
    "entering a namespace": CALLS + "call(308, 0, 0)",
    "mount": CALLS + "call(165, b'none', b'.', b'tmpfs', 0, 0)",
    "new mount interface": CALLS + "call(430, b'tmpfs', 0)",
    "unmount": CALLS + "call(166, b'/', 2)",
    "pivot": CALLS + "call(155, b'.', b'.')",
    "raising a limit": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    ),
    "limits of another": "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
    "another filter": CALLS + "call(317, 1, 0, 0)",
    "prctl": CALLS + "call(157, 4, 1, 0, 0, 0)",
    # interfaces of the kernel
    "keyring": CALLS + "call(250, 0, -3, 1)",
    "adding a key": CALLS + "call(248, b'user', b'x', b'y', 1, -3)",
    "io_uring": CALLS + "call(425, 1, ctypes.create_string_buffer(120))",
    "bpf": CALLS + "call(321, 0, 0, 0)",
    "performance events": CALLS + "call(298, 0, 0, -1, -1, 0)",
    "user faults": CALLS + "call(323, 0)",
    "memory file": "import os; os.memfd_create('x')",
    "system v memory": CALLS + "call(29, 0, 4096, 0o1666)",
    "message queue": CALLS + "call(240, b'x', 0o102, 0o600, 0)",
    "kernel module": CALLS + "call(175, 0, 0, b'')",
    "reboot": CALLS + "call(169, 0xfee1dead, 672274793, 0x1234567, 0)",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "host name": "import socket; socket.sethostname('x')",
    "scheduling": "import os; os.nice(-10)",
    "personality": CALLS + "call(135, 0x0040000)",
    "input to a terminal": "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
    "calls of the x32 interface": CALLS + "call(0x40000000 + 41, 2, 1, 0)",
    # ours
    "our modules": "import core.settings",
    "our trainer": "import core.train",
    "our sandbox": "import core.sandbox.kernel",
    "our client": "import eft",
    "an api key": "import os; os.environ['EFT_API_KEY']",
    "a token of a hub": "import os; os.environ['HF_TOKEN']",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProgramSandbox]:
    os.environ["EFT_API_KEY"] = os.environ["HF_TOKEN"] = "eft-secret-of-the-parent"
    held = socket.create_server(("127.0.0.1", 0))
    held.set_inheritable(True)
    try:
        with ProgramSandbox(
            ProgramLimits(memory_bytes=512 << 20, files_bytes=4 << 20, output_bytes=4096, threads=8)
        ) as sandbox:
            yield sandbox
            assert sandbox.starts == 1, "an attempt ended the sandbox itself"
    finally:
        held.close()
        del os.environ["EFT_API_KEY"], os.environ["HF_TOKEN"]


@pytest.mark.parametrize("name", REFUSED)
def test_an_attempt_is_refused(sandbox: ProgramSandbox, name: str) -> None:
    outcome = sandbox.run_script(REFUSED[name], seconds=20)
    assert outcome.value is not True and outcome.ended is None, outcome
    kinds = ("PermissionError", "FileNotFoundError", "OSError", "ModuleNotFoundError", "KeyError", "AssertionError")
    assert outcome.error is not None and outcome.error.startswith((*kinds, "URLError", "ValueError")), outcome


def test_no_descriptor_of_ours_is_open(sandbox: ProgramSandbox) -> None:
    source = """
import os
for n in range(200):
    try: print(n, oct(os.fstat(n).st_mode & 0o170000))
    except OSError: pass
"""
    found = dict(line.split() for line in sandbox.run_script(source).stdout.splitlines())
    assert found == {"0": "0o20000", "1": "0o10000", "2": "0o10000", "3": "0o10000"}, "null and three pipes"


def test_the_environment_is_an_empty_one(sandbox: ProgramSandbox) -> None:
    said = sandbox.run_script("import os, sys; print(dict(os.environ), sys.argv, sys.flags)").stdout
    assert "secret" not in said and "EFT_" not in said


def test_it_is_nobody_among_no_others(sandbox: ProgramSandbox) -> None:
    said = sandbox.run_script("import os; print(os.getuid(), os.getppid(), os.getgroups())").stdout.split(maxsplit=2)
    assert int(said[0]) > 0 and said[1] == "1"
    if os.geteuid() == 0:
        assert said[2].strip() == "[]"


def test_a_processor_is_given_back(sandbox: ProgramSandbox) -> None:
    outcome = sandbox.run_script("while True: pass", seconds=0.3)
    assert outcome.ended == "time" and outcome.cpu_seconds < 2 and "0.3 s" in str(outcome.error)


def test_signals_do_not_stop_the_clock(sandbox: ProgramSandbox) -> None:
    source = """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(60)
"""
    assert sandbox.run_script(source, seconds=0.3).ended == "time"


def test_closing_its_ends_does_not_stop_the_clock(sandbox: ProgramSandbox) -> None:
    assert sandbox.run_script("import os, time; os.closerange(0, 60); time.sleep(60)", seconds=0.3).ended == "time"


def test_memory_has_an_end(sandbox: ProgramSandbox) -> None:
    assert sandbox.run_script("held = []\nwhile True: held.append(bytearray(1 << 20))", seconds=20).ended == "memory"


def test_threads_have_an_end(sandbox: ProgramSandbox) -> None:
    source = """
import threading
threading.stack_size(64 << 10)
for _ in range(100): threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    assert "can't start new thread" in str(sandbox.run_script(source, seconds=20).error)


def test_files_have_an_end(sandbox: ProgramSandbox) -> None:
    one = sandbox.run_script("open('x', 'wb').write(bytes(16 << 20))", seconds=20)
    assert one.value is None and ("File too large" in str(one.error) or "SIGXFSZ" in str(one.error))
    many = "for n in range(9): open(str(n), 'wb').write(bytes(1 << 20))"
    assert "No space left" in str(sandbox.run_script(many, seconds=20).error)
    inodes = "import os\nfor n in range(10**6): os.mkdir(str(n))"
    assert "No space left" in str(sandbox.run_script(inodes, seconds=20).error)
    assert sandbox.run_script("open('x', 'wb').write(bytes(2 << 20))").value, "the next one has its room again"


def test_folders_that_resist_are_removed(sandbox: ProgramSandbox) -> None:
    source = "import os\nos.makedirs('a/b/c'); open('a/b/c/x', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)"
    assert sandbox.run_script(source).value
    deep = "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')"
    assert sandbox.run_script(deep).value
    assert sandbox.run_script("import os; assert os.listdir('.') == []").value


def test_output_is_bounded(sandbox: ProgramSandbox) -> None:
    some = sandbox.run_script("print('x' * 100_000)")
    assert some.value and len(some.stdout) == 4096
    endless = sandbox.run_script("import os\nwhile True: os.write(1, b'x' * 65536)", seconds=30)
    assert endless.ended == "output"


def test_a_result_is_bounded(sandbox: ProgramSandbox) -> None:
    assert sandbox.run_function("def f(): return 'x' * (40 << 20)", "f", {}, seconds=30).ended == "output"


def test_a_result_that_is_not_ours_counts_for_nothing(sandbox: ProgramSandbox) -> None:
    for forged in ("b'{\"value\": true}'", "b'[' * 100_000", "b'\\xff'", 'b\'{"value": 1, "seal": "x"}\''):
        outcome = sandbox.run_script(f"import os; os.write(3, {forged}); os._exit(0)")
        assert outcome.value is None and outcome.error == "it ended its own process"


def test_what_a_program_leaves_the_next_does_not_find(sandbox: ProgramSandbox) -> None:
    left = "import builtins, sys, os\nbuiltins.left = 1; sys.modules['left'] = sys; open('left', 'w').write('x')"
    assert sandbox.run_script(left).value
    found = "import builtins, sys, os\nassert not hasattr(builtins, 'left') and 'left' not in sys.modules\n"
    assert sandbox.run_script(found + "assert os.listdir('.') == []").value


def test_a_crash_is_told(sandbox: ProgramSandbox) -> None:
    outcome = sandbox.run_script("import ctypes; ctypes.string_at(0)")
    assert outcome.ended == "signal SIGSEGV" and sandbox.run_script("1").value


def test_recursion_and_odd_errors_are_told(sandbox: ProgramSandbox) -> None:
    assert "RecursionError" in str(sandbox.run_script("def f(): f()\nf()").error)
    odd = "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd"
    assert sandbox.run_script(odd).error is not None
    assert "KeyboardInterrupt" in str(sandbox.run_script("raise KeyboardInterrupt").error)
    assert "SyntaxError" in str(sandbox.run_script("def").error)
