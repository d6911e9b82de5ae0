"""A command that is killed at one place after the other, and then left to its end:
`python -m tests.support.killed MODULE PLACE… -- ARGUMENT…`.

A place is a function by its module and name, `core.jobs.installation:open_to` or `core.storage.bucket:Bucket.discard`:
the process gets SIGKILL when that has been called and has come back; with `#2`, the second time. Every try is a process
of its own, forked from this one, which has imported everything and done nothing. It is made when a line comes on stdin;
what became of it is a line of JSON: its exit status (-9: killed) and what it wrote. `{try}` in an argument is the
number of the try, from 1; a place that is empty kills nothing.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from core import HOME


@contextmanager
def killed(
    module: str, places: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]
) -> Iterator[Iterator[tuple[int, str]]]:
    """For a test: every `next` is one try, and after one for each place the whole command; its exit status and output.
    `variables`: its settings, and it has no others."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    command = [sys.executable, "-m", "tests.support.killed", module, *places, "--", *arguments]
    with subprocess.Popen(
        command, cwd=HOME, env=inherited | dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def tries() -> Iterator[tuple[int, str]]:
            for _ in range(len(places) + 1):
                process.stdin.write("\n")
                process.stdin.flush()
                code, told = json.loads(process.stdout.readline())
                yield code, told

        try:
            yield tries()
        finally:
            process.stdin.close()


def main() -> None:
    cut = sys.argv.index("--")
    module, places, arguments = sys.argv[1], sys.argv[2:cut], sys.argv[cut + 1 :]
    command = importlib.import_module(module)
    for number, place in enumerate([*places, ""], 1):
        if not sys.stdin.readline():
            return
        with tempfile.TemporaryFile() as output:
            if (pid := os.fork()) == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.argv = [module, *(argument.replace("{try}", str(number)) for argument in arguments)]
                if place:
                    kill_after(place)
                code = 99
                try:
                    code = command.main()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            output.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), output.read().decode()]), flush=True)


def kill_after(place: str) -> None:
    """Have this process killed at the place; see the module."""
    path, _, times = place.partition("#")
    module, _, name = path.partition(":")
    *owners, last = name.split(".")
    owner: Any = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    real, left = getattr(owner, last), int(times or 1)

    def then_killed(*given: Any, **named: Any) -> Any:
        nonlocal left
        answer = real(*given, **named)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, last, then_killed)


if __name__ == "__main__":
    main()
