"""The self-test of a device: real children, libraries that are wrong (tests/support/broken), a real run after it."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from core.base.files import write_private
from core.hardware import selftest
from core.hardware.device_mask import Gpu
from core.hardware.selftest import Choice, Part, Verdict, choose
from core.hardware.tables import faults
from core.hardware.tables.faults import Limits
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.attention.backends import choose_attention
from core.train.base.events import EventWriter
from core.train.kernels import interface, native
from core.train.kernels.padded import PaddedA, PaddedB, operand
from core.train.model import build
from core.train.model.load import load_model
from core.train.model.placement import DeviceRefused, place
from core.train.recipe import run
from core.train.run import Run
from tests.support.selftest import verdict as this_machines
from tests.support.service import wait_for
from tests.support.trainer import ROOT, events, pairs, write_rows, write_run
from worker.environment import child_environment
from worker.gpus.selftest import SelfTests
from worker.gpus.selftest_runner import SelfTestDevice, examine, key_of, remembered

BROKEN = str(ROOT / "tests" / "support" / "broken")
CARD = Gpu(0, "amd", "GPU-00c0ffee", "0000:03:00.0", "made up", "gfx942", 1 << 30)


@dataclass(frozen=True)
class MadeUp(SelfTestDevice):
    """A card that is this machine's CPU with faulty libraries."""

    @property
    def where(self) -> str:
        return "cpu"


def device(
    tmp_path: Path, *broken: str, gpu: Gpu | None = None, inherited: dict[str, str] | None = None
) -> SelfTestDevice:
    environment = child_environment("train", gpu=gpu, threads=1, root=tmp_path, inherited=inherited)
    # Our C kernels are compiled once a machine, not once a test.
    environment |= {"HOME": str(Path.home()), "PYTHONPATH": BROKEN, "EFT_TEST_BROKEN": ",".join(broken)}
    return MadeUp("slot-0", gpu, environment)


def statuses(verdict: Verdict) -> dict[str, str]:
    return {name: part.status for name, part in verdict.parts.items() if part.status not in ("passed", "unavailable")}


def test_this_machine_passes_and_is_not_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = this_machines()
    assert verdict.ok and verdict.refused is None and verdict.told == [] and statuses(verdict) == {}
    assert len(verdict.parts) > 35
    assert all(part.difference <= part.tolerance for part in verdict.parts.values() if part.status == "passed")
    untried = {name for name, part in verdict.parts.items() if part.status == "unavailable"}
    assert {name for name in untried if "native" not in name} == {
        f"attention.efficient.{dtype}" for dtype in ("bf16", "fp16", "fp32")
    }
    # Another worker on the same node finds it, one with another driver variable does not.
    here = SelfTestDevice("cpu-1", None, child_environment("train", gpu=None, threads=7, root=tmp_path))
    path = selftest.folder(tmp_path) / f"box-{verdict.key}.json"
    write_private(path, selftest.encoded(verdict))
    monkeypatch.setattr("worker.gpus.selftest.examine", None)  # it is not called
    tests = SelfTests([here], "box", tmp_path, 60.0)
    assert tests.complete and tests.offered("cpu-1") and tests.verdict("cpu-1") == verdict
    tests.run(lambda: pytest.fail("it was asked again"))
    assert key_of(here) != key_of(SelfTestDevice("cpu", None, {**here.environment, "PYTORCH_ALLOC_CONF": "x:1"}))
    path.write_text(path.read_text()[:-40])
    assert remembered(here, "box", tmp_path) is None, "half a file is none"


def test_wrong_kernels_are_found_and_a_fault_is_led_around(tmp_path: Path) -> None:
    """Flash attention and a C kernel are wrong, a narrow product crashes while hipBLASLt is on: three children, and the
    rest is as on a sound machine."""
    card = device(tmp_path, "flash", "native", "narrow", gpu=CARD)
    verdict = examine(card, "box", tmp_path, 60.0)
    assert set(statuses(verdict)) == {
        *(f"attention.flash.{dtype}" for dtype in ("bf16", "fp16", "fp32")),
        "dequantize.native.nf4",
        "dequantize.native.int8",
        *(f"packed.segments.{dtype}" for dtype in ("bf16", "fp16", "fp32")),
    }
    assert verdict.cured.keys() == {"lora.r16.bf16"}
    assert "SIGSEGV" in verdict.cured["lora.r16.bf16"] and "Memory access fault" in verdict.cured["lora.r16.bf16"]
    assert verdict.environment == faults.NO_HIPBLASLT
    assert not verdict.ok and verdict.refused is None
    few = {"gemv": "native"} if native.multiplies_few_rows(64) else {}
    assert verdict.backends == few | {
        "attention": "math", "dequantize": "portable", "loss": "native", "block": "native"
    }  # fmt: skip
    choice = choose(verdict)
    assert choice.precisions == ("bf16", "fp16", "fp32")
    assert choice.attention["bf16"] == ("math", "eager")
    assert choice.veto.keys() == {"native:dequantize"}
    assert choice.packed_weights == choice.precisions, "the portable backend is right"
    assert any("TORCH_BLAS_PREFER_HIPBLASLT=0" in words for words in choice.told)
    assert remembered(card, "box", tmp_path) == verdict
    assert not list(selftest.folder(tmp_path).glob(".*")), "nothing is left but the verdict"
    # Nothing of the operator's is overruled: then there is no way around.
    own = {"PATH": "/usr/bin:/bin"} | dict.fromkeys(faults.NO_HIPBLASLT, "1")
    assert all(device(tmp_path, gpu=CARD, inherited=own).environment[name] == "1" for name in faults.NO_HIPBLASLT)


def test_a_hang_and_wrong_16_bits_leave_float32_or_nothing(tmp_path: Path) -> None:
    verdict = examine(device(tmp_path, "bf16", "hang"), "box", tmp_path, 5.0)
    found = statuses(verdict)
    assert found.pop("loss.logits.bf16") == "hung"
    assert "killed after 5 s" in (verdict.parts["loss.logits.bf16"].error or "")
    assert found["matmul.bf16"] == "failed"
    assert found.keys() == {
        f"{what}.bf16" for what in ("matmul", "lora.r8", "lora.r16", "lora.r64", "qlora.nf4", "qlora.int8")
    }
    assert choose(verdict).precisions == ("fp16", "fp32")


def test_a_device_that_cannot_even_be_opened_is_refused_and_asked_again(tmp_path: Path) -> None:
    broken = device(tmp_path, "exit")
    told: list[bool] = []
    tests = SelfTests([broken], "box", tmp_path, 60.0)
    assert not tests.complete and not tests.offered("slot-0")
    assert tests.as_slot("slot-0")["selftest"] == "running"
    tests.run(lambda: told.append(tests.complete))
    assert told == [True] and not tests.offered("slot-0")
    assert "exit code 7 while it imported torch: libfault.so: cannot open the device" in tests.choice("slot-0").refused
    assert "libfault.so" in str(tests.as_slot("slot-0")["quarantined"]) and "libfault.so" in tests.notes()[0]
    assert not SelfTests([broken], "box", tmp_path, 60.0).complete, "it may have been mended"
    absent = SelfTestDevice(
        "gpu-0", CARD, dict(broken.environment) | {"EFT_TEST_BROKEN": "", "CUDA_VISIBLE_DEVICES": "-1"}
    )
    tests = SelfTests([absent], "box", tmp_path, 60.0)
    tests.run(lambda: None)
    assert "sees no GPU here" in (tests.choice("gpu-0").refused or "")


def test_a_card_that_others_fill_is_not_condemned(tmp_path: Path) -> None:
    verdict = examine(device(tmp_path, "full"), "box", tmp_path, 60.0)
    assert verdict.fault is not None and "matmul.bf16 found no room on it, which others use: HIP" in verdict.fault
    assert verdict.refused == verdict.fault and remembered(device(tmp_path, "full"), "box", tmp_path) is None


def test_what_could_not_be_tried_is_tried_again_but_for_the_part_in_which_the_machine_went_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the worker serves. First the verdicts' folder cannot be had, as on a full disk. Then it can, and has the
    journal of an earlier boot, which blames the part that has no end; what was done before it counts."""
    monkeypatch.setattr("worker.gpus.selftest.AGAIN_SECONDS", 0.1)
    here, disk = device(tmp_path), tmp_path / "disk"
    selftest.folder(tmp_path).symlink_to(disk)
    tests, told = SelfTests([here], "box", tmp_path, 60.0), list[bool]()
    keeper = threading.Thread(target=tests.keep, args=(lambda: told.append(tests.offered("slot-0")),), daemon=True)
    keeper.start()
    wait_for(lambda: told, 60, "the first answer")
    assert not tests.offered("slot-0") and "could not run" in (tests.choice("slot-0").refused or "")
    done = [name for name in this_machines().parts if not name.startswith(("loss.logits", "rows"))]
    passed = Part(status="passed", difference=0.0, tolerance=1.0).model_dump()
    lines = [{"boot": "another"}, *({"end": name, "part": passed} for name in done), {"begin": "loss.logits.fp16"}]
    (tmp_path / "mended").mkdir()
    journal = tmp_path / "mended" / f".box-{key_of(here)}.journal"
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"beg')
    (tmp_path / "mended").rename(disk)
    wait_for(lambda: tests.offered("slot-0"), 60, "the verdict")
    keeper.join(250)
    assert not keeper.is_alive() and told[0] is False and told[-1] is True
    verdict = tests.verdict("slot-0")
    assert verdict is not None and statuses(verdict) == {"loss.logits.fp16": "crashed"}
    assert verdict.parts["loss.logits.fp16"].error == "the machine went down while it ran"
    assert verdict.parts["matmul.bf16"].tolerance == 1.0, "taken from the journal"
    assert verdict.parts["loss.logits.bf16"].status == "passed"
    assert choose(verdict).precisions == ("bf16", "fp32")


# --- what follows from a verdict -------------------------------------------------------------------------


def changed(**parts: Part) -> Verdict:
    """This machine's verdict with some parts otherwise; `_` stands for the dot."""
    return selftest.finished(
        this_machines().model_copy(
            update={"parts": this_machines().parts | {name.replace("_", "."): part for name, part in parts.items()}}
        )
    )


WRONG = Part(status="failed", difference=0.5, tolerance=0.01)
CRASHED = Part(status="crashed", error="was ended by SIGSEGV")


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"matmul_bf16": WRONG}, {"precisions": ("fp16", "fp32")}),
        ({"lora_r16_fp16": CRASHED}, {"limits": Limits(rank_multiple=64)}),
        ({"lora_r8_bf16": WRONG, "lora_r64_bf16": WRONG}, {"precisions": ("fp16", "fp32")}),
        ({"rows_fp32": WRONG}, {"limits": Limits(fp32_rows=1 << 19)}),
        ({"loss_logits_bf16": WRONG, "matmul_fp16": WRONG}, {"precisions": ("fp32",)}),
        ({"attention_flash_bf16": WRONG}, {"precisions": ("bf16", "fp16", "fp32")}),
        ({"dequantize_native_nf4": WRONG}, {"veto": {"native:dequantize"}}),
        ({"loss_native_bf16": CRASHED}, {"veto": {"native:loss"}}),
        ({"loss_portable_bf16": WRONG}, {"veto": {"chunked"}}),
        ({"varlen_bf16": CRASHED}, {"veto": {"varlen"}}),
        ({"gemv_triton_nf4": WRONG}, {"veto": {"triton:gemv"}}),
        ({"dequantize_portable_int8": WRONG}, {"packed_weights": ()}),
        ({"qlora_nf4_bf16": WRONG}, {"packed_weights": ("fp16", "fp32")}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_failed_is_not_used_and_all_of_it_is_told(parts: dict[str, Part], expected: dict[str, Any]) -> None:
    verdict = changed(**parts)
    choice, sound = choose(verdict), choose(this_machines())
    assert choice.refused is None and not verdict.ok
    for name in ("precisions", "veto", "packed_weights", "limits"):
        if name in expected:
            found = getattr(choice, name)
            assert (set(found) if name == "veto" else found) == expected[name]
        elif name == "veto":
            assert choice.veto == sound.veto == {}
    for name in parts:
        assert any(name.replace("_", ".") in words for words in choice.told)
    assert {failure["check"] for failure in verdict.failures} == {name.replace("_", ".") for name in parts}


@pytest.mark.parametrize(
    "verdict",
    [
        changed(optimizer_adamw=WRONG),
        changed(matmul_bf16=WRONG, matmul_fp16=CRASHED, lora_r64_fp32=WRONG),
        this_machines().model_copy(update={"fault": "torch sees no GPU here"}),
    ],
    ids=["optimizer", "no precision", "no device"],
)
def test_a_device_on_which_nothing_computes_rightly_is_refused(verdict: Verdict) -> None:
    assert choose(verdict).refused
    assert selftest.finished(verdict).refused == choose(verdict).refused
    assert choose(verdict).told


def test_without_a_self_test_everything_may_be_used() -> None:
    assert choose(None) == Choice()
    off = SelfTests([SelfTestDevice("cpu", None, {})], "box", Path("/nowhere"), 0.0)
    assert off.complete and off.offered("cpu") and off.as_slot("cpu") == {"selftest": "off"}
    assert "EFT_SELFTEST_SECONDS=0" in off.notes()[0]


# --- runs after it ---------------------------------------------------------------------------------------


def test_a_run_keeps_to_the_verdict_and_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    """bf16 and flash attention failed, and so did the C kernels' dequantisation: a real trainer in real fp32 with what
    is left, whose notices and record say it."""
    verdict = changed(
        matmul_bf16=WRONG, attention_flash_fp32=WRONG, dequantize_native_nf4=WRONG, loss_portable_fp32=WRONG
    )
    rows = write_rows(tmp_path / "rows.jsonl", pairs(12))
    run_dir = write_run(
        tmp_path / "run",
        tiny_dir,
        rows,
        method={"type": "qlora", "r": 4},
        training={"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 64, "precision": "bf16"},
    )
    order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_text())
    order = order.model_copy(update={"selftest": verdict.model_dump(mode="json")})
    (run_dir / ORDER_FILE).write_text(order.model_dump_json())
    try:
        assert run(run_dir) == EXIT_OK, events(run_dir, "error")
    finally:  # other tests of this process use what was ruled out here
        interface.unveto()
        choose_attention("auto", "cpu", "fp32", Choice()).apply()
    notices = {event["code"]: event["message"] for event in events(run_dir, "notice")}
    assert "bf16 failed this device's self-test" in notices["precision_fallback"]
    assert "computed by math" in notices["attention_fallback"]
    for part in ("matmul.bf16", "attention.flash.fp32", "dequantize.native.nf4", "loss.portable.fp32"):
        assert part in notices["selftest"]
    record = events(run_dir, "run_record")[0]["record"]
    assert record["environment"]["precision"] == "fp32"
    assert record["environment"]["attention"] == {"kernels": ["math"]}
    assert record["quantization"]["kernels"]["backend"] == "portable"
    assert record["loss"]["kernel"] == "logits"
    assert record["selftest"]["parts"]["matmul.bf16"]["difference"] == 0.5
    assert record["selftest"]["key"] == verdict.key
    assert "fp32 on cpu (bf16 failed this device's self-test" in (run_dir / "artifacts/adapter/README.md").read_text()


def test_limits_of_the_verdict_reach_the_model(tiny_dir: Path, tmp_path: Path) -> None:
    """Narrow products failed: every LoRA operand of the built model is as wide as what passed."""
    choice = choose(changed(lora_r16_fp32=CRASHED, rows_fp32=WRONG))
    run_dir = write_run(tmp_path / "run", tiny_dir, tmp_path / "rows.jsonl", training={"precision": "fp32"})
    order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    spec, here = order.spec, Run(order, run_dir, EventWriter(run_dir / "events.jsonl"))
    before = torch.are_deterministic_algorithms_enabled()
    placement = place(spec.resources, spec.training, spec.method, choice)
    assert placement.limits == Limits(fp32_rows=1 << 19, rank_multiple=64)
    assert torch.are_deterministic_algorithms_enabled() == before, "on a CPU nothing of the process has changed"
    model, _ = build._adapt(load_model(tiny_dir, torch.float32), here, placement, ())
    narrow = [module for module in model.modules() if isinstance(module, (PaddedA, PaddedB))]
    assert len(narrow) == 28 and {module.padded_rank for module in narrow} == {64}
    assert {operand(module).shape[0] for module in narrow if isinstance(module, PaddedA)} == {64}
    refused = Choice(precisions=(), refused="nothing computes")
    with pytest.raises(DeviceRefused, match="nothing computes"):
        place(spec.resources, spec.training, spec.method, refused)
