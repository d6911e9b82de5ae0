"""Which attention kernels a run may use: what was asked for, what passed, what is told; and that torch heeds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from core.errors import SpecError
from core.hardware.selftest import ATTENTION, Choice
from core.spec.axes.training import Training
from core.spec.run.exit_codes import EXIT_OK
from core.train.attention import packed
from core.train.attention.backends import KERNELS, choose_attention
from tests.support.trainer import events, pairs, run, write_rows, write_run

WANTED = Training.model_fields["attention"].annotation.__args__  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    choose_attention("auto", "cpu", "fp32", Choice()).apply()


@pytest.mark.parametrize("wanted", WANTED)
def test_only_what_passed_is_used_and_every_fallback_is_told(wanted: str) -> None:
    for size in range(1, 5):
        for passed in combinations(ATTENTION, size):
            choice = Choice(attention={"bf16": passed})
            try:
                found = choose_attention(wanted, "gfx942", "bf16", choice)  # type: ignore[arg-type]
            except SpecError as error:
                assert error.field == "training.attention"
                assert wanted == "eager" and "eager" not in passed
                continue
            assert set(found.allowed) <= set(passed)
            assert found.eager == (not found.allowed)
            assert not found.cudnn, "no self-test has tried cuDNN's"
            assert (found.varlen_veto is None) == ("flash" in passed)
            expected = "flash" if wanted == "auto" else wanted
            alone = set(passed) == {"flash", "eager"}  # padding needs another kernel
            assert (found.notice is None) == (expected in passed and (wanted == "eager" or not alone))
            if wanted in passed and wanted != "eager" and not alone:
                assert wanted in found.allowed and len(found.allowed) <= (3 if wanted == "auto" else 2)


def test_without_a_self_test_torch_chooses_among_all() -> None:
    found = choose_attention("auto", "gfx942", "bf16", Choice())
    assert found.allowed == KERNELS and found.cudnn and not found.eager and found.notice is None


def test_what_is_expected_of_an_architecture_is_told_when_it_is_missing() -> None:
    slow = Choice(attention={"bf16": ("math", "eager"), "fp32": ("math", "eager")})
    assert "gfx942 should have flash" in (choose_attention("auto", "gfx942", "bf16", slow).notice or "")
    assert "gfx1101 should have flash" in (choose_attention("auto", "gfx1101", "bf16", slow).notice or "")
    assert choose_attention("auto", "gfx908", "bf16", slow).notice is None, "nobody expects more of it"
    assert choose_attention("auto", "gfx942", "fp32", slow).notice is None, "flash kernels take 16 bits"
    assert choose_attention("auto", "gfx9999", "bf16", slow).notice is None


def test_torch_heeds_it() -> None:
    """On a CPU the two kernels round otherwise; a call that no allowed kernel can do is not done by another one."""
    query, key, value = (torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    outputs = {}
    for wanted in ("math", "flash"):
        choose_attention(wanted, "cpu", "fp32", Choice()).apply()
        outputs[wanted] = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert torch.backends.cuda.flash_sdp_enabled() == (wanted == "flash")
    assert not torch.equal(outputs["math"], outputs["flash"])
    torch.testing.assert_close(outputs["math"], outputs["flash"])
    without = choose_attention("flash", "cpu", "fp32", Choice(attention={"fp32": ("flash",)}))
    without.apply()
    assert without.allowed == ("flash",) and not torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(RuntimeError):
        odd = torch.zeros(1, 2, 40, 40, requires_grad=True)  # flash takes no mask that has a gradient
        functional.scaled_dot_product_attention(query, key, value, attn_mask=odd)
    assert packed.Varlen.veto is None


@pytest.mark.parametrize("batching", ["rows", "packed"])
def test_runs_by_each_attention_take_one_way(tiny_dir: Path, tmp_path: Path, batching: str) -> None:
    """Stated tolerance: 1e-4 of each loss in float32, by flash, by math and in plain operations."""
    rows = write_rows(tmp_path / "rows.jsonl", pairs(12))
    losses = {}
    for wanted in ("auto", "math", "eager"):
        training = {
            "max_steps": 3, "per_device_train_batch_size": 3, "max_length": 64, "precision": "fp32",
            "attention": wanted, "tf32": wanted == "math",
        }  # fmt: skip
        axes = {"method": {"type": "lora", "r": 4}, "optimizer": {"learning_rate": 1e-2}, "training": training}
        run_dir = write_run(tmp_path / wanted, tiny_dir, rows, batching=batching, **axes)
        assert run(run_dir) == EXIT_OK
        record = events(run_dir, "run_record")[0]["record"]
        kernels = {"auto": list(KERNELS), "math": ["math"], "eager": ["eager"]}
        assert record["environment"]["attention"] == {"kernels": kernels[wanted]}
        if batching == "packed":
            assert record["packing"]["attention"] == ("eager with a mask" if wanted == "eager" else "segments")
        codes = [event["code"] for event in events(run_dir, "notice")]
        assert ("tf32_unavailable" in codes) == (wanted == "math"), "a CPU has none, and it is said"
        losses[wanted] = [event["values"]["loss"] for event in events(run_dir, "metrics")]
    assert losses["auto"][0] > losses["auto"][-1]
    torch.testing.assert_close(losses["math"], losses["auto"], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses["eager"], losses["auto"], rtol=1e-4, atol=0)
