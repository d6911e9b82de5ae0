"""Boxes as file trees (fixtures/machines), masks as environments."""

from __future__ import annotations

import re
import shutil
import stat
from pathlib import Path

import pytest

from core.hardware.discover import Box, Gpu, HardwareError, discover, visible_env
from tests.support.hardware import as_nobody, readable_folder, unpack

FOUR = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


def look(root: Path, environ: dict[str, str] | None = None, gpus: list[int] | None = None) -> Box:
    return discover(root / "sys", {"PATH": str(root / "bin")} | (environ or {}), gpus)


def fake_nvidia_smi(root: Path, csv: str, *, status: int = 0) -> None:
    """A program that answers whatever it is asked with these lines."""
    program = root / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n/bin/cat <<END\n{csv}END\nexit {status}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def eight(tmp_path: Path) -> Path:
    return unpack("mi300x-8", tmp_path)


def indices(box: Box) -> list[int]:
    return [gpu.index for gpu in box.gpus]


def test_one_mi300x(tmp_path: Path) -> None:
    box = look(unpack("mi300x", tmp_path))
    assert box.notes == []
    assert box.gpus == [
        Gpu(
            index=0, vendor="amd", uuid="GPU-5d2a8f0c1b3e4d71", bdf="0000:0c:00.0", name="AMD Instinct MI300X OAM",
            arch="gfx942", memory_bytes=206141652992, compute_units=304,
        )
    ]  # fmt: skip
    assert box.gpus[0].visible_variable == "HIP_VISIBLE_DEVICES"


def test_eight_mi300x(eight: Path) -> None:
    box = look(eight)
    assert indices(box) == list(range(8))
    assert len({gpu.uuid for gpu in box.gpus}) == len({gpu.bdf for gpu in box.gpus}) == 8
    assert box.notes == []


def test_more_than_nine_nodes_are_in_numeric_order(tmp_path: Path) -> None:
    root = unpack("mi300x-8", tmp_path)
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    first = look(root).gpus[0].bdf
    shutil.move(nodes / "1", nodes / "10")
    assert look(root).gpus[-1].bdf == first


def test_no_gpu(tmp_path: Path) -> None:
    assert look(unpack("none", tmp_path)) == Box([], [])


def test_desktop_leaves_the_igpu_out_and_keeps_hips_numbers(tmp_path: Path) -> None:
    root = unpack("7900xtx-igpu", tmp_path)
    box = look(root)
    assert [(gpu.index, gpu.arch, gpu.bdf) for gpu in box.gpus] == [(1, "gfx1100", "0000:03:00.0")]
    assert len(box.notes) == 1 and "2 compute units" in box.notes[0] and "--gpus 0" in box.notes[0]
    asked = look(root, gpus=[0])
    assert [gpu.arch for gpu in asked.gpus] == ["gfx1036"]
    assert asked.gpus[0].uuid == "BDF-0000:11:00.0"


def test_strix_halo_is_served_with_main_memory(tmp_path: Path) -> None:
    (gpu,) = look(unpack("strix-halo", tmp_path)).gpus
    assert gpu.arch == "gfx1151" and gpu.integrated and gpu.compute_units == 40
    assert gpu.memory_bytes == 536870912 + 67108864000


def test_laptop_igpu_only_when_asked(tmp_path: Path) -> None:
    root = unpack("phoenix", tmp_path)
    box = look(root)
    assert box.gpus == [] and "12 compute units" in box.notes[0]
    assert [gpu.arch for gpu in look(root, gpus=[0]).gpus] == ["gfx1103"]


def test_a_gpu_that_computes_wrongly_is_served_only_by_name(tmp_path: Path) -> None:
    root = unpack("strix-halo", tmp_path)
    (root / "bin/amd-smi").unlink()
    properties = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    properties.write_text(properties.read_text().replace("gfx_target_version 110501", "gfx_target_version 100303"))
    box = look(root)
    assert box.gpus == [] and "left out, gradients are wrong" in box.notes[0] and "--gpus 0" in box.notes[0]
    box = look(root, gpus=[0])
    assert [gpu.arch for gpu in box.gpus] == ["gfx1033"]
    assert "served because --gpus names it, and gradients are wrong" in box.notes[0]


def test_partitions_have_names_of_their_own(tmp_path: Path) -> None:
    root = unpack("mi300x-cpx", tmp_path)
    assert [gpu.uuid for gpu in look(root).gpus] == [f"GPU-1f0c9a7b5533e201-{number}" for number in range(8)]
    # A container with the fourth of them alone: the same name, memory and place, and HIP counts from 0.
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for node in (1, 2, 3, 5, 6, 7, 8):
        shutil.rmtree(nodes / str(node))
    (root / "bin/amd-smi").unlink()
    (gpu,) = look(root).gpus
    assert (gpu.index, gpu.uuid, gpu.bdf) == (0, "GPU-1f0c9a7b5533e201-3", "0000:0c:00.3")
    assert gpu.partition == 3 and gpu.memory_bytes == 24 << 30 and gpu.name.endswith(", partition 3")


def test_partitions_as_amd_smi_alone_tells_them(tmp_path: Path) -> None:
    root = unpack("mi300x-cpx", tmp_path)
    by_kernel = look(root).gpus
    shutil.rmtree(root / "sys")
    (root / "sys").mkdir()
    found = look(root).gpus
    assert [(gpu.index, gpu.uuid, gpu.bdf, gpu.partition) for gpu in found] == [
        (gpu.index, gpu.uuid, gpu.bdf, gpu.partition) for gpu in by_kernel
    ]


def test_a_kernel_that_does_not_number_partitions(tmp_path: Path) -> None:
    root = unpack("mi300x-cpx", tmp_path)
    for file in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        file.write_text(re.sub(r"location_id 30\d\d", "location_id 3072", file.read_text()))
    (root / "bin/amd-smi").unlink()
    assert [gpu.partition for gpu in look(root).gpus] == list(range(8))
    assert len({gpu.uuid for gpu in look(root).gpus}) == 8


def test_virtual_functions_in_one_slot_are_whole_gpus(tmp_path: Path) -> None:
    root = unpack("mi250x", tmp_path)
    (root / "bin/amd-smi").unlink()
    properties = root / "sys/class/kfd/kfd/topology/nodes/2/properties"
    properties.write_text(properties.read_text().replace("location_id 50688", "location_id 49409"))
    assert [(gpu.bdf, gpu.partition) for gpu in look(root).gpus] == [("0000:c1:00.0", None), ("0000:c1:00.1", None)]


def test_unknown_architecture_is_served_and_said(tmp_path: Path) -> None:
    root = unpack("mi300x", tmp_path)
    properties = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    properties.write_text(properties.read_text().replace("gfx_target_version 90402", "gfx_target_version 130000"))
    box = look(root)
    assert box.gpus[0].arch == "gfx1300" and "no bf16" in box.notes[0]


def test_no_device_files_no_gpu(tmp_path: Path) -> None:
    root = unpack("mi300x", tmp_path)
    (root / "dev/kfd").unlink()
    box = look(root)
    assert box.gpus == [] and "--device /dev/kfd" in box.notes[0]


def test_a_container_with_one_of_eight_counts_from_zero(eight: Path) -> None:
    for minor in range(128, 128 + 64, 8):
        if minor != 152:
            (eight / f"dev/dri/renderD{minor}").unlink()
    box = look(eight)
    assert [(gpu.index, gpu.uuid) for gpu in box.gpus] == [(0, "GPU-5d2a8f0c1b3e4d73")]
    assert len(box.notes) == len(box.excluded) == 7


def test_without_permission() -> None:
    with readable_folder() as folder:
        root = unpack("mi300x-8", folder)
        (root / "sys/class/kfd/kfd/topology/nodes/2/properties").chmod(0)  # what the kernel does to a container's user
        (root / "dev/kfd").chmod(0)
        with as_nobody():
            box = look(root)
    assert box.gpus == [] and len(box.notes) == 8 and len(box.excluded) == 7
    assert any("not readable" in note for note in box.notes)
    assert any("may not be opened by any group (mode 0)" in note for note in box.notes)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "2"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "5,1"}, [5, 1]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, [3]),
        ({"GPU_DEVICE_ORDINAL": "4"}, [4]),
        ({"ROCR_VISIBLE_DEVICES": "6"}, [6]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "1"}, [5]),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "CUDA_VISIBLE_DEVICES": "2,0"}, [6, 4]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-5d2a8f0c1b3e4d73"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "GPU-5D2A8F0C1B3E4D75,0"}, [5, 0]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "1,-1,2"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": " 0 , 7 "}, [0, 7]),
    ],
)
def test_inherited_masks(eight: Path, environ: dict[str, str], expected: list[int]) -> None:
    box = look(eight, environ)
    assert indices(box) == expected
    assert sum("hidden by the environment" in note for note in box.notes) == 8 - len(expected)
    for gpu in box.gpus:
        child = visible_env(environ | {"HOME": "/root"}, gpu)
        assert {name: child[name] for name in FOUR if name in child} == {"HIP_VISIBLE_DEVICES": str(gpu.index)}
        assert child["HOME"] == "/root"
        # What the child sees of the box is that one card, wherever it was counted from before.
        assert look(eight, child).gpus == [gpu]


def test_masks_that_differ_are_said(eight: Path) -> None:
    box = look(eight, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"})
    assert indices(box) == [1] and "HIP_VISIBLE_DEVICES counts" in box.notes[0]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HIP_VISIBLE_DEVICES": "8"}, "GPU 8, which is not there"),
        ({"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, "set only one of the two"),
        ({"HIP_VISIBLE_DEVICES": "0,0"}, "twice"),
        ({"HIP_VISIBLE_DEVICES": "GPU-ffff"}, "not there"),
        ({"HIP_VISIBLE_DEVICES": "GPU-5d2a"}, "not there"),  # eight cards begin so
        ({"HIP_VISIBLE_DEVICES": "one"}, "not there"),
    ],
)
def test_masks_that_cannot_be(eight: Path, environ: dict[str, str], words: str) -> None:
    with pytest.raises(HardwareError, match=words):
        look(eight, environ)


def test_gpus_count_within_the_mask(eight: Path) -> None:
    assert indices(look(eight, gpus=[0, 1])) == [0, 1]
    assert indices(look(eight, {"HIP_VISIBLE_DEVICES": "2,6"}, gpus=[1])) == [6]
    with pytest.raises(HardwareError, match="GPU 2, which is not there"):
        look(eight, {"HIP_VISIBLE_DEVICES": "2,6"}, gpus=[2])
    with pytest.raises(HardwareError, match="twice"):
        look(eight, gpus=[1, 1])


def test_a_mask_on_a_box_without_gpus(tmp_path: Path) -> None:
    root = unpack("none", tmp_path)
    assert look(root, {"CUDA_VISIBLE_DEVICES": "-1"}).gpus == []
    assert look(root, {"HIP_VISIBLE_DEVICES": ""}).gpus == []
    with pytest.raises(HardwareError, match="none was found"):
        look(root, {"HIP_VISIBLE_DEVICES": "0"})
    with pytest.raises(HardwareError, match="not there"):
        look(root, gpus=[0])


def test_h200(tmp_path: Path) -> None:
    (gpu,) = look(unpack("h200", tmp_path)).gpus
    assert gpu.vendor == "nvidia" and gpu.arch == "sm_90" and gpu.name == "NVIDIA H200"
    assert gpu.memory_bytes == 143771 << 20 and gpu.bdf == "0000:0a:00.0"
    assert visible_env({"HIP_VISIBLE_DEVICES": "0", "X": "1"}, gpu) == {
        "CUDA_VISIBLE_DEVICES": "GPU-6f1b1c6e-6a3e-4a53-9f7c-0d6f4c2f8e11",
        "X": "1",
    }


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("2", [2]),
        ("0", [0] * 7),  # a card in MIG mode, by its number: its slices
        ("GPU-00000001", [0] * 7),
        ("6,3", [6, 6, 3]),
        ("MIG-00000001,7", [0, 7]),
        ("MIG-00000010", "MIG-00000010, which is not there"),
        ("1", "GPU-1, which is not there"),  # it has no slices
        ("2,2", "twice"),
        ("-1", []),
    ],
)
def test_masks_on_a_box_in_mig_mode(tmp_path: Path, mask: str, expected: list[int] | str) -> None:
    root = unpack("h100-8-mig", tmp_path)
    if isinstance(expected, str):
        with pytest.raises(HardwareError, match=expected):
            look(root, {"CUDA_VISIBLE_DEVICES": mask})
        return
    box = look(root, {"CUDA_VISIBLE_DEVICES": mask})
    assert indices(box) == expected
    for gpu in box.gpus[:2]:
        child = visible_env({"PATH": str(root / "bin")}, gpu)
        assert child["CUDA_VISIBLE_DEVICES"] == gpu.uuid
        assert look(root, child).gpus == [gpu]


@pytest.mark.parametrize(
    ("mask", "expected"), [("1", [1]), ("GPU-2222", [1]), ("1,0", [1, 0]), ("", []), ("GPU-1", [0])]
)
def test_nvidia_masks(tmp_path: Path, mask: str, expected: list[int]) -> None:
    unpack("rtx4090-2", tmp_path)
    box = look(tmp_path, {"CUDA_VISIBLE_DEVICES": mask})
    assert indices(box) == expected
    for gpu in box.gpus:
        assert look(tmp_path, visible_env({"PATH": str(tmp_path / "bin")}, gpu)).gpus == [gpu]


def test_a_broken_nvidia_driver_is_said(tmp_path: Path) -> None:
    fake_nvidia_smi(
        tmp_path, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", status=9
    )
    box = look(tmp_path)
    assert box.gpus == [] and "couldn't communicate" in box.notes[0]


def test_both_vendors(tmp_path: Path) -> None:
    root = unpack("rtx4090-2", unpack("mi300x", tmp_path))
    box = look(root, {"CUDA_VISIBLE_DEVICES": "1"})
    assert [(gpu.vendor, gpu.index) for gpu in box.gpus] == [("amd", 0), ("nvidia", 1)]


def test_a_cpu_slot_sees_no_gpu(eight: Path) -> None:
    child = visible_env({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0", "A": "b"}, None)
    assert child == {"CUDA_VISIBLE_DEVICES": "-1", "A": "b"}
    assert look(eight, child).gpus == []


def test_this_box_without_torch() -> None:
    box = discover()
    assert isinstance(box.notes, list)
