"""`eft service`: what it writes, read back as systemd would, and by systemd itself where that is installed."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from box.systemd import service, units
from box.systemd.units import PARTS, UnitPart, UnitPlan
from core import HOME
from core.settings import Settings

PLAN = UnitPlan(
    home=Path("/opt/eft"), python=Path("/opt/eft/.venv/bin/python"), data=Path("/var/lib/eft"), user="eft",
    group="eft", config=Path("/etc/eft"), stop_grace=120.0, groups=("render", "video"),
)  # fmt: skip
SECTIONS = {
    "Unit": {"Description", "Documentation", "After", "Wants", "StartLimitIntervalSec"},
    "Install": {"WantedBy"},
}


def parse(text: str) -> dict[str, list[tuple[str, str]]]:
    """systemd.syntax(7): sections of assignments, each of which may come again."""
    found: dict[str, list[tuple[str, str]]] = {}
    section = ""
    for line in text.splitlines():
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            found[section] = []
            continue
        name, equals, value = line.partition("=")
        assert equals and name == name.strip() and re.fullmatch(r"[A-Z][A-Za-z]+", name), line
        found[section].append((name, value))
    return found


def values(text: str, name: str) -> list[str]:
    return [value for key, value in parse(text)["Service"] if key == name]


@pytest.mark.parametrize("part", PARTS)
def test_a_unit_holds_what_the_service_needs(part: UnitPart) -> None:
    text = units.render(part, PLAN)
    read = parse(text)
    assert list(read) == ["Unit", "Service", "Install"]
    assert {name for name, _ in read["Unit"]} == SECTIONS["Unit"]
    assert dict(read["Install"]) == {"WantedBy": "multi-user.target"}
    once = {"User": "eft", "Group": "eft", "KillMode": "mixed", "Restart": "always", "RestartPreventExitStatus": "78",
            "NoNewPrivileges": "yes", "ProtectSystem": "strict", "CapabilityBoundingSet": "", "OOMPolicy": "continue",
            "EnvironmentFile": "-/etc/eft/eft.env", "StateDirectory": "eft", "ProtectHome": "yes"}  # fmt: skip
    for name, value in once.items():
        assert values(text, name) == [value], name
    module = {"all": "box.up", "api": "api", "worker": "worker"}[part]
    assert values(text, "ExecStart")[0].startswith(f"/opt/eft/.venv/bin/python -m {module}")
    assert float(values(text, "TimeoutStopSec")[0]) == units.stop_seconds(part, 120.0)


@pytest.mark.parametrize("part", ["all", "worker"])
def test_gpus_are_let_through_and_nothing_else(part: UnitPart) -> None:
    text = units.render(part, PLAN)
    assert values(text, "DevicePolicy") == ["closed"]
    assert values(text, "DeviceAllow") == ["/dev/kfd rw", "char-kfd rw", "char-drm rw", "char-nvidia* rw"]
    assert values(text, "SupplementaryGroups") == ["render video"]
    assert values(text, "LimitMEMLOCK") == ["infinity"]
    for would_stop_a_gpu in ("PrivateDevices", "MemoryDenyWriteExecute", "PrivateUsers", "ProcSubset"):
        assert not values(text, would_stop_a_gpu)
    assert values(units.render("api", PLAN), "PrivateDevices") == ["yes"]


def test_the_time_to_stop_follows_the_grace() -> None:
    assert units.stop_seconds("worker", 600.0) - units.stop_seconds("worker", 120.0) == 480.0
    for part in ("all", "worker"):
        assert units.stop_seconds(part, 120.0) >= 120.0 + 45.0, "what box.up waits for a worker"
    assert units.stop_seconds("all", 120.0) > 120.0 + 45.0 + 20.0 + 20.0, "worker, API and broker, one after the other"


def test_secrets_are_handed_over_by_systemd() -> None:
    plan = UnitPlan(
        **{**{name: getattr(PLAN, name) for name in UnitPlan.__slots__}, "credentials": ("database_password",)}
    )
    text = units.render("worker", plan)
    assert values(text, "LoadCredential") == ["database_password:/etc/eft/credentials/database_password"]
    variable = "EFT_DATABASE_PASSWORD_FILE=/run/credentials/eft-worker.service/database_password"
    assert variable in values(text, "Environment")
    assert {name.upper() for name in units.CREDENTIALS} <= {name.upper() for name in Settings.model_fields}


def test_paths_that_systemd_would_take_apart_are_kept_whole() -> None:
    odd = UnitPlan(
        home=Path("/home/ada/my 100% eft"), python=Path("/home/ada/my 100% eft/$v/python"), data=Path("/srv/d"),
        user="eft", group="eft", config=Path("/etc/eft"), stop_grace=1.0,
    )  # fmt: skip
    text = units.render("worker", odd)
    assert values(text, "WorkingDirectory") == ["/home/ada/my 100%% eft"]
    assert values(text, "ExecStart") == ['"/home/ada/my 100%% eft/$$v/python" -m worker']
    assert values(text, "ReadWritePaths") == ["/srv/d"] and not values(text, "StateDirectory")
    assert values(text, "ProtectHome") == ["read-only"], "the checkout is there"


def eft_service(*words: str, root: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    return subprocess.run(
        [sys.executable, "-m", "box.systemd.service", *words, "--root", str(root)],
        cwd=HOME, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_install_status_uninstall_below_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("EFT_")]:
        monkeypatch.delenv(name)

    def told(*words: str) -> tuple[int, str]:
        """Exit status and what was said."""
        code = service.main([*words, "--root", str(tmp_path)])
        return code, "".join(capsys.readouterr())

    assert eft_service("status", root=tmp_path).returncode == 3 == told("status")[0]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("video:x:44:\nrender:x:992:ada\n")
    done = eft_service("install", "api", "worker", root=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "etc/systemd/system"
    assert sorted(path.name for path in folder.iterdir()) == ["eft-api.service", "eft-worker.service"]
    settings = tmp_path / "etc/eft/eft.env"
    assert settings.stat().st_mode & 0o777 == 0o600
    for line in settings.read_text().splitlines():
        if line.startswith("#EFT_"):
            assert line[1:].partition("=")[0].removeprefix("EFT_").lower() in Settings.model_fields, line
    worker = (folder / "eft-worker.service").read_text()
    assert "SupplementaryGroups=render video" in worker and "TimeoutStopSec=180\n" in worker

    # What its administrator has set stays, and counts.
    settings.write_text('EFT_STOP_GRACE_SECONDS="600"\n')
    assert "does not fit EFT_STOP_GRACE_SECONDS=600" in told("status")[1]
    assert told("install", "api", "worker")[0] == 0
    assert "TimeoutStopSec=660\n" in (folder / "eft-worker.service").read_text()
    assert settings.read_text() == 'EFT_STOP_GRACE_SECONDS="600"\n'

    # Two data roots: it would work in the one, and be let into the other.
    settings.write_text("EFT_DATA=/srv/eft\n")
    code, words = told("install", "worker")
    assert code == 1 and "say --data /srv/eft" in words
    assert told("install", "worker", "--data", "/srv/eft")[0] == 0
    settings.write_text("EFT_DATA=s3://lab/eft\n")
    assert told("install", "worker")[0] == 0, "what it keeps itself is in --data"

    assert told("uninstall")[0] == 0
    assert not list(folder.iterdir()) and settings.exists()


@pytest.mark.parametrize(
    ("user", "group"), [("ada", "staff"), ("bob", "4711"), ("eft", "eft")],
    ids=["one of many in a group", "a group without a name", "not there yet"],
)  # fmt: skip
def test_a_user_that_is_there_serves_with_its_own_group(user: str, group: str, tmp_path: Path) -> None:
    """It need not have one of its name; the unit would not start, and no folder could be given to it."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("+\nada:x:1001:50:Ada:/home/ada:/bin/sh\nbob:x:1002:4711::/:/bin/sh\n")
    (tmp_path / "etc/group").write_text("staff:x:50:\n")
    assert service.main(["install", "worker", "--user", user, "--root", str(tmp_path)]) == 0
    text = (tmp_path / "etc/systemd/system/eft-worker.service").read_text()
    assert (values(text, "User"), values(text, "Group")) == ([user], [group])


def test_the_group_of_a_user_of_this_machine() -> None:
    target = service.InstallTarget(Path("/"), True)
    mine = pwd.getpwuid(os.getuid())
    assert service.group_of(target, mine.pw_name) in (str(mine.pw_gid), grp.getgrgid(mine.pw_gid).gr_name)
    assert service.group_of(target, "nobody-of-this-name") is None


@pytest.mark.parametrize(
    ("words", "refusal"),
    [(["gpu"], "unknown part gpu"), (["all", "api"], "give it alone"), (["--data", "rel"], "absolute path")],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service.main(["install", *words, "--root", str(tmp_path)]) == 1
    assert refusal in capsys.readouterr().err


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert service.main(["install", "--dry-run", "--root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "--- /etc/systemd/system/eft.service (0644)" in shown and "$ systemctl daemon-reload" in shown
    assert not list(tmp_path.iterdir())


def test_a_command_runs_as_the_service_does() -> None:
    unit = units.render("api", PLAN)
    words = service.run_command(unit, ["database_password"], "api.auth.keys", ["create", "--user", "a b"], False)
    assert words[0] == "systemd-run" and {"--uid=eft", "--gid=eft", "--pipe", "--wait"} <= set(words)
    assert "--property=EnvironmentFile=-/etc/eft/eft.env" in words and "--property=WorkingDirectory=/opt/eft" in words
    assert any("EFT_DATA=/var/lib/eft" in word for word in words)
    assert "--property=LoadCredential=database_password:/etc/eft/credentials/database_password" in words
    assert "--setenv=EFT_DATABASE_PASSWORD_FILE=/run/credentials/eft-run.service/database_password" in words
    assert words[-6:] == [sys.executable, "-m", "api.auth.keys", "create", "--user", "a b"]


def test_the_groups_are_those_of_the_device_files(tmp_path: Path) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    group = tmp_path / "group"
    group.write_text(f"video:x:44:\nmine:x:{os.getegid() or 4242}:\n")
    assert service.gpu_groups(tmp_path / "dev", group) == ("video",), "no file yet, and no group render here"
    (tmp_path / "dev/kfd").touch()
    if os.geteuid() == 0:
        os.chown(tmp_path / "dev/kfd", 0, 4242)
        assert service.gpu_groups(tmp_path / "dev", group) == ("mine",)
        os.chown(tmp_path / "dev/kfd", 0, 4243)
        assert service.gpu_groups(tmp_path / "dev", group) == ("4243",), "a number where there is no name"
    else:
        assert service.gpu_groups(tmp_path / "dev", group) == ("mine",)


def test_a_checkout_that_the_user_could_not_enter_is_found(tmp_path: Path) -> None:
    (tmp_path / "closed/eft").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert service.closed_to_others(tmp_path / "closed/eft") == tmp_path / "closed"
    assert service.closed_to_others(Path("/usr/bin")) is None


@pytest.mark.parametrize("parts", [["all"], ["api", "worker"]])
def test_systemd_itself_finds_nothing_wrong(parts: list[str], tmp_path: Path) -> None:
    """Where systemd is installed; without it, the tests above have read the same text."""
    assert service.main(["install", *parts, "--root", str(tmp_path)]) == 0
    files = sorted((tmp_path / "etc/systemd/system").iterdir())
    assert len(files) == len(parts)
    analyze = shutil.which("systemd-analyze")
    for path in files:
        assert {name for name, _ in parse(path.read_text())["Service"]} <= DIRECTIVES
    if analyze is not None:
        done = subprocess.run([analyze, "verify", "--man=no", *files], capture_output=True, text=True, check=False)
        ours = [line for line in done.stderr.splitlines() if "eft" in line]
        assert not ours, done.stderr


DIRECTIVES = {
    "Type", "User", "Group", "WorkingDirectory", "Environment", "LoadCredential", "EnvironmentFile", "ExecStart",
    "ExecStartPre", "Restart", "RestartSec", "RestartPreventExitStatus", "KillMode", "TimeoutStopSec",
    "OOMPolicy", "LimitNOFILE", "UMask", "PrivateDevices", "LimitMEMLOCK", "TasksMax", "DevicePolicy",
    "DeviceAllow", "SupplementaryGroups", "NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem",
    "StateDirectory", "StateDirectoryMode", "ReadWritePaths", "ProtectHome", "PrivateTmp", "ProtectClock",
    "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules",
    "ProtectKernelTunables", "LockPersonality", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    "RestrictAddressFamilies", "SystemCallArchitectures", "SystemCallFilter", "SystemCallErrorNumber",
}  # fmt: skip
"""Of systemd.service(5), systemd.exec(5), systemd.kill(5) and systemd.resource-control(5), those that are used."""
