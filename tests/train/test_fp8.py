"""fp8 by torchao: emulated on this CPU, whole runs; where it is not to be had, bf16 and a word about it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.errors import SpecError
from core.hardware.precision import against_fp8
from core.hardware.tables.arch import ROWS
from core.spec.load import parse_job
from core.spec.run.exit_codes import EXIT_OK
from core.train.__main__ import importing
from core.train.model.load import load_model
from core.train.quant import fp8
from core.train.recipe import run
from core.train.selftest.products import fp8_linear
from tests.support.trainer import events, pairs, write_rows, write_run


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arch)
def test_the_table_of_architectures_says_where(row: Any) -> None:
    able = row.fp8 != "none" or row.arch == "cpu"
    reason = against_fp8(row.arch, installed=True, found=None)
    assert (reason is None) == able
    assert reason is None or row.arch in reason
    assert against_fp8(row.arch, installed=False, found=None) is not None
    assert against_fp8(row.arch, installed=True, found="it is off") is not None


def test_it_rounds_as_eight_bits_do() -> None:
    """The emulated layer is inside the bound that a card is held to, and is not simply the bf16 layer."""
    measured = fp8_linear(torch.device("cpu"))
    assert 0.01 < measured.difference < measured.tolerance


def test_layers_are_swapped_and_given_back(tiny_dir: Path) -> None:
    model: Any = load_model(tiny_dir, torch.float32)
    ids = torch.arange(1, 20).unsqueeze(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = model(ids).logits
    said = fp8.to_fp8(model, emulate=True)
    assert said["layers"] == 14 and said["of"] >= 14 and said["emulated"]
    assert type(model.get_output_embeddings()) is nn.Linear
    gap = float((model(ids).logits - exact).abs().max() / exact.abs().max())
    assert 1e-3 < gap < 0.2
    fp8.dense_again(model)
    assert torch.equal(model(ids).logits, exact)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(SpecError, match="multiples of 16"):
        fp8.to_fp8(nn.Sequential(nn.Linear(15, 32)), emulate=True)


def test_a_trainers_process_has_no_torchao_until_fp8_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole process without it: tests/resume/test_resume.py."""
    monkeypatch.delitem(sys.modules, "torchao", raising=False)
    with importing():
        assert find_spec("torchao") is None, "so transformers and PEFT do not see it"
        with pytest.raises(ImportError):
            import torchao  # noqa: F401
    assert fp8.installed()
    assert fp8.to_fp8(nn.Sequential(nn.Linear(32, 32)), emulate=True)["layers"] == 1
    assert find_spec("torchao") is not None


@pytest.mark.parametrize("change", [{"method": "qlora"}, {"quantization": "int8"}], ids=["qlora", "int8"])
def test_packed_weights_are_refused_at_submit(change: dict[str, Any]) -> None:
    from core.plan.compatibility import check

    spec = parse_job({"model": "team/tiny", "data": "rows.jsonl", "training": {"precision": "fp8"}, **change})
    assert {fault.field for fault in check(spec)} == {"training.precision"}


def test_a_run_in_fp8_takes_bf16s_way_and_hands_back_a_plain_model(tiny_dir: Path, tmp_path: Path) -> None:
    """Stated tolerance: 5 % of each loss. The merged model is loaded without torchao and compared by the run itself."""
    rows = write_rows(tmp_path / "rows.jsonl", pairs(16))
    losses = {}
    for precision in ("bf16", "fp8"):
        run_dir = write_run(
            tmp_path / precision,
            tiny_dir,
            rows,
            method={"type": "lora", "r": 4},
            optimizer={"learning_rate": 1e-2},
            training={"max_steps": 6, "per_device_train_batch_size": 4, "max_length": 64, "precision": precision},
            **({"export": "merged"} if precision == "fp8" else {}),
        )
        assert run(run_dir) == EXIT_OK, events(run_dir, "error")
        record = events(run_dir, "run_record")[0]["record"]
        assert record["environment"]["precision"] == precision
        assert (record["fp8"] is not None) == (precision == "fp8")
        losses[precision] = [event["values"]["loss"] for event in events(run_dir, "metrics")]
    (result,) = events(tmp_path / "fp8", "result")
    assert any(artifact["path"].startswith("merged/") for artifact in result["artifacts"])
    assert losses["fp8"][-1] < losses["fp8"][0] and losses["fp8"] != losses["bf16"]
    torch.testing.assert_close(losses["fp8"], losses["bf16"], rtol=0.05, atol=0)
