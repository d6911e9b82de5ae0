"""Known faults: every row, and what a trainer's environment becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.hardware.discover import Gpu
from core.hardware.precision import TF32
from core.hardware.tables import faults
from core.hardware.tables.arch import ROWS, lookup
from worker.environment import child_environment

KEYS = {
    "cpu": set(),
    "sm_90": set(),
    "gfx906": {"expandable-segments"},
    "gfx90a": {"expandable-segments"},
    "gfx942": {"expandable-segments", "stores-past-4-gib"},
    "gfx950": {"expandable-segments", "stores-past-2-gib", "stores-past-4-gib", "tf32-drops-alpha"},
    "gfx1033": {"expandable-segments", "gradients-gfx1033"},
    "gfx1100": {"expandable-segments", "bitsandbytes-fused-4-bit", "attention-opt-in"},
    "gfx1103": {"expandable-segments", "attention-opt-in"},
    "gfx1151": {"expandable-segments", "hipblaslt-wide-output", "sgemm-gfx1151", "attention-opt-in"},
    "gfx1200": {"expandable-segments", "hipblaslt-narrow-operand", "attention-opt-in"},
    "gfx1201": {"expandable-segments", "hipblaslt-narrow-operand", "gemm-rows-2-19", "attention-opt-in"},
}
NO_LT = {"TORCH_BLAS_PREFER_HIPBLASLT": "0", "ROCBLAS_USE_HIPBLASLT": "0", "DISABLE_ADDMM_CUDA_LT": "1"}
AOTRITON = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}


@pytest.mark.parametrize("arch", KEYS)
def test_which_faults_touch_which_architecture(arch: str) -> None:
    assert {fault.key for fault in faults.known(arch)} == KEYS[arch]
    assert {fault.key for fault in faults.known(f"{arch}:sramecc+:xnack-")} == KEYS[arch]


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.key)
def test_row(fault: faults.KnownFault) -> None:
    assert fault.sources and all(source.startswith("https://github.com/") for source in fault.sources)
    assert fault.what and fault.route
    assert all(arch == "amd" or lookup(arch) for arch in fault.arches)


ELSEWHERE = {
    "sgemm-gfx1151": "the self-test multiplies in fp32",
    "bitsandbytes-fused-4-bit": "its kernels are not used",
    "tf32-drops-alpha": "TF32 is not among what precision.TF32 lists",
}


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.key)
def test_every_way_around_has_an_effect(fault: faults.KnownFault) -> None:
    ours = bool(fault.set or fault.drop or fault.hopeless) or fault.limits != faults.NO_LIMITS
    assert ours is (fault.key not in ELSEWHERE)


def test_no_tf32_where_it_is_wrong() -> None:
    (row,) = (fault for fault in faults.FAULTS if fault.key == "tf32-drops-alpha")
    assert not set(row.arches) & TF32


def test_no_key_twice_and_no_variable_with_two_values() -> None:
    assert len({fault.key for fault in faults.FAULTS}) == len(faults.FAULTS)
    for row in ROWS:
        wanted: dict[str, str] = {}
        for fault in faults.known(row.arch):
            assert all(wanted.setdefault(name, value) == value for name, value in fault.set.items())


def test_route_sets_what_the_operator_has_not() -> None:
    routed = faults.route({"PATH": "/bin"}, "gfx1201")
    assert routed.environment == {"PATH": "/bin"} | NO_LT | AOTRITON
    assert [change.variable for change in routed.changes] == [*NO_LT, *AOTRITON]
    assert all(change.ours for change in routed.changes)
    assert routed.changes[0].words.startswith("TORCH_BLAS_PREFER_HIPBLASLT=0 (hipblaslt-narrow-operand: ")

    routed = faults.route({"TORCH_BLAS_PREFER_HIPBLASLT": "1"}, "gfx1201")
    assert routed.environment["TORCH_BLAS_PREFER_HIPBLASLT"] == "1"
    assert not routed.changes[0].ours and "=1 is yours and stays" in routed.changes[0].words
    assert [change.variable for change in routed.changes if change.ours] == [*list(NO_LT)[1:], *AOTRITON]


def test_expandable_segments_are_dropped_on_amd_alone() -> None:
    given = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:256,expandable_segments:True",
        "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True",
    }
    routed = faults.route(given, "gfx942")
    assert routed.environment == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:256"}
    assert [change.value for change in routed.changes] == ["max_split_size_mb:256", ""]
    assert faults.route(given, "sm_90") == faults.Routed(given, ())


@pytest.mark.parametrize(
    ("arch", "environment", "expected"),
    [
        ("gfx942", {}, faults.Limits(output_bytes=1 << 32)),
        ("gfx950:sramecc+:xnack-", {}, faults.Limits(output_bytes=1 << 31)),
        ("gfx950", NO_LT, faults.NO_LIMITS),
        ("gfx1200", {"TORCH_BLAS_PREFER_HIPBLASLT": "1"}, faults.Limits(rank_multiple=64)),
        ("gfx1200", NO_LT, faults.NO_LIMITS),
        ("gfx1201", NO_LT, faults.Limits(fp32_rows=1 << 19)),
        ("gfx1201", {**NO_LT, "DISABLE_ADDMM_CUDA_LT": "0"}, faults.Limits(fp32_rows=1 << 19, rank_multiple=64)),
        ("sm_90", {}, faults.NO_LIMITS),
        ("cpu", {}, faults.NO_LIMITS),
    ],
)
def test_limits_of_products(arch: str, environment: dict[str, str], expected: faults.Limits) -> None:
    assert faults.limits(arch, environment) == expected


def card(arch: str) -> Gpu:
    return Gpu(0, "amd", "GPU-0123", "0000:03:00.0", "a card", arch, 1 << 35)


def test_the_trainer_gets_it_and_a_spare_for_several_such_cards_differs_in_nothing_but_visibility() -> None:
    def made(gpu: Gpu | None, arch: str | None = None) -> dict[str, str]:
        return child_environment("train", gpu=gpu, threads=2, root=Path("/data"), arch=arch, inherited={"PATH": "/bin"})

    trainer, spare = made(card("gfx1201")), made(None, "gfx1201")
    assert {name: trainer[name] for name in NO_LT} == NO_LT
    assert {name for name in {*trainer, *spare} if trainer.get(name) != spare.get(name)} == {
        "HIP_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
    }
    assert not set(NO_LT) & set(made(card("gfx942")))
    assert not set(NO_LT) & set(made(None))
