"""What a card's libraries cannot do right is kept away from them: narrow ranks are padded, too large products are made
in parts."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from core.errors import SpecError
from core.hardware.tables import faults
from core.hardware.tables.faults import KnownFault, Limits
from core.spec.job import JobSpec
from core.spec.run.exit_codes import EXIT_OK
from core.train.model.gemm_limits import describe_row_splits, split_matmuls, training_pass, widest
from core.train.recipe import run
from tests.support.trainer import events, log, notices, pairs, weights_file, write_rows, write_run

AXES: dict[str, Any] = {
    "optimizer": {"learning_rate": 1e-2},
    "training": {"max_steps": 3, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"},
}


class Products(TorchDispatchMode):
    """The sizes of every matrix product, forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "linear"):
            for tensor in args:
                if isinstance(tensor, torch.Tensor):
                    self.sizes |= set(tensor.shape)
        return func(*args, **(kwargs or {}))


def limit(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    """As if this CPU were a card with such a fault."""
    row = KnownFault("test", ("cpu",), "a fault", "crash", ("https://github.com/x/y/issues/1",), "a way", limits=limits)
    monkeypatch.setattr(faults, "FAULTS", (row,))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", pairs(12))


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": "count " * 6, "completion": f" {n} and so on"} for n in range(24)]
    return write_rows(tmp_path_factory.mktemp("rows") / "long.jsonl", rows)


def go(folder: Path, model: Path, rows: Path, **axes: Any) -> tuple[Path, set[int]]:
    run_dir = write_run(folder, model, rows, **AXES | axes)
    with Products() as products:
        assert run(run_dir) == EXIT_OK, (events(run_dir)[-1], log(run_dir))
    return run_dir, products.sizes


@pytest.mark.parametrize(
    "method",
    [
        {"type": "lora", "r": 5},
        {"type": "lora", "r": 5, "use_dora": True},
        {"type": "qlora", "r": 5, "lora_dropout": 0.1},
    ],
    ids=["lora", "dora", "qlora"],
)
def test_ranks_are_padded_and_nothing_else_changes(
    tmp_path: Path, tiny_dir: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, method: dict[str, Any]
) -> None:
    plain, narrow = go(tmp_path / "plain", tiny_dir, rows, method=method)
    assert 5 in narrow, "otherwise this test says nothing"
    limit(monkeypatch, Limits(rank_multiple=48))
    padded, sizes = go(tmp_path / "padded", tiny_dir, rows, method=method)
    assert 48 in sizes
    if "use_dora" not in method:  # DoRA's first magnitudes come of B·A itself, once, on the CPU
        assert 5 not in sizes
    before, after = load_file(weights_file(plain)), load_file(weights_file(padded))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.shape == after[name].shape, "what is saved has the rank that was asked for"
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-6)
    record = events(padded, "run_record")[0]["record"]
    assert record["environment"]["limits"]["rank_multiple"] == 48


WIDE = {"training": {"max_steps": 2, "per_device_train_batch_size": 12, "max_length": 64, "precision": "fp32"}}
"""Passes of more rows (tokens) than any of the model's layers is wide: 258, its vocabulary."""


@pytest.mark.parametrize(
    "axes",
    [
        {"method": {"type": "lora", "r": 5, "use_dora": True}},
        {"method": {"type": "qlora", "r": 5, "lora_dropout": 0.1}},
        {"method": {"type": "qlora", "r": 5, "use_dora": True}},
        {"method": "full", "optimizer": {"learning_rate": 1e-4}},
    ],
    ids=["dora", "qlora", "qdora", "full"],
)
def test_no_product_has_more_rows_and_nothing_else_changes(
    tmp_path: Path, tiny_dir: Path, long_rows: Path, monkeypatch: pytest.MonkeyPatch, axes: dict[str, Any]
) -> None:
    """Every product of the run, forwards and backwards; DoRA over a dense base multiplies by the weight itself."""
    plain, sizes = go(tmp_path / "plain", tiny_dir, long_rows, **WIDE | axes)
    assert max(sizes) > 400, "otherwise this test says nothing"
    assert not notices(plain)
    limit(monkeypatch, Limits(fp32_rows=300))
    parted, sizes = go(tmp_path / "parted", tiny_dir, long_rows, **WIDE | axes)
    assert max(sizes) <= 300
    (notice,) = notices(parted)
    assert notice["code"] == "products_in_parts"
    assert re.match(r"a forward pass of \d+ tokens in float32 \(training.per_device_train", notice["message"])
    before, after = load_file(weights_file(plain)), load_file(weights_file(parted))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-5)


def test_no_product_has_more_bytes(
    tmp_path: Path, tiny_dir: Path, long_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, Limits(output_bytes=300 * 4 * 128))
    parted, sizes = go(tmp_path / "parted", tiny_dir, long_rows, **WIDE)
    assert 256 in sizes, "in parts of whole tiles, where the layer is widest"
    assert max(sizes) <= 600, "where it is half as wide, in parts of twice as many rows"
    (notice,) = notices(parted)
    assert re.search(r"products of more than 300 rows are made in parts", notice["message"])


def test_a_layer_in_parts_is_the_layer() -> None:
    """In fp16 or bf16 by the same operators: a copy of the model, its state and GPT-2's own kind of layer, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), Conv1D(4, 6))
    x = torch.randn(7, 5, 8, requires_grad=True)
    wanted = model(x)
    (grad,) = torch.autograd.grad(wanted.square().sum(), x)
    names = list(model.state_dict())
    split_matmuls(model, Limits(fp32_rows=3))
    for each in (model, copy.deepcopy(model)):
        with Products() as products:
            found = each(x)
            (part,) = torch.autograd.grad(found.square().sum(), x)
        assert found.shape == wanted.shape and 3 in products.sizes and 35 not in products.sizes
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(part, grad)
        assert list(each.state_dict()) == names
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        model(x)
    assert 35 in products.sizes, "the rows of 16-bit products are right"


def spec(**axes: Any) -> JobSpec:
    return JobSpec.model_validate({"model": "team/tiny", "data": "/data/rows.jsonl"} | axes)


@pytest.mark.parametrize(
    ("axes", "tokens", "field"),
    [
        ({"training": {"per_device_train_batch_size": 6}}, 600, "training.per_device_train_batch_size"),
        ({"batching": {"type": "packed", "tokens_per_batch": 4096}}, 4096, "batching.tokens_per_batch"),
        ({"batching": {"type": "tokens", "tokens_per_batch": 64}}, 100, "batching.tokens_per_batch"),
        (
            {
                "evaluation": {"type": "held_out", "per_device_eval_batch_size": 32},
                "data": {"train": "/r", "eval": "/e"},
            },
            800,
            "training.per_device_train_batch_size",
        ),
    ],
    ids=["rows", "packed", "one long row", "evaluation"],
)
def test_the_largest_pass(axes: dict[str, Any], tokens: int, field: str) -> None:
    assert training_pass(spec(**axes), longest=100) == (tokens, field)


def test_products_just_within_and_just_beyond() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = torch.nn.Linear(8, 32), torch.nn.Linear(8, 1000)

        def get_output_embeddings(self) -> torch.nn.Module:
            return self.head

    model, job = Model(), spec(training={"per_device_train_batch_size": 1})
    assert widest(model, head=False) == 32 and widest(model, head=True) == 1000
    bf16 = torch.bfloat16

    def told(limits: Limits, dtype: torch.dtype, whole: bool) -> str | None:
        return describe_row_splits(job, model, limits, dtype, 100, whole)

    assert told(Limits(output_bytes=100 * 32 * 2), bf16, False) is None
    assert "more than 99 rows" in (told(Limits(output_bytes=100 * 32 * 2 - 1), bf16, False) or "")
    assert "(1,000 wide)" in (told(Limits(output_bytes=100 * 32 * 2), bf16, True) or "")
    assert told(Limits(fp32_rows=99), bf16, True) is None
    assert "silently wrong" in (told(Limits(fp32_rows=99), torch.float32, True) or "")
    model.experts = torch.nn.Module()
    model.experts.down_proj = torch.nn.Parameter(torch.empty(4, 8, 32))  # multiplied with by no layer
    assert told(Limits(fp32_rows=100), torch.float32, True) is None
    for limits, dtype in ((Limits(fp32_rows=99), torch.float32), (Limits(output_bytes=100 * 32), bf16)):
        with pytest.raises(SpecError, match=r"experts \(fused experts\) .* cannot be made in parts") as refused:
            told(limits, dtype, False)
        assert refused.value.field == "training.per_device_train_batch_size"
