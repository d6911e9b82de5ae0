"""`eft doctor` on boxes of many kinds, run as the process that people run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from box.software import build_of, drivers
from tests.support.hardware import unpack

HOME = Path(__file__).resolve().parents[2]


def doctor(
    tmp_path: Path, *arguments: str, fixture: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    box = tmp_path / "box"
    (box / "sys").mkdir(parents=True, exist_ok=True)
    if fixture is not None:
        unpack(fixture, box)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("EFT_", "CUDA_", "HIP_"))}
    variables |= {"EFT_SYSFS": str(box / "sys"), "EFT_DATA": str(tmp_path / "data")} | environ
    command = [sys.executable, "-m", "box.doctor", *arguments]
    return subprocess.run(command, cwd=HOME, env=variables, capture_output=True, text=True, timeout=60, check=False)


def told(tmp_path: Path, **given: Any) -> dict[str, Any]:
    done = doctor(tmp_path, "--json", **given)
    assert "Traceback" not in done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    return report


def problems(report: dict[str, Any]) -> dict[str, str]:
    return {finding["what"]: finding["detail"] for finding in report["findings"] if finding["level"] == "problem"}


def test_a_bare_box_is_well(tmp_path: Path) -> None:
    report = told(tmp_path)
    assert report["ok"] and report["gpus"] == []
    assert report["determinism"]["class"] == "exact"
    assert {"eft", "python", "torch", "transformers", "peft", "linux"} <= set(report["versions"])
    assert not (tmp_path / "data").exists()  # it looks and makes nothing

    words = doctor(tmp_path)
    assert words.returncode == 0 and words.stdout.rstrip().endswith("jobs can run here")


def test_an_amd_box_with_a_torch_that_is_not_for_it(tmp_path: Path) -> None:
    report = told(tmp_path, fixture="mi300x")
    (gpu,) = report["gpus"]
    assert (gpu["arch"], gpu["bf16"], gpu["fp8"], gpu["matrix"]) == ("gfx942", True, "fnuz", "mfma")
    assert [fault["key"] for fault in gpu["known_faults"]] == ["stores-past-4-gib", "expandable-segments"]
    assert report["determinism"]["class"] == "best effort"
    assert "install its ROCm build" in problems(report)["torch"]
    assert "mend first" in doctor(tmp_path, fixture="mi300x").stdout


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
        ({"EFT_DATABASE_URL": "no url"}, "database", "EFT_DATABASE_URL is no SQLAlchemy URL"),
        ({"EFT_DATABASE_URL": "postgresql+psycopg://eft:hunter2@127.0.0.1:1/eft"}, "database", "does not answer"),
        ({"EFT_BROKER_URL": "redis://:hunter2@127.0.0.1:1/0"}, "broker", "does not answer"),
        ({"EFT_DATA": str(HOME / "README.md")}, "data", "is no folder"),
        ({"EFT_DATA": str(HOME / "README.md" / "data")}, "data", "nothing can be made in"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_stops_jobs_is_named(tmp_path: Path, environ: dict[str, str], what: str, words: str) -> None:
    done = doctor(tmp_path, "--json", **environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr + done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    assert words in problems(json.loads(done.stdout))[what]


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
