"""Try a Dockerfile without a container engine: its RUN lines as they stand, each stage in a root of its own.

    sudo debootstrap --variant=minbase bookworm /var/tmp/base
    sudo python3 -m deploy.check.chroot Dockerfile --base /var/tmp/base --into /var/tmp/images
    sudo python3 -m deploy.check.chroot Dockerfile --into /var/tmp/images --run api

`--base` is a folder that stands for every FROM that names an image. A stage's root is a copy of the one it is from;
ARG, ENV, WORKDIR, USER, SHELL, COPY (as .dockerignore lets it), RUN and VOLUME do what they do in Docker. What is not
like Docker: no layers, no namespaces and no limits, and RUN sees the network, /proc, /sys and /dev of this machine. So
it tells whether an image would be made, and whether its commands start; not how it is confined.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from deploy.check.dockerfile import Dockerfile, Instruction, Stage, fill, read

HERE = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
FROM_HOST = ("etc/resolv.conf", "etc/hosts")
"""As an engine mounts its own there."""


@dataclass(slots=True)
class Root:
    """A stage as far as it is made."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    """ARG of this stage: visible to RUN, not kept."""
    workdir: str = "/"
    user: str = ""
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    config: dict[str, str] = field(default_factory=dict)
    """ENTRYPOINT, CMD, HEALTHCHECK as they are written."""

    def save(self) -> None:
        kept = {"environment": self.environment, "workdir": self.workdir, "user": self.user, "config": self.config}
        self.folder.with_suffix(".json").write_text(json.dumps(kept, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Root:
        kept = json.loads(folder.with_suffix(".json").read_text())
        return cls(folder, kept["environment"], {}, kept["workdir"], kept["user"], config=kept["config"])

    def execute(self, words: Sequence[str], extra: dict[str, str] | None = None) -> int:
        """Run a command in this root, as its user; its exit status."""
        command = ["chroot"]
        if self.user and self.user != "root":
            command += [f"--userspec={self.user}", "--groups="]
        inside = f'cd {self.workdir} && exec "$@"'
        command += [str(self.folder), "/bin/sh", "-c", inside, "sh", *words]
        environment = {"HOME": "/root", **self.environment, **self.arguments, **(extra or {})}
        with mounted(self.folder):
            child = subprocess.Popen(command, env=environment)
            signal.signal(
                signal.SIGTERM, lambda number, frame: child.send_signal(number)
            )  # and then take away the mounts
            try:
                return child.wait()
            finally:
                child.kill()
                child.wait()


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    """/proc, /sys and /dev of this machine in `root`, and how names are resolved."""
    done: list[Path] = []
    try:
        for name in ("proc", "sys", "dev"):
            (root / name).mkdir(exist_ok=True)
            subprocess.run(["mount", "--rbind", "--make-rslave", f"/{name}", str(root / name)], check=True)
            done.append(root / name)
        for name in FROM_HOST:
            (root / name).unlink(missing_ok=True)
            shutil.copy(f"/{name}", root / name)
        yield
    finally:
        for place in reversed(done):
            subprocess.run(["umount", "--recursive", "--lazy", str(place)], check=True)


def mounts_below(folder: Path) -> list[str]:
    """What is mounted in there: removing it would remove what is behind the mount."""
    points = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    return [point for point in points if Path(point).is_relative_to(folder)]


class Context:
    """The files that COPY may take: those below the checkout that .dockerignore leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        text = (folder / ".dockerignore").read_text(encoding="utf-8")
        self.rules = [line for line in text.splitlines() if line and not line.startswith("#")]

    def leaves(self, relative: Path) -> bool:
        """The last rule that fits a path or a folder above it decides (docs.docker.com/build/concepts/context)."""
        kept = True
        for rule in self.rules:
            pattern = rule.removeprefix("!")
            if any(_fits(path, pattern) for path in (relative, *relative.parents) if path.parts):
                kept = rule.startswith("!")
        return kept

    def copy(self, source: str, target: Path) -> int:
        """How many files: those of a folder go into `target`, as Docker does it."""
        copied = 0
        for start in sorted(self.folder.glob(source)):
            for path in [start] if start.is_file() else sorted(start.rglob("*")):
                if not path.is_file() or not self.leaves(path.relative_to(self.folder)):
                    continue
                if start.is_dir():
                    to = target / path.relative_to(start)
                else:
                    to = target / path.name if target.is_dir() else target
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)
                copied += 1
        return copied


def _fits(path: Path, pattern: str) -> bool:
    """Go's filepath.Match, and `**` for any number of folders."""
    if pattern == "**":
        return True
    if pattern.startswith("**/"):
        return any(_fits(Path(*path.parts[start:]), pattern[3:]) for start in range(len(path.parts)))
    wanted = Path(pattern).parts
    return len(wanted) == len(path.parts) and all(map(fnmatch, path.parts, wanted))


class Builder:
    """Makes the stages of one file, those that the wanted one needs."""

    def __init__(self, file: Dockerfile, base: Path, into: Path, arguments: dict[str, str]) -> None:
        self.file = file
        self.base = base
        self.into = into
        self.given = arguments
        self.made: dict[str, Root] = {}
        self.context = Context(HERE)

    def make(self, stage: Stage) -> Root:
        names = {other.name: other for other in self.file.stages if other.name}
        folder = self.into / (stage.name or "image")
        if stage.base in names:
            before = self.made.get(stage.base) or self.make(names[stage.base])
            root = Root(folder, dict(before.environment), {}, before.workdir, before.user, list(before.shell))
            root.config = dict(before.config)
            source = before.folder
        else:
            root, source = Root(folder), self.base
            if (kept := self.base.with_suffix(".json")).exists():
                root.environment = json.loads(kept.read_text())["environment"]
        say(f"FROM {stage.base} AS {folder.name}")
        if left := mounts_below(folder):
            sys.exit(
                f"still mounted from a run that was cut short: {' '.join(left)}; umount --recursive --lazy them first"
            )
        shutil.rmtree(folder, ignore_errors=True)
        self.into.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(folder)], check=True)
        for one in stage.instructions:
            self._do(root, one)
        root.save()
        self.made[stage.name or "image"] = root
        return root

    def _do(self, root: Root, one: Instruction) -> None:
        variables = {**root.environment, **root.arguments}
        match one.name:
            case "ARG":
                for key, value in one.pairs(variables).items():
                    root.arguments[key] = self.given.get(key, self.file.arguments.get(key, value) or value)
            case "ENV":
                root.environment |= one.pairs(variables)
            case "WORKDIR":
                root.workdir = str(Path(root.workdir) / fill(one.text, variables))
                (root.folder / root.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                root.user = fill(one.text, variables)
            case "SHELL":
                root.shell = one.words()
            case "COPY":
                self._copy(root, one.words())
            case "RUN":
                say(f"RUN {one.text[:110]}")
                began = time.monotonic()
                status = root.execute(one.words() if one.text.startswith("[") else [*root.shell, one.text])
                if status:
                    sys.exit(f"line {one.line}: exit status {status}: RUN {one.text}")
                say(f"  {time.monotonic() - began:.1f} s")
            case "VOLUME":
                (root.folder / one.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "CMD" | "ENTRYPOINT" | "HEALTHCHECK":
                root.config[one.name] = one.text
            case "LABEL" | "EXPOSE":
                pass  # no effect on what runs
            case _:
                sys.exit(f"line {one.line}: {one.name} is not tried here")

    def _copy(self, root: Root, words: list[str]) -> None:
        *sources, to = [word for word in words if not word.startswith("--")]
        options = [word for word in words if word.startswith("--")]
        target = root.folder / str(Path(root.workdir) / to).lstrip("/")
        if to.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        for option in options:
            if not option.startswith("--from="):
                sys.exit(f"COPY {option} is not tried here")
            other = option.removeprefix("--from=")
            stage = self.made.get(other) or self.make(self.file.stage(other))
            for source in sources:
                target.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", f"{stage.folder}{source}", str(target)], check=True)
        if not options:
            for source in sources:
                count = self.context.copy(source, target)
                if not count:
                    sys.exit(f"COPY {source}: .dockerignore leaves nothing of it")
                say(f"COPY {source} ({count} files)")


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.check.chroot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="the Dockerfile to try")
    parser.add_argument("--base", type=Path, help="the folder that stands for the base image")
    parser.add_argument("--into", type=Path, required=True, help="where the stages go, one folder each")
    parser.add_argument("--target", help="the stage to make; default: the last")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="STAGE",
        help="make nothing: run a command (default: the image's own) in a stage that is made, as its user",
    )
    asked = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("chroot and mount need root")
    into = asked.into.resolve()
    if asked.run:
        stage, *given = asked.run
        root = Root.load(into / stage)
        words = given or [word for name in ("ENTRYPOINT", "CMD") for word in json.loads(root.config.get(name, "[]"))]
        return root.execute(words, {name: value for name, value in os.environ.items() if name.startswith("EFT_")})
    if asked.base is None:
        parser.error("--base: a folder made by debootstrap")
    file = read(asked.file)
    builder = Builder(file, asked.base.resolve(), into, dict(text.split("=", 1) for text in asked.build_arg))
    root = builder.make(file.stage(asked.target))
    used = subprocess.run(["du", "-sm", str(root.folder)], capture_output=True, text=True, check=True).stdout.split()[0]
    say(f"{root.folder}: {used} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
