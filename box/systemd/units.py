"""systemd units of this installation, as text: the whole service, or the API and a worker apart.

Pure: what they say follows from a `UnitPlan`. Directives are those of systemd.exec(5), systemd.service(5) and
systemd.resource-control(5), version 249 (Ubuntu 22.04) or newer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never, get_args

UnitPart = Literal["all", "api", "worker"]
PARTS: tuple[UnitPart, ...] = get_args(UnitPart)
STATE = Path("/var/lib")
"""What StateDirectory= is below."""
CREDENTIALS = ("database_password", "broker_password", "s3_secret_access_key")
"""Secrets that systemd hands over as files, where they lie in the folder of the configuration."""
WORKER_LEAVES_SECONDS = 45.0
"""From the end of the grace to the end of the worker: jobs are handed back, GPUs looked at (as box.up waits)."""
API_LEAVES_SECONDS = 20.0
BROKER_LEAVES_SECONDS = 20.0
SPARE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What is installed, where, and for whom."""

    home: Path
    """The checkout."""
    python: Path
    data: Path
    user: str
    group: str
    """The user's own: a name, or a number where it has none."""
    config: Path
    """Folder of eft.env and of the credentials."""
    stop_grace: float
    """EFT_STOP_GRACE_SECONDS, seconds."""
    groups: tuple[str, ...] = ()
    """Those that may use the GPUs' device files, by name or number."""
    credentials: tuple[str, ...] = ()
    """Those of CREDENTIALS whose files exist."""
    after: tuple[str, ...] = field(default=("postgresql.service", "redis-server.service", "valkey-server.service"))
    """Units that start first if they are on this box."""


def name(part: UnitPart) -> str:
    return "eft.service" if part == "all" else f"eft-{part}.service"


def stop_seconds(part: UnitPart, grace: float) -> float:
    """What an orderly end may take: systemd kills everything when it is over."""
    match part:
        case "all":
            return grace + WORKER_LEAVES_SECONDS + API_LEAVES_SECONDS + BROKER_LEAVES_SECONDS + SPARE_SECONDS
        case "worker":
            return grace + WORKER_LEAVES_SECONDS + SPARE_SECONDS
        case "api":
            return API_LEAVES_SECONDS + SPARE_SECONDS
        case _:
            assert_never(part)


def render(part: UnitPart, plan: UnitPlan) -> str:
    """The unit file."""
    sections = {"Unit": _unit(part, plan), "Service": _service(part, plan), "Install": _install()}
    blocks = ["\n".join([f"[{title}]", *lines]) for title, lines in sections.items()]
    return "# Written by `eft service install`; the next install writes it again. Own lines: `systemctl edit`.\n" + (
        "\n\n".join(blocks) + "\n"
    )


def _unit(part: UnitPart, plan: UnitPlan) -> Iterator[str]:
    what = {"all": "API, broker and worker of this box", "api": "API", "worker": "worker of this box"}[part]
    yield f"Description=eft, the fine-tuning service: {what}"
    yield f"Documentation=file:{_escaped(plan.home / 'README.md')}"
    before = plan.after if part != "worker" else (*plan.after, name("api"))
    yield f"After=network-online.target nvidia-persistenced.service {' '.join(before)}"
    yield "Wants=network-online.target"
    yield "# Always restarted: the database may come back after hours."
    yield "StartLimitIntervalSec=0"


def _service(part: UnitPart, plan: UnitPlan) -> Iterator[str]:
    yield "Type=exec"
    yield f"User={plan.user}"
    yield f"Group={plan.group}"
    yield f"WorkingDirectory={_escaped(plan.home)}"
    yield f'Environment="PYTHONPATH={_escaped(plan.home)}" PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1'
    yield f'Environment="EFT_DATA={_escaped(plan.data)}" "EFT_WORK={_escaped(plan.data)}"'
    for credential in plan.credentials:
        yield f"LoadCredential={credential}:{_escaped(plan.config / 'credentials' / credential)}"
        yield f"Environment=EFT_{credential.upper()}_FILE=/run/credentials/{name(part)}/{credential}"
    yield f"EnvironmentFile=-{_escaped(plan.config / 'eft.env')}"
    python = _quoted(plan.python)
    match part:
        case "all":
            yield f"ExecStart={python} -m box.up --key-file {_quoted(plan.data / 'first.key')}"
        case "api":
            yield f"ExecStartPre={python} -m core.db.migrate"
            yield f"ExecStart={python} -m api"
        case "worker":
            yield f"ExecStart={python} -m worker"
        case _:
            assert_never(part)
    yield "Restart=always"
    yield "RestartSec=5"
    yield "# 78: it would only end so again, until somebody has changed something; its last line says what."
    yield "RestartPreventExitStatus=78"
    yield "# The main process is asked to stop and ends its own children, after their checkpoints; what is left then is"
    yield f"# killed. Longer than EFT_STOP_GRACE_SECONDS ({plan.stop_grace:g}) by what handing jobs back takes."
    yield "KillMode=mixed"
    yield f"TimeoutStopSec={stop_seconds(part, plan.stop_grace):g}"
    yield "# Out of memory costs the trainer that took it, and its worker sees to that; not the whole service."
    yield "OOMPolicy=continue"
    yield "LimitNOFILE=65536"
    yield "UMask=0077"
    yield from _devices(part, plan)
    yield from _hardening(plan)


def _devices(part: UnitPart, plan: UnitPlan) -> Iterator[str]:
    """Device rules: a part that may use GPUs sees these, and no part sees any other device."""
    if part == "api":
        yield "PrivateDevices=yes"
        return
    yield "# Drivers pin the pages they copy from."
    yield "LimitMEMLOCK=infinity"
    yield "TasksMax=infinity"
    yield "# AMD: /dev/kfd and /dev/dri; NVIDIA: /dev/nvidia*, which their driver names in /proc/devices."
    yield "DevicePolicy=closed"
    yield "DeviceAllow=/dev/kfd rw"
    yield "DeviceAllow=char-kfd rw"
    yield "DeviceAllow=char-drm rw"
    yield "DeviceAllow=char-nvidia* rw"
    if plan.groups:
        yield f"SupplementaryGroups={' '.join(plan.groups)}"


def _hardening(plan: UnitPlan) -> Iterator[str]:
    yield "NoNewPrivileges=yes"
    yield "CapabilityBoundingSet="
    yield "ProtectSystem=strict"
    if plan.data.parent == STATE:
        yield f"StateDirectory={_escaped(Path(plan.data.name))}"
        yield "StateDirectoryMode=0700"
    else:
        yield f"ReadWritePaths={_quoted(plan.data)}"
    needed = (plan.home, plan.python, plan.data)
    yield f"ProtectHome={'read-only' if any(_below_home(path) for path in needed) else 'yes'}"
    for directive in (
        "PrivateTmp",
        "ProtectClock",
        "ProtectControlGroups",
        "ProtectHostname",
        "ProtectKernelLogs",
        "ProtectKernelModules",
        "ProtectKernelTunables",
        "LockPersonality",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
    ):
        yield f"{directive}=yes"
    yield "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK"
    yield "SystemCallArchitectures=native"
    yield "SystemCallFilter=@system-service"
    yield "SystemCallErrorNumber=EPERM"
    yield "# Not here: MemoryDenyWriteExecute (Triton and the drivers compile), PrivateDevices of a worker (its GPUs)."


def _install() -> Iterator[str]:
    yield "WantedBy=multi-user.target"


def _below_home(path: Path) -> bool:
    return any(path.is_relative_to(home) for home in ("/home", "/root", "/run/user"))


def _escaped(path: Path) -> str:
    """Where systemd reads to the end of the line: only its specifiers need care."""
    return str(path).replace("%", "%%")


def _quoted(path: Path) -> str:
    """Where systemd splits words and, on command lines, puts variables in."""
    text = _escaped(path).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{text}"' if any(char in text for char in " \t'\";\\$") else text


ENV_TEMPLATE = """\
# Settings of eft on this box (docs/settings.md has them all), read by the units of `eft service install`.
# Made once, and yours from now on: no install changes it. Passwords need not be here: files
# {config}/credentials/database_password and broker_password are handed over by systemd (install again to take them).
#EFT_HOST=127.0.0.1
#EFT_PORT=8321
#EFT_DATABASE_URL=postgresql+psycopg://eft@127.0.0.1/eft
#EFT_BROKER_URL=redis://127.0.0.1:6379/0
#EFT_MODEL_ROOTS=/srv/models
#HF_TOKEN=
"""
