"""`eft doctor` on boxes of many kinds, run as the process that people run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from box.doctor import gpus, variables
from box.doctor.__main__ import examine
from box.doctor.report import Report
from box.doctor.software import drivers
from core.db.engine import Database
from core.hardware.installed import build_of
from core.hardware.recording import parse
from core.settings import Settings
from tests.support.eft_forks import program
from tests.support.hardware import as_nobody, readable_folder, recording, unpack
from tests.support.selftest import lay

HOME = Path(__file__).resolve().parents[2]


def doctor(
    tmp_path: Path, *arguments: str, fixture: str | None = None, cold: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """`eft doctor` as a fork of what it imports, or `cold`."""
    box = tmp_path / "box"
    (box / "sys").mkdir(parents=True, exist_ok=True)
    if fixture is not None:
        unpack(fixture, box)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EFT_", "CUDA_", "HIP_"))}
    variables["PATH"] = f"{box / 'bin'}:{variables['PATH']}"
    variables |= {"EFT_SYSFS": str(box / "sys"), "EFT_DATA": str(tmp_path / "data"), "EFT_NODE": "box"} | environ
    command = [sys.executable, "-m", "box.doctor"] if cold else [program("box.doctor"), "doctor"]
    return subprocess.run(
        [*command, *arguments], cwd=HOME, env=variables, capture_output=True, text=True, timeout=60, check=False
    )


def examined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fixture: str | None, seconds: float = 20.0, **environ: str
) -> dict[str, Any]:
    """The report, without a process start."""
    box = tmp_path / "box"
    (box / "sys").mkdir(parents=True, exist_ok=True)
    if fixture is not None:
        unpack(fixture, box)
    for name in [name for name in os.environ if name.startswith(("EFT_", "CUDA_", "HIP_"))]:
        monkeypatch.delenv(name)
    set_here = {"EFT_SYSFS": str(box / "sys"), "EFT_DATA": str(tmp_path / "data"), "EFT_NODE": "box"} | environ
    for name, value in set_here.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{box / 'bin'}:{os.environ['PATH']}")
    return examine(seconds=seconds).as_dict()


def told(tmp_path: Path, **given: Any) -> dict[str, Any]:
    done = doctor(tmp_path, "--json", **given)
    assert "Traceback" not in done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report


def problems(report: dict[str, Any]) -> dict[str, str]:
    return {finding["what"]: finding["detail"] for finding in report["findings"] if finding["level"] == "problem"}


def test_where_there_is_no_installation_it_says_so_and_makes_nothing(tmp_path: Path) -> None:
    report = told(tmp_path)
    (found,) = [one["detail"] for one in report["findings"] if one["what"] == "data"]
    assert found.startswith(f"there is no installation at {tmp_path / 'data'}; EFT_DATA names where it is")
    assert not (tmp_path / "data").exists()
    (tmp_path / "data").mkdir(mode=0o700)
    Database(f"sqlite:///{tmp_path / 'data' / 'eft.db'}").now()  # empty, as a wrong start leaves it
    assert "there is no installation in it; EFT_DATA and EFT_DATABASE_URL" in problems(told(tmp_path))["schema"]


def test_a_bare_box_is_well(tmp_path: Path) -> None:
    report = told(tmp_path)
    assert report["ok"] and report["gpus"] == []
    assert report["determinism"]["class"] == "exact"
    assert {"eft", "python", "torch", "transformers", "peft", "linux"} <= set(report["versions"])
    found = [finding["what"] for finding in report["findings"]]
    assert found == ["gpus", "cpu", "torch", "data", "database", "sandbox", "broker"]
    assert not (tmp_path / "data").exists()  # it looks and makes nothing

    words = doctor(tmp_path, cold=True)
    assert words.returncode == 0 and words.stdout.rstrip().endswith("jobs can run here")


def test_an_amd_box_with_a_torch_that_is_not_for_it(tmp_path: Path) -> None:
    report = told(tmp_path, fixture="mi300x")
    (gpu,) = report["gpus"]
    assert (gpu["arch"], gpu["bf16"], gpu["fp8"], gpu["matrix"]) == ("gfx942", True, "fnuz", "mfma")
    assert [fault["key"] for fault in gpu["known_faults"]] == ["stores-past-4-gib", "expandable-segments"]
    assert report["determinism"]["class"] == "best effort"
    assert "install its ROCm build" in problems(report)["torch"]
    assert "mend first" in doctor(tmp_path, fixture="mi300x").stdout


def test_a_torch_that_is_not_the_tested_one_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions are those of the packages' metadata."""
    about = tmp_path / "site" / "torch-2.11.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")
    monkeypatch.syspath_prepend(str(about.parent))
    report = examined(monkeypatch, tmp_path, "mi300x")
    (note,) = [one["detail"] for one in report["findings"] if (one["level"], one["what"]) == ("note", "torch")]
    assert note.startswith("eft is tested with torch 2.13.0; with 2.11.0 jobs run")


BROKEN = {
    "hangs": "exec sleep 60",
    "fails": "echo the driver is gone >&2; exit 1",
    "prints nonsense": "head -c 3000 /dev/urandom",
    "floods": "exec cat /dev/zero",
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_programs_of_the_drivers_are_told_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tools = {"amd-smi", "rocm-smi", "nvidia-smi"}
    for name in tools:
        program = tmp_path / "box/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{BROKEN[how]}\n")
        program.chmod(0o755)
    report = examined(monkeypatch, tmp_path, "mi300x", seconds=0.5)
    assert [gpu["arch"] for gpu in report["gpus"]] == ["gfx942"]
    notes = [finding["detail"] for finding in report["findings"] if finding["what"] == "gpus"]
    assert {name for name in tools for note in notes if name in note} == tools
    assert set(problems(report)) == {"torch"}


def test_who_uses_a_card_and_how_its_self_test_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = tmp_path / "box"
    process = box / "sys/class/kfd/kfd/proc" / str(os.getpid())
    process.mkdir(parents=True)
    (process / "vram_47045").write_text(str(3 << 30))
    verdict = {
        "key": "k", "slot": "GPU-5d2a8f0c1b3e4d71", "node": "box", "device_name": "MI300X", "arch": "gfx942",
        "torch": "2.13.0+rocm7.2", "runtime": "rocm 7.2", "checked_at": "2026-11-21T10:00:00+00:00", "seconds": 9.0,
        "parts": {}, "ok": False, "told": ["flash attention is wrong here: memory-efficient attention instead"],
        "backends": {"attention": "efficient"},
    }  # fmt: skip
    folder = tmp_path / "data/cache/selftest"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(verdict))
    (folder / "older.json").write_text(
        json.dumps(verdict | {"checked_at": "2026-11-20T10:00:00+00:00", "refused": "x"})
    )
    (folder / "other.json").write_text(json.dumps(verdict | {"node": "another", "checked_at": "2026-11-22T10:00:00"}))
    (folder / "broken.json").write_text("{")
    report = examined(monkeypatch, tmp_path, "mi300x")
    (gpu,) = report["gpus"]
    assert gpu["processes"] == [{"pid": os.getpid(), "bytes": 3 << 30, "name": gpu["processes"][0]["name"]}]
    assert gpu["processes"][0]["name"] and gpu["memory_used_bytes"] == 297795584
    assert gpu["self_test"]["backends"] == {"attention": "efficient"}
    lines = [finding["detail"] for finding in report["findings"] if finding["what"] == "gpu 0"]
    assert any(f"in use by {os.getpid()} " in line and "3.0 GiB" in line for line in lines)
    assert any("flash attention is wrong here" in line for line in lines)

    (folder / "a.json").write_text(json.dumps(verdict | {"refused": "float32 products are wrong"}))
    assert "float32 products are wrong" in problems(examined(monkeypatch, tmp_path, "mi300x"))["gpu 0"]


def test_a_recording_of_a_box(tmp_path: Path) -> None:
    file = tmp_path / "machine.txt"
    done = doctor(tmp_path, "--record", str(file), fixture="mi300x-8")
    assert done.returncode == 0 and "Serial numbers are hashed" in done.stdout
    made = parse(file.read_text())
    assert made.source.startswith("recorded by `eft doctor --record`") and len(made.tools) >= 2
    assert "5d2a8f0c1b3e4d7" not in file.read_text()


def test_what_is_set_against_known_faults_is_told(tmp_path: Path) -> None:
    (gpu,) = told(tmp_path, fixture="strix-halo", PYTORCH_HIP_ALLOC_CONF="expandable_segments:True")["gpus"]
    changes = {change["variable"]: change for change in gpu["environment"]}
    assert changes["TORCH_BLAS_PREFER_HIPBLASLT"]["fault"] == "hipblaslt-wide-output"
    assert changes["PYTORCH_HIP_ALLOC_CONF"] | {"what": ""} == {
        "variable": "PYTORCH_HIP_ALLOC_CONF", "value": "", "ours": True, "fault": "expandable-segments", "what": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "what", "words"),
    [
        ({"EFT_CPU_SLOTS": "0"}, "settings", "EFT_CPU_SLOTS"),
        ({"EFT_GPUS": "3"}, "gpus", "--gpus names GPU 3"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "gpus", "HIP_VISIBLE_DEVICES=1 asks for a GPU"),
        ({"EFT_DATABASE_URL": "no url"}, "settings", "EFT_DATABASE_URL: `no url` is not a database"),
        ({"EFT_DATABASE_URL": "postgresql+psycopg://eft:hunter2@127.0.0.1:1/eft"}, "database", "does not answer"),
        ({"EFT_BROKER_URL": "redis://:hunter2@127.0.0.1:1/0"}, "broker", "does not answer"),
        ({"EFT_DATA": str(HOME / "README.md")}, "data", "is not a folder"),
        ({"EFT_DATA": str(HOME / "README.md" / "data")}, "data", "nothing can be made in"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_stops_jobs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], what: str, words: str
) -> None:
    report = examined(monkeypatch, tmp_path, None, **environ)
    assert not report["ok"] and words in problems(report)[what]
    assert "hunter2" not in json.dumps(report)


def test_a_problem_is_an_exit_status_and_no_trace(tmp_path: Path) -> None:
    done = doctor(tmp_path, EFT_DATABASE_URL="postgresql+psycopg://eft:hunter2@127.0.0.1:1/eft")
    assert done.returncode == 1 and "problems to mend first" in done.stdout
    assert not [word for word in ("Traceback", "hunter2") if word in done.stdout + done.stderr]


def test_an_old_schema_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "eft.db").touch()
    assert "run `eft migrate`" in problems(told(tmp_path))["schema"]


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.2.53211'\n", "ROCm 7.2"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "CUDA 13.0"),
        ("cuda = '12.8'\nhip = None\n", "CUDA 12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
    ],
)
def test_what_torch_is_built_for(text: str, build: str) -> None:
    assert build_of(text) == build


def test_cards_that_permissions_keep_away_are_no_box_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit status of 0 would send jobs to the CPU of a box with two MI210."""
    with readable_folder() as folder:
        root = unpack("container-no-group", folder / "box")
        monkeypatch.setenv("EFT_SYSFS", str(root / "sys"))
        (folder / "data").mkdir(mode=0o700)
        monkeypatch.setenv("EFT_DATA", str(folder / "data"))
        monkeypatch.setenv("EFT_NODE", "box")
        report = Report()
        with as_nobody():
            gpus.look(report, Settings(), recording("container-no-group").environment, 2.0)
    assert not report.ok
    assert any("not known" in finding.detail for finding in report.findings), "the data root is the service's"
    assert all("--group-add" in finding.detail for finding in report.findings if finding.level == "problem")


def test_cards_without_a_driver_are_no_box_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(monkeypatch, tmp_path, "no-driver")
    told = [
        finding["detail"]
        for finding in report["findings"]
        if (finding["what"], finding["level"]) == ("gpus", "problem")
    ]
    assert len(told) == 2
    assert "RX 7900 XT" in told[0] and "amdgpu-dkms" in told[0] and "docs/install-rocm.md" in told[0]
    assert "GeForce RTX 3090" in told[1] and "install NVIDIA's own driver" in told[1]
    (note,) = (finding["detail"] for finding in report["findings"] if "virtual machine" in finding["detail"])
    assert note not in told, "it is where somebody has put it"


def test_a_cpu_of_several_slots_has_one_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay(tmp_path / "data", "box", slot="cpu-0")
    report = examined(monkeypatch, tmp_path, None, EFT_CPU_SLOTS="2")
    (line,) = [finding["detail"] for finding in report["findings"] if finding["what"] == "cpu"]
    assert "passed" in line


@pytest.mark.parametrize("how", ["| head -c 1", ">&-", "> /dev/full"])
def test_nobody_who_listens_is_no_stack_trace(tmp_path: Path, how: str) -> None:
    environ = os.environ | {"EFT_DATA": str(tmp_path / "data"), "PYTHONIOENCODING": "ascii"}
    command = f"{shlex.quote(sys.executable)} -m box.doctor --json {how}"
    done = subprocess.run(command, shell=True, cwd=HOME, env=environ, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_drivers(tmp_path: Path) -> None:
    files = {
        "sys/module/amdgpu/version": "6.12.12\n",
        "opt/rocm/.info/version": "7.2.1-60\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = drivers(tmp_path)
    assert (found["amdgpu"], found["rocm"], found["nvidia"]) == ("6.12.12", "7.2.1-60", "560.35.03")
    assert set(drivers(tmp_path / "nothing")) == {"linux"}


def notes_of(report: dict[str, Any], what: str) -> list[str]:
    return [one["detail"] for one in report["findings"] if one["what"] == what and one["level"] == "note"]


def test_variables_that_no_setting_has_are_named_with_the_nearest_right_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = {"EFT_DATA_ROOT": "/srv", "EFT_QUITE_ELSE": "1", "EFT_API_KEY": "k", "EFT_S3_SECRET_ACCESS_KEY_FILE": ""}
    found = notes_of(examined(monkeypatch, tmp_path, None, **odd), "settings")
    assert found == [
        "EFT_DATA_ROOT is not a setting of eft, and nothing reads it; did you mean EFT_DATA_ROOTS?",
        "EFT_QUITE_ELSE is not a setting of eft, and nothing reads it (docs/settings.md has them all)",
    ]


def test_folders_that_do_not_exist_are_named_with_their_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    roots = f"{tmp_path / 'there'}:{tmp_path / 'gone'}"
    found = notes_of(examined(monkeypatch, tmp_path, None, EFT_DATA_ROOTS=roots), "settings")
    assert found == [f"EFT_DATA_ROOTS: there is no folder {tmp_path / 'gone'}; jobs cannot use a path below it"]


def test_every_variable_that_the_code_reads_is_known_to_the_doctor() -> None:
    read = {
        name
        for folder in ("api", "core", "worker", "box", "client/eft")
        for path in (HOME / folder).rglob("*.py")
        for name in re.findall(r"""environ(?:\.get\(|\[)["'](EFT_[A-Z0-9_]+)["']""", path.read_text(encoding="utf-8"))
    }
    report = Report()
    variables.unknown(report, dict.fromkeys(read, ""))
    assert read and not report.findings
