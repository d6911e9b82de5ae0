"""Recordings made of machines: they say of a machine what it says itself, and nothing of whose it is."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from core.hardware.discover import Box, discover
from core.hardware.record import Anonymiser, record
from core.hardware.recording import Recording, parse, render
from tests.support.hardware import environment, lay_out, recording, unpack

IDENTITIES = {
    "mi300x-8": ["5d2a8f0c1b3e4d7", "6713335476708593"],
    "r9700-2": ["73f8101733408480"],
    "mi100-2": ["7c4e1d0b22aa9001"],
    "h100-8-mig": ["GPU-00000001-aaaa", "MIG-00000001-1111"],
    "masked": ["6713335476708593"],
    "no-driver": [],
}


def again(made: Recording, folder: Path) -> Box:
    """What discovery finds on a machine that is this recording."""
    copy = parse(render(made))
    assert copy == made
    folder.mkdir()
    return discover(lay_out(copy, folder) / "sys", environment(copy, folder))


def shape(box: Box) -> list[object]:
    """All but the serial numbers."""
    return [replace(gpu, uuid="", parent="") for gpu in box.gpus] + [len(box.excluded)]


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_recording_of_a_recorded_machine(name: str, tmp_path: Path) -> None:
    machine = recording(name)
    root = unpack(name, tmp_path / "box")
    environ = environment(machine, root)
    before = discover(root / "sys", environ)
    made = record(environ, root / "sys", "m", "s")
    text = render(made)
    for identity in IDENTITIES[name]:
        assert identity in render(machine) and identity.lower() not in text.lower()
    after = again(made, tmp_path / "again")
    assert shape(after) == shape(before)
    assert after.notes == before.notes, "the sources still agree with one another"
    assert len({gpu.uuid for gpu in after.gpus}) == len(before.gpus)
    assert set(machine.environment) == set(made.environment)


def test_of_what_is_plugged_in_only_gpus_are_in_it(tmp_path: Path) -> None:
    root = unpack("no-driver", tmp_path)
    made = record({}, root / "sys", "m", "s")
    plugged = sorted(name.split("/")[-2] for name in made.files if "bus/pci" in name)
    assert plugged == ["0000:03:00.0", "0000:04:00.0", "0000:05:00.0"]
    assert "SPEEDSTER" not in made.files["usr/share/misc/pci.ids"], "the board's maker is not asked for"


def test_this_machine(tmp_path: Path) -> None:
    made = record(os.environ, Path("/sys"), "m", "s")
    here, there = discover(), again(made, tmp_path / "again")
    assert shape(there) == shape(here) and there.notes == here.notes
    assert not any("/" in value for value in made.environment.values())


def test_two_recordings_share_no_serial_number(tmp_path: Path) -> None:
    root = unpack("mi300x", tmp_path)
    path = "sys/class/kfd/kfd/topology/nodes/1/properties"
    one, two = (record({}, root / "sys", "m", "s").files[path] for _ in range(2))
    strip = re.compile(r"^unique_id \d+$", re.MULTILINE)
    assert one != two and strip.sub("", one) == strip.sub("", two)


def test_only_variables_about_gpus_are_in_it_and_no_path(tmp_path: Path) -> None:
    environ = {
        "HIP_VISIBLE_DEVICES": "1",
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "MIOPEN_USER_DB_PATH": "/home/ada/db",
        "HSA_TOKEN": "hunter2",
        "HF_TOKEN": "hunter2",
        "USER": "ada",
        "container": "podman",
    }
    made = record(environ, tmp_path / "sys", "m", "s")
    assert made.environment == {
        "HIP_VISIBLE_DEVICES": "1",
        "HSA_OVERRIDE_GFX_VERSION": "11.0.0",
        "MIOPEN_USER_DB_PATH": "<path>",
        "container": "1",
    }


def test_what_identifies_is_replaced_by_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "adas-box.lab.example")
    serial = 0xA3D90E4177C10B2F
    hide = Anonymiser()
    kernel = hide(f"simd_count 416\nunique_id {serial}\nhive_id {serial}\nmax_engine_clk_fcompute 2100\n")
    number = int(kernel.split()[3])
    assert number != serial
    assert kernel == f"simd_count 416\nunique_id {number}\nhive_id {number}\nmax_engine_clk_fcompute 2100\n"
    assert hide("GPU-a3d90e4177c10b2f 0xA3D90E4177C10B2F") == f"GPU-{number:016x} 0x{number:016X}"
    assert hide("0000000000000000 0x0000000000000000") == "0000000000000000 0x0000000000000000"
    uuid = "6f1b1c6e-6a3e-4a53-9f7c-0d6f4c2f8e11"
    hidden = hide(f"GPU-{uuid}")
    assert uuid not in hidden and hidden == hide(f"GPU-{uuid}")
    assert re.fullmatch(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", hidden)
    board = hide('{"product_serial": "692251001124", "asic_serial": "N/A", "product_name": "AMD Instinct MI300X"}')
    assert "692251001124" not in board and '"asic_serial": "N/A", "product_name": "AMD Instinct MI300X"' in board
    assert hide("on ADAS-BOX since, adas-box.lab.example:") == "on host since, host:"
