"""What GPUs do now, read from recorded machines: a figure that nobody gives is absent, never 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.hardware import gpu_activity
from core.hardware.discover import discover
from core.hardware.gpu_activity import Live
from tests.support.hardware import environment, lay_out, recording

GIB = 1 << 30


def looked(name: str, root: Path, *, amd_smi: bool = True) -> tuple[dict[int, Live], list[str]]:
    """Figures by HIP's or nvidia-smi's number of all served GPUs of a recorded machine."""
    machine = recording(name)
    lay_out(machine, root)
    environ = environment(machine, root)
    gpus = discover(root / "sys", environ).gpus
    assert gpus
    told, why = gpu_activity.look(gpus, root / "sys", environ, 20.0, amd_smi=amd_smi)
    return {gpu.index: told[gpu.uuid] for gpu in gpus if gpu.uuid in told}, why


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("mi300x", {0: Live(97, 297_795_584, 78, 742)}),
        ("7900xtx", {0: Live(0, 297_795_584, 44, 14)}),  # idle: 0, and said so
        ("h200", {0: Live(88, 91 * GIB, 61, 512)}),
        ("rtx4090-2", {0: Live(0, 1 << 20, 33, 21), 1: Live(None, None, 30, None)}),  # [N/A] is no figure
        ("amd-smi-alone", {0: Live(None, 26 << 20, 39), 1: Live(63, 20 * GIB, 83, 241)}),
        ("mi300x-cpx", {}),  # the card's figures are no partition's
        ("h100-8-mig", {card: Live(None, card * GIB) for card in (2, 3, 4, 5)}),  # nor a slice's; these are whole
    ],
)
def test_recorded_machines(tmp_path: Path, name: str, figures: dict[int, Live]) -> None:
    found, why = looked(name, tmp_path)
    assert why == []
    assert found == figures


def test_a_kernel_without_the_sensor_gives_the_memory_alone(tmp_path: Path) -> None:
    lay_out(recording("mi300x"), tmp_path)
    (tmp_path / "sys/class/drm/renderD128/device/gpu_busy_percent").unlink()
    gpus = discover(tmp_path / "sys", {}).gpus
    told, _ = gpu_activity.look(gpus, tmp_path / "sys", {"PATH": ""}, 20.0, amd_smi=False)
    assert told == {gpus[0].uuid: Live(None, 297_795_584, 78, 742)}


@pytest.mark.parametrize("nonsense", ["", "65535", "-1", "busy"])
def test_nonsense_is_no_figure(tmp_path: Path, nonsense: str) -> None:
    lay_out(recording("mi300x"), tmp_path)
    (tmp_path / "sys/class/drm/renderD128/device/gpu_busy_percent").write_text(nonsense)
    gpus = discover(tmp_path / "sys", {}).gpus
    told, _ = gpu_activity.look(gpus, tmp_path / "sys", {"PATH": ""}, 20.0, amd_smi=False)
    assert told[gpus[0].uuid].busy_percent is None


def test_amd_smi_is_asked_only_when_it_may_be_and_a_failure_is_told(tmp_path: Path) -> None:
    assert looked("amd-smi-alone", tmp_path / "a", amd_smi=False) == ({}, [])
    machine = recording("h200")
    machine.tools = {command: answer for command, answer in machine.tools.items() if "utilization" not in command[1]}
    lay_out(machine, tmp_path / "b")
    environ = environment(machine, tmp_path / "b")
    gpus = discover(tmp_path / "b/sys", environ).gpus
    told, why = gpu_activity.look(gpus, tmp_path / "b/sys", environ, 20.0, amd_smi=True)
    assert told == {} and "nvidia-smi" in why[0]
