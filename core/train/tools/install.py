"""Install a set of libraries (core/tools) into its folder of the cache, on first use, and run programs over it.

The folder appears by one rename: it is complete or not there. Programs of a set run in processes of their own with the
folder on their path, over the interpreter and the libraries of eft.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core import HOME
from core.base import forks
from core.errors import EftError
from core.tools import FOLDER, ToolSet, place, requirements
from core.train.hub.download import is_offline

POLL_SECONDS = 0.5


class ToolsMissing(EftError):
    """A set of libraries is neither installed nor can be."""

    code = "tools_missing"
    status = 422


@dataclass(frozen=True, slots=True)
class Tools:
    """An installed set."""

    folder: Path
    beside: tuple[Path, ...] = ()
    """Folders of other sets that programs see as well."""

    @property
    def path(self) -> str:
        """Where programs look for modules first."""
        return os.pathsep.join(map(str, (self.folder, *self.beside, HOME)))

    def run(self, program: Path, *arguments: str, between: Callable[[], None] = lambda: None) -> None:
        """Run a Python program over the set; its output goes to this process's standard error. ToolFailed where it
        fails. `between` runs twice a second and may raise, which ends the program."""
        environment = os.environ | {"PYTHONPATH": self.path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-P", str(program), *arguments]
        with tempfile.TemporaryFile() as output:
            # stdin is the worker's line to this process: it is not for others.
            child = forks.launch(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            try:
                while (status := _ended(child)) is None:
                    between()
            finally:
                child.kill()
                child.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        print(said, file=sys.stderr, flush=True)
        if status:
            raise ToolFailed(program.stem, status, said)


def _ended(child: subprocess.Popen[bytes]) -> int | None:
    """Exit status, or None where it still runs after POLL_SECONDS."""
    try:
        return child.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


class ToolFailed(Exception):
    """A program of a set failed."""

    def __init__(self, program: str, status: int, errors: str) -> None:
        last = [line.strip() for line in errors.splitlines() if line.strip()][-1:]
        super().__init__(last[0] if last else f"{program} ended with status {status}")


def find(tools: ToolSet, cache_dir: Path | None) -> Tools | None:
    """The set, where it is installed."""
    if cache_dir is None or not (folder := place(tools, cache_dir)).is_dir():
        return None
    return Tools(folder)


def install(tools: ToolSet, cache_dir: Path, *, offline: bool, field: str) -> Tools:
    """Install the set, or answer the one that is there. ToolsMissing where that cannot be done; `field` is the place of
    the job that asks for it."""
    folder = place(tools, cache_dir)
    if folder.is_dir():
        return Tools(folder)
    if is_offline(offline):
        raise ToolsMissing(
            f"this needs libraries that are not installed yet, and the service is offline: prepare one such job with "
            f"network, or copy {FOLDER}/{folder.name} of another data root's cache to {folder.parent}",
            field=field,
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{tools}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel's: it dies with its process
        if not folder.is_dir():
            for left in folder.parent.glob(f".{tools}-*"):
                if left.is_dir():
                    shutil.rmtree(left)
            work = Path(tempfile.mkdtemp(prefix=f".{tools}-", dir=folder.parent))
            _pip(tools, work, field)
            for path in (work, *work.rglob("*")):  # a sandbox reads it as another user
                path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
            work.rename(folder)
    return Tools(folder)


def _pip(tools: ToolSet, target: Path, field: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-compile"]
    command += ["--target", str(target), "-r", str(requirements(tools))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        said = "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip().startswith("ERROR"))
        raise ToolsMissing(
            f"the libraries that this needs could not be installed from the package index "
            f"({said or f'pip ended with status {done.returncode}'}); see {requirements(tools).name}",
            field=field,
        )
