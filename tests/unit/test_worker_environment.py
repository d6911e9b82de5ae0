"""A child's environment is an allow-list."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from core.hardware.discover import Gpu
from core.hardware.selftest import DTYPES, Part, Verdict, shared
from core.jobs.kinds import Kind
from worker.environment import child_environment

ROOT = Path("/data")
GPU = Gpu(2, "amd", "GPU-0123", "0000:03:00.0", "AMD Instinct MI300X", "gfx942", 1 << 37)
MASKS = {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}
DIRTY = {
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/opt/rocm/lib",
    "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
    "MIOPEN_FIND_MODE": "2",
    "MALLOC_ARENA_MAX": "2",
    "MIOPEN_SECRET_KEY": "x",
    "EFT_DATABASE_URL": "postgresql://eft:hunter2@db/eft",
    "EFT_BROKER_URL": "redis://:hunter2@broker",
    "EFT_API_KEY": "eft_hunter2",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "GITHUB_TOKEN": "hunter2",
    "PYTHONPATH": "/somewhere",
    "PYTHONSTARTUP": "/somewhere/x.py",
    "LD_PRELOAD": "/somewhere/x.so",
    "HF_TOKEN": "hf_hunter2",
    "HTTPS_PROXY": "http://user:hunter2@proxy",
    "HIP_VISIBLE_DEVICES": "0,1,2",
    "ROCR_VISIBLE_DEVICES": "0,1,2",
    "CUDA_VISIBLE_DEVICES": "0",
    "HOME": "/root",
    "OMP_NUM_THREADS": "64",
}


def made(kind: Kind, gpu: Gpu | None = GPU) -> dict[str, str]:
    return child_environment(kind, gpu=gpu, threads=3, root=ROOT, inherited=DIRTY)


def test_a_trainer_gets_no_secret_and_no_way_in() -> None:
    environment = made("train")
    assert not [name for name, value in environment.items() if "hunter2" in value]
    assert not {name for name in environment if name.startswith(("EFT_", "AWS_", "GITHUB_"))}
    assert not {"PYTHONPATH", "PYTHONSTARTUP", "LD_PRELOAD", "MIOPEN_SECRET_KEY", "HF_TOKEN"} & set(environment)


def test_it_keeps_what_the_driver_needs() -> None:
    environment = made("train")
    for name in ("PATH", "LANG", "LD_LIBRARY_PATH", "HSA_OVERRIDE_GFX_VERSION", "MIOPEN_FIND_MODE", "MALLOC_ARENA_MAX"):
        assert environment[name] == DIRTY[name]


def test_a_job_of_several_gpus_sees_all_of_them_in_their_order_by_one_variable() -> None:
    first = replace(GPU, index=3, uuid="GPU-3")
    several = child_environment("train", gpu=first, beside=[GPU], threads=3, root=ROOT, inherited=DIRTY)
    assert {name: several[name] for name in MASKS & set(several)} == {"HIP_VISIBLE_DEVICES": "3,2"}
    one, other = (replace(GPU, vendor="nvidia", arch="sm_90", uuid=uuid) for uuid in ("GPU-a", "GPU-b"))
    several = child_environment("train", gpu=one, beside=[other], threads=3, root=ROOT, inherited=DIRTY)
    assert {name: several[name] for name in MASKS & set(several)} == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}


def test_several_devices_are_as_good_as_the_worst_of_them() -> None:
    good, bad = Part(status="passed"), Part(status="failed", error="wrong")
    about = {"key": "k", "node": "n", "device_name": "d", "arch": "gfx942", "torch": "2", "runtime": "rocm"}
    parts = {f"matmul.{dtype}": good for dtype in DTYPES}
    first, second = (
        Verdict(**about, slot=slot, checked_at="now", seconds=1.0, parts=parts | found, environment=environment)
        for slot, found, environment in (
            ("a", {"matmul.bf16": bad}, {"A": "1"}),
            ("b", {"matmul.fp16": Part(status="hung")}, {}),
        )
    )
    both = shared([first, second])
    assert both is not None and both.environment == {"A": "1"}
    statuses = {name: part.status for name, part in both.parts.items()}
    assert statuses == {"matmul.bf16": "failed", "matmul.fp16": "hung", "matmul.fp32": "passed"}
    assert shared([first]) == first and shared([]) is None


@pytest.mark.parametrize("kind", ["train", "prepare"])
def test_exactly_one_filter(kind: Kind) -> None:
    assert {name: made(kind)[name] for name in MASKS & set(made(kind))} == {"HIP_VISIBLE_DEVICES": "2"}
    assert {name: made(kind, None)[name] for name in MASKS & set(made(kind, None))} == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_threads_home_and_offline_are_ours() -> None:
    environment = made("train")
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("3", "3")
    assert environment["HOME"] == "/data/home"
    assert (environment["HF_HUB_OFFLINE"], environment["TRANSFORMERS_OFFLINE"]) == ("1", "1")


def test_only_preparing_may_ask_the_hub() -> None:
    environment = made("prepare", None)
    assert environment["HF_TOKEN"] == "hf_hunter2"  # its job's own way to the hub
    assert environment["HTTPS_PROXY"] == DIRTY["HTTPS_PROXY"]
    assert "HF_HUB_OFFLINE" not in environment
    assert "EFT_DATABASE_URL" not in environment
