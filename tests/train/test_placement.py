"""Where a run computes: what its slot promised, and what its device's self-test leaves."""

from __future__ import annotations

import os

import pytest
import torch

from core.hardware import device_mask
from core.hardware.selftest import Choice
from core.hardware.tables.faults import Limits
from core.spec.axes.method import LoRA
from core.spec.axes.runtime import Resources
from core.spec.axes.training import Training
from core.train.failures import describe
from core.train.model.placement import DeviceMissing, DeviceRefused, _take_deterministic_kernels, place


@pytest.fixture(autouse=True)
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in device_mask.ALL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


@pytest.mark.parametrize("mask", [{"HIP_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "GPU-0f1e"}])
def test_a_slot_with_a_gpu_that_torch_does_not_see_never_trains_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, mask: dict[str, str]
) -> None:
    """torch here is built for CPUs: the commonest mistake on an AMD box."""
    for name, value in mask.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DeviceMissing, match=f"{next(iter(mask))}={next(iter(mask.values()))} names a GPU") as raised:
        place(Resources(accelerator="any"), Training(), LoRA())
    assert describe(raised.value, "loading")["failure"] == "machine"
    assert place(Resources(accelerator="cpu"), Training(), LoRA()).device.type == "cpu"


@pytest.mark.parametrize("mask", [None, "", "-1"])
def test_a_slot_without_one_does(monkeypatch: pytest.MonkeyPatch, mask: str | None) -> None:
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert place(Resources(accelerator="any"), Training(), LoRA()).device.type == "cpu"
    with pytest.raises(DeviceMissing):
        place(Resources(accelerator="gpu"), Training(), LoRA())


def test_limits_and_refusals_of_the_self_test_are_kept() -> None:
    limits = Limits(fp32_rows=1 << 19, rank_multiple=64)
    assert place(Resources(), Training(), LoRA(), Choice(limits=limits)).limits == limits
    with pytest.raises(DeviceRefused, match="no precision computes correctly"):
        place(Resources(), Training(), LoRA(), Choice(refused="no precision computes correctly"))


def test_deterministic_kernels_do_not_fill_fresh_memory() -> None:
    """As `place` does on a GPU: it would write NaN over the buffers of the loss in each micro-step."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    try:
        _take_deterministic_kernels()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.empty(1 << 16).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
