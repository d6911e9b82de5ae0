"""What asks for AMD: torch says that it was built for HIP, and each device has the name of an architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.hardware.device_mask import Gpu
from core.spec.run.exit_codes import EXIT_OK
from tests.rehearsal.support import python, train, visible
from tests.support.interpreter import TRITON
from tests.support.trainer import events, pairs, write_rows, write_run
from worker.environment import child_environment

NAMES = ("gfx1201", "gfx942:sramecc+:xnack-", "gfx90a:sramecc+:xnack-", "gfx1100")
GIB = 1 << 30
NO_LIMITS = {"fp32_rows": None, "output_bytes": None, "rank_multiple": 1}
EXPECTED: dict[str, dict[str, Any]] = {
    "gfx1201": {"tf32": False, "fp8": True, "limits": NO_LIMITS | {"fp32_rows": 1 << 19, "rank_multiple": 64}},
    "gfx942": {"tf32": True, "fp8": True, "limits": NO_LIMITS | {"output_bytes": 4 * GIB}},
    "gfx90a": {"tf32": False, "fp8": False, "limits": NO_LIMITS},
    "gfx1100": {"tf32": False, "fp8": False, "limits": NO_LIMITS},
}
"""Architecture → what the tables of hardware decide."""
PROGRAM = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from core.spec.axes.method import LoRA
from core.spec.axes.runtime import Resources
from core.spec.axes.training import Training
from core.train.kernels import interface
from core.train.model.placement import place
from core.train.recipe import run
from core.train.selftest.run import about, checks

for rank in range(4):
    found = place(Resources(accelerator="gpu"), Training(tf32=True), LoRA(), local_rank=rank)
    names = [check.name for check in checks(found.device)]
    told = {"arch": found.arch, "precision": found.precision, "fp8": "fp8.linear" in names, "tf32": found.tf32,
            "limits": asdict(found.limits), "runtime": about(found.device)["runtime"],
            "kernels": interface.describe(found.device)}
    print(json.dumps(told))
torch.cuda.set_device(0)
sys.exit(run(Path(sys.argv[1])))
"""


def test_each_architecture_is_placed_as_its_row_says_and_trains(tmp_path: Path, tiny_dir: Path) -> None:
    """The run is on gfx1201 with hipBLASLt, so that LoRA's rank is padded."""
    rows = write_rows(tmp_path / "rows.jsonl", pairs(8))
    axes: dict[str, Any] = {
        "method": {"type": "lora", "r": 4},
        "training": {"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 64, "precision": "bf16"},
    }
    there, here = (write_run(tmp_path / accelerator, tiny_dir, rows, resources={"accelerator": accelerator}, **axes)
                   for accelerator in ("gpu", "cpu"))  # fmt: skip
    settings = {"devices": 4, "names": ",".join(NAMES), "hip": "7.2"}
    ended = python(PROGRAM, str(there), about=settings, path=[TRITON])
    assert ended.returncode == EXIT_OK, ended.stderr[-3000:]
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [each["arch"] for each in told] == list(EXPECTED)
    for each in told:
        wanted = EXPECTED[each["arch"]]
        assert each["precision"] == "bf16" and each["runtime"] == "rocm 7.2"
        assert {name: each[name] for name in wanted} == wanted
        assert each["kernels"]["backend"] == "portable" and "Triton" not in each["kernels"]["reason"]
    environment = events(there, "run_record")[0]["record"]["environment"]
    assert (environment["arch"], environment["device_name"]) == ("gfx1201", "gfx1201")
    assert train(here) == EXIT_OK
    losses = [[event["values"]["loss"] for event in events(folder, "metrics")] for folder in (there, here)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_a_child_of_the_worker_sees_the_gpus_of_its_slot(vendor: Any, tmp_path: Path) -> None:
    """By HIP's numbers or by NVIDIA's identities, in the order of the slot."""
    gpus = [
        Gpu(n, vendor, f"GPU-00000000-0000-0000-0000-{n + 1:012x}", f"0000:{n:02x}:00.0", "card", "gfx942", 1 << 30)
        for n in range(4)
    ]
    inherited = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0,1,2,3"}
    for first, *beside in ([gpus[2]], [gpus[3], gpus[1]], [gpus[0], gpus[1], gpus[2], gpus[3]]):
        child = child_environment("train", gpu=first, beside=beside, threads=1, root=tmp_path, inherited=inherited)
        settings = {"devices": 4} | ({"hip": "7.2"} if vendor == "amd" else {})
        assert visible(child, **settings) == [first.index, *(gpu.index for gpu in beside)]
    child = child_environment("train", gpu=None, threads=1, root=tmp_path, inherited=inherited)
    assert visible(child, devices=4) == []
