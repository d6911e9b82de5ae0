"""Every recorded machine (fixtures/machines), looked at as a worker looks: one table, one test."""

from __future__ import annotations

import pytest

from core.hardware.discover import Box, Gpu, discover
from core.hardware.recording import Recording, RecordingError, parse, render
from core.hardware.tables import faults
from core.hardware.tables.arch import precision
from core.hardware.tables.attention import CUDNN, libraries_for
from tests.support.hardware import MACHINES, as_nobody, environment, lay_out, readable_folder, recording

NAMES = sorted(path.stem for path in MACHINES.glob("*.txt"))


def look(machine: Recording) -> Box:
    with readable_folder() as root:
        lay_out(machine, root)
        if machine.unreadable or any(not device.open for device in machine.devices.values()):
            with as_nobody():
                return discover(root / "sys", environment(machine, root))
        return discover(root / "sys", environment(machine, root))


def line(gpu: Gpu) -> str:
    memory = f"{gpu.memory_bytes >> 30} GiB"
    visible = f"{gpu.visible_variable}={gpu.visible_value}"
    return f"{gpu.index} {gpu.arch} {gpu.bdf} {memory} {precision(gpu.arch)} {visible}"


def test_there_are_enough_of_them() -> None:
    assert len(NAMES) >= 24
    arches = {row.split()[1] for name in NAMES for row in recording(name).expect["gpus"]}
    assert {"gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1151", "gfx1201"} <= arches
    assert {"sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"} <= arches


LIBRARIES = {
    "gfx90a": ["flash_attn"], "gfx942": ["aiter", "flash_attn"], "gfx950": ["aiter", "flash_attn"],
    "sm_80": ["flash_attn"], "sm_86": ["flash_attn"], "sm_89": ["flash_attn"], "sm_90": ["flash_attn_3", "flash_attn"],
}  # fmt: skip
"""Attention libraries that are tried on each architecture of the recorded machines, best first; others: none."""


def test_attention_libraries_that_the_cards_of_each_machine_are_tried_with() -> None:
    arches = {row.split()[1] for name in NAMES for row in recording(name).expect["gpus"]}
    assert arches > LIBRARIES.keys()
    assert {arch: [row.name for row in libraries_for(arch)] for arch in arches} == {
        arch: LIBRARIES.get(arch, []) for arch in arches
    }
    nvidia = {arch for arch in arches if arch.startswith("sm_")}
    assert arches & CUDNN == nvidia - {"sm_70", "sm_75"}


@pytest.mark.parametrize("name", NAMES)
def test_machine(name: str) -> None:
    machine = recording(name)
    box, expect = look(machine), machine.expect
    assert [line(gpu) for gpu in box.gpus] == expect["gpus"]
    assert [gpu.name for gpu in box.gpus] == expect["names"]
    assert len({gpu.uuid for gpu in box.gpus}) == len(box.gpus), "a slot is named by it"
    assert len(box.excluded) == len(expect["excluded"])
    for excluded, words in zip(box.excluded, expect["excluded"], strict=True):
        assert words in excluded.words and excluded.words in box.notes
    notes = [note for note in box.notes if note not in {excluded.words for excluded in box.excluded}]
    assert len(notes) == len(expect["notes"]), notes
    for words in expect["notes"]:
        assert any(words in note for note in notes), (words, notes)

    for arch in {gpu.arch for gpu in box.gpus}:
        assert sorted(fault.key for fault in faults.known(arch)) == sorted(expect["faults"])
        routed = faults.route(machine.environment, arch)
        told = [f"{one.variable}={one.value}{'' if one.ours else ' (yours)'}" for one in routed.changes]
        assert told == expect["variables"]
        if "limits" in expect:
            assert faults.limits(arch, routed.environment) == faults.Limits(**expect["limits"])


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_read_as_it_was_written(name: str) -> None:
    text = (MACHINES / f"{name}.txt").read_text()
    assert render(parse(text)) == text
    assert "not recorded" in parse(text).source, "say where it is from"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1"),
        ("eft machine 2\nsource: x\n", "line 1"),
        ("eft machine 1\nmachine: x\n", "no `source:`"),
        ("eft machine 1\nsource: x\n=== film sys/a\nb\n", "line 3: `=== film sys/a` is not known"),
        ("eft machine 1\nsource: x\n=== tool 0\n", "line 3"),
    ],
)
def test_what_is_no_recording(text: str, words: str) -> None:
    with pytest.raises(RecordingError, match=words):
        parse(text)


def test_content_that_looks_like_a_heading() -> None:
    machine = Recording("m", "s", files={"sys/a": "=== file b\n\\x\nplain\n"}, tools={("t", "-x"): (None, "=== end\n")})
    assert parse(render(machine)) == machine
