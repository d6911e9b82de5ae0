"""`eft service install|uninstall|status|run`: eft under systemd, on a bare machine.

`install` writes the units (box/systemd/units.py), makes the user and the folders, and starts them; done again, it
brings the units up to date. `--root DIR` writes below DIR and starts nothing (for images); `--dry-run` shows what it
would do.
"""

from __future__ import annotations

import argparse
import grp
import os
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from box.systemd import units
from box.systemd.units import UnitPart, UnitPlan
from core import HOME, command
from core.settings import Settings

UNITS = Path("/etc/systemd/system")
RUNNING_SYSTEMD = Path("/run/systemd/system")
CONFIG = Path("/etc/eft")
GPU_FILES = ("kfd", "dri/renderD*", "dri/card*", "nvidia[0-9]*", "nvidiactl", "nvidia-uvm")
GPU_GROUPS = ("render", "video")
"""Taken where there is no GPU's file yet: the driver may come later."""


class ServiceRefused(Exception):
    """It cannot be done; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class InstallTarget:
    """Where it is written: this machine, or a folder that becomes one."""

    root: Path
    dry: bool

    @property
    def here(self) -> bool:
        """Whether commands are run, too."""
        return self.root == Path("/") and not self.dry

    def at(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def write(self, path: Path, text: str, mode: int) -> None:
        place = self.at(path)
        if self.dry:
            print(f"--- {path} ({mode:04o})\n{text}")
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        aside = place.with_name(f".{place.name}.new")
        aside.write_text(text, encoding="utf-8")
        aside.chmod(mode)
        aside.replace(place)
        print(f"{place}: written")

    def run(self, *words: str) -> None:
        """A command that has to succeed; raises ServiceRefused with what it said."""
        if not self.here:
            if self.dry:
                print(f"$ {' '.join(words)}")
            return
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServiceRefused(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()}")


# --- install ---------------------------------------------------------------------------------------------


def install(target: InstallTarget, parts: Sequence[UnitPart], user: str, data: Path, start: bool) -> None:
    """Raises ServiceRefused."""
    if target.here:
        _able(parts, user)
    grace = stop_grace(target.at(CONFIG / "eft.env"))
    group = group_of(target, user)
    _one_root(target.at(CONFIG / "eft.env"), data)
    plan = UnitPlan(
        home=HOME,
        python=Path(sys.executable),
        data=data,
        user=user,
        group=group or user,
        config=CONFIG,
        stop_grace=grace,
        groups=gpu_groups(target.at(Path("/dev")), target.at(Path("/etc/group"))),
        credentials=tuple(name for name in units.CREDENTIALS if target.at(CONFIG / "credentials" / name).exists()),
    )
    if target.here:
        _make_user(target, user, data, new=group is None)
    if not target.at(CONFIG / "eft.env").exists():
        target.write(CONFIG / "eft.env", units.ENV_TEMPLATE.format(config=CONFIG), 0o600)
    if data.parent != units.STATE and target.here:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.chown(data, user, plan.group if not plan.group.isdecimal() else int(plan.group))
    for part in parts:
        target.write(UNITS / units.name(part), units.render(part, plan), 0o644)
    target.run("systemctl", "daemon-reload")
    if start:
        # Not `enable --now`: the restart, which an update needs, would end a first start amid its migration.
        target.run("systemctl", "enable", *(units.name(part) for part in parts))
        target.run("systemctl", "restart", *(units.name(part) for part in parts))
    if target.here:
        _say_next(parts, data, start)


def _able(parts: Sequence[UnitPart], user: str) -> None:
    if os.geteuid() != 0:
        raise ServiceRefused("units are written as root: sudo, or --dry-run, or --root DIR")
    if not RUNNING_SYSTEMD.is_dir():
        raise ServiceRefused(
            "systemd does not run this machine; `eft up` needs no service manager, --root DIR writes the units"
        )
    if user == "root":
        raise ServiceRefused("--user root: trainers run what data and models make them run; give it a user of its own")
    others: tuple[UnitPart, ...] = ("api", "worker") if "all" in parts else ("all",)
    there = [units.name(part) for part in others if (UNITS / units.name(part)).exists()]
    if there:
        raise ServiceRefused(
            f"{', '.join(there)} is installed, and would serve this box as well: `eft service uninstall` first"
        )
    for path in (HOME, Path(sys.executable)):
        closed = closed_to_others(path)
        if closed is not None:
            raise ServiceRefused(
                f"user {user} could not enter {closed}, and {path} is below it: keep the checkout and its .venv where "
                "everybody may read (e.g. /opt/eft), and install from there"
            )


def closed_to_others(path: Path) -> Path | None:
    """The folder on the way to `path`, links followed, that not everybody may enter; None if there is none."""
    for one in (path, path.resolve()):
        for folder in (one, *one.parents):
            mode = folder.stat().st_mode
            if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
                return folder
    return None


def group_of(target: InstallTarget, user: str) -> str | None:
    """The primary group of a user: its name, or its number where it has none; None: there is no such user yet, and it
    will have a group of its own name. Users of this machine may come from a directory, those of a folder lie in it."""
    numbers, names = {}, {}
    if target.root == Path("/"):
        with suppress(KeyError):
            numbers[user] = str(pwd.getpwnam(user).pw_gid)
            names[numbers[user]] = grp.getgrgid(int(numbers[user])).gr_name
    else:
        numbers = {fields[0]: fields[3] for fields in _database(target.at(Path("/etc/passwd")), 4)}
        names = {fields[2]: fields[0] for fields in _database(target.at(Path("/etc/group")), 3)}
    return names.get(numbers[user], numbers[user]) if user in numbers else None


def _database(path: Path, fields: int) -> list[list[str]]:
    """Lines of passwd(5) or group(5) with at least so many fields."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [parts for line in lines if len(parts := line.split(":")) >= fields]


def _make_user(target: InstallTarget, user: str, data: Path, *, new: bool) -> None:
    if new:
        with suppress(KeyError):
            grp.getgrnam(user)
            raise ServiceRefused(
                f"there is a group {user} but no such user: make the user (useradd --gid {user} {user}) first"
            )
        words = ("useradd", "--system", "--user-group", "--home-dir", str(data), "--shell", "/usr/sbin/nologin", user)
        target.run(*words)
        print(f"user {user}: made")


def gpu_groups(dev: Path, group_file: Path) -> tuple[str, ...]:
    """The groups that own the GPUs' files, without root's: names where they have one. Where there are no such files
    yet, those of GPU_GROUPS that exist: a unit that names a group nobody knows does not start."""
    names = {}
    if group_file.exists():
        names = {fields[2]: fields[0] for fields in _database(group_file, 3)}
    numbers = {str(path.stat().st_gid) for pattern in GPU_FILES for path in dev.glob(pattern)} - {"0"}
    if numbers:
        return tuple(sorted(names.get(number, number) for number in numbers))
    return tuple(name for name in GPU_GROUPS if name in names.values())


def stop_grace(env_file: Path) -> float:
    """EFT_STOP_GRACE_SECONDS as the service will see it, seconds. Raises ServiceRefused where it is no number."""
    default = float(Settings.model_fields["stop_grace_seconds"].default)
    text = dict(variables(env_file)).get("EFT_STOP_GRACE_SECONDS") if env_file.exists() else None
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ServiceRefused(f"{env_file}: EFT_STOP_GRACE_SECONDS={text} is not a number of seconds") from None


def _one_root(env_file: Path, data: Path) -> None:
    """Raises ServiceRefused where EFT_DATA names another folder of this box than --data: EFT_DATA would count, and the
    unit may only enter --data. An object store's own folder on this box is that of --data."""
    text = dict(variables(env_file)).get("EFT_DATA", "") if env_file.exists() else ""
    if text and not text.startswith("s3://") and Path(text) != data:
        raise ServiceRefused(
            f"{env_file}: EFT_DATA={text}, but --data is {data}: the service would work in the one, and may write into "
            f"the other only; take EFT_DATA out of that file, or say --data {text}"
        )


def variables(env_file: Path) -> Iterator[tuple[str, str]]:
    """Lines NAME=VALUE of an EnvironmentFile; quotes around a value are not part of it."""
    for line in env_file.read_text(encoding="utf-8").splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";")):
            yield name.strip(), value.strip().strip("'\"")


def _say_next(parts: Sequence[UnitPart], data: Path, start: bool) -> None:
    names = " ".join(units.name(part) for part in parts)
    print(f"{'started' if start else 'not started'}: {names}")
    print(f"  settings   {CONFIG / 'eft.env'}, then: systemctl restart {names}")
    print(f"  log        journalctl -u {units.name(parts[0])} -f")
    if "all" in parts:
        print(f"  API key    {data / 'first.key'}, as soon as it is up: sudo cat it, use it, remove it")
    elif "api" in parts:
        print("  API key    eft service run api.auth.keys create --project default --user admin")
    if not shutil.which("cc") and not shutil.which("gcc"):
        print("  note       no C compiler on the PATH: Triton's kernels need one (apt-get install gcc)")


# --- run -------------------------------------------------------------------------------------------------

RUN_UNIT = "eft-run"


def run_command(
    unit: str, credentials: Sequence[str], module: str, arguments: Sequence[str], terminal: bool
) -> list[str]:
    """`python -m module …` as the service whose unit file reads `unit` would run it: its user, folder, settings and
    secrets. systemd-run(1) hands over what a shell could not: files that root alone may read."""
    said = dict(line.partition("=")[::2] for line in unit.splitlines() if "=" in line and not line.startswith("#"))
    words = ["systemd-run", "--quiet", "--collect", "--wait", "--pty" if terminal else "--pipe", f"--unit={RUN_UNIT}"]
    words += [f"--uid={said['User']}", f"--gid={said['Group']}"]
    words += [f"--property={name}={said[name]}" for name in ("WorkingDirectory", "EnvironmentFile") if name in said]
    for line in unit.splitlines():
        name, _, value = line.partition("=")
        if name == "Environment" and "/run/credentials/" not in value:
            words.append(f"--property=Environment={value}")
    for credential in credentials:
        words += [f"--property=LoadCredential={credential}:{CONFIG / 'credentials' / credential}"]
        words += [f"--setenv=EFT_{credential.upper()}_FILE=/run/credentials/{RUN_UNIT}.service/{credential}"]
    return [*words, sys.executable, "-m", module, *arguments]


def run(target: InstallTarget, module: str, arguments: Sequence[str]) -> int:
    """Its exit status. Raises ServiceRefused."""
    parts = installed(target)
    if not parts:
        raise ServiceRefused("nothing is installed: `eft service install` first")
    if target.here and os.geteuid() != 0:
        raise ServiceRefused("only root may become the service's user and read its secrets: sudo")
    unit = target.at(UNITS / units.name(parts[0])).read_text(encoding="utf-8")
    credentials = [name for name in units.CREDENTIALS if target.at(CONFIG / "credentials" / name).exists()]
    command = run_command(unit, credentials, module, arguments, sys.stdin.isatty() and sys.stdout.isatty())
    if not target.here:
        print(shlex.join(command))
        return 0
    return subprocess.run(command, check=False).returncode


# --- uninstall, status -----------------------------------------------------------------------------------


def installed(target: InstallTarget) -> list[UnitPart]:
    return [part for part in units.PARTS if target.at(UNITS / units.name(part)).exists()]


def uninstall(target: InstallTarget) -> None:
    """Stop and remove the units. Data, settings and the user stay. Raises ServiceRefused."""
    if target.here and os.geteuid() != 0:
        raise ServiceRefused("units are removed as root: sudo, or --dry-run")
    parts = installed(target)
    if not parts:
        print("nothing is installed")
        return
    target.run("systemctl", "disable", "--now", *(units.name(part) for part in parts))
    for part in parts:
        if target.dry:
            print(f"rm {UNITS / units.name(part)}")
        else:
            target.at(UNITS / units.name(part)).unlink()
            print(f"{target.at(UNITS / units.name(part))}: removed")
    target.run("systemctl", "daemon-reload")
    print(f"kept: the data root, {CONFIG}, and the user")


SHOWN = ("ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "TimeoutStopUSec")


def status(target: InstallTarget) -> int:
    """What is installed and how it is. Exit status 0: all of it is active; 3 otherwise, as systemctl has it."""
    parts = installed(target)
    if not parts:
        print("nothing is installed: `eft service install`")
        return 3
    grace = stop_grace(target.at(CONFIG / "eft.env"))
    well = True
    for part in parts:
        name = units.name(part)
        text = target.at(UNITS / name).read_text(encoding="utf-8")
        if f"TimeoutStopSec={units.stop_seconds(part, grace):g}\n" not in text:
            print(
                f"{name}: its TimeoutStopSec does not fit EFT_STOP_GRACE_SECONDS={grace:g}: `eft service install` again"
            )
        if not target.here:
            print(f"{name}: written")
            continue
        seen = _show(name)
        active = seen.get("ActiveState") == "active"
        well &= active
        print(
            f"{name}: {seen.get('ActiveState', 'unknown')} ({seen.get('SubState', '?')}), "
            f"{seen.get('UnitFileState') or 'unknown'} at boot, process {seen.get('MainPID', '?')}, "
            f"started again {seen.get('NRestarts', '?')} times"
        )
        if not active:
            print(f"  journalctl -u {name} -n 50 says more")
    return 0 if well else 3


def _show(name: str) -> dict[str, str]:
    done = subprocess.run(
        ["systemctl", "show", name, *(f"--property={one}" for one in SHOWN)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ServiceRefused(f"systemctl does not answer: {done.stderr.strip()}")
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


# --- the command -----------------------------------------------------------------------------------------

EPILOG = """examples:
  sudo eft service install                the whole service: API, embedded broker, SQLite, worker
  sudo eft service install worker         only a worker, with a remote database and broker (/etc/eft/eft.env)
  eft service install --dry-run           what would be written
  sudo eft service run api.auth.keys create --project default --user admin
                                          a command in the service's own environment (also box.doctor)
exit status: 0 done; 1 refused, with the reason; 3 status: something is not active"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eft service",
        description="eft under systemd: write the units, remove them, look at them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="write below DIR, start nothing")
    common.add_argument("--dry-run", action="store_true", help="show what would be done, and do nothing")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("install", parents=[common], help="write the units, and start them")
    add.add_argument(
        "parts", nargs="*", metavar="PART", help="all (default: one unit for everything), or api, worker, or both"
    )
    add.add_argument("--user", default="eft", help="whom it runs as; made if new (default: %(default)s)")
    add.add_argument("--data", type=Path, default=Path("/var/lib/eft"), help="the data root (default: %(default)s)")
    add.add_argument("--no-start", action="store_true", help="write the units only")
    commands.add_parser("uninstall", parents=[common], help="stop and remove the units; data and settings stay")
    commands.add_parser("status", parents=[common], help="show the installed units and their state")
    ask = commands.add_parser(
        "run", parents=[common], help="run a module with the service's user, settings and secrets"
    )
    ask.add_argument("module", metavar="MODULE", help="e.g. api.auth.keys, box.doctor, core.db.migrate")
    ask.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="what the module is given")
    return parser


def _parts(given: list[str]) -> list[UnitPart]:
    chosen: list[UnitPart] = [part for part in units.PARTS if part in (given or ["all"])]
    unknown = sorted(set(given) - set(units.PARTS))
    if unknown:
        raise ServiceRefused(f"unknown part {', '.join(unknown)}: all, api or worker")
    if "all" in chosen and len(chosen) > 1:
        raise ServiceRefused("all is API and worker in one: give it alone")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    target = InstallTarget(asked.root.absolute(), asked.dry_run)
    try:
        match asked.command:
            case "install":
                if not asked.data.is_absolute():
                    raise ServiceRefused(f"--data {asked.data}: an absolute path is needed")
                install(target, _parts(asked.parts), asked.user, asked.data, not asked.no_start)
            case "uninstall":
                uninstall(target)
            case "status":
                return status(target)
            case "run":
                return run(target, asked.module, asked.arguments)
    except (ServiceRefused, OSError) as error:
        print(f"eft service: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    command.run("eft service", main)
