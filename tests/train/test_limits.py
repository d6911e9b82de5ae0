"""What a card's libraries cannot do right is kept away from them: narrow ranks are padded, too large passes refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch.utils._python_dispatch import TorchDispatchMode

from core.errors import SpecError
from core.hardware import faults
from core.hardware.faults import KnownFault, Limits
from core.spec.job import JobSpec
from core.spec.run import EXIT_FAILED, EXIT_OK
from core.train.limits import check_products, largest_pass, widest
from core.train.recipe import run
from tests.support.trainer import events, log, pairs, weights, write_rows, write_run

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
    before, after = load(weights(plain)), load(weights(padded))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert weight.shape == after[name].shape, "what is saved has the rank that was asked for"
        torch.testing.assert_close(after[name], weight, rtol=1e-4, atol=1e-6)
    record = events(padded, "run_record")[0]["record"]
    assert record["environment"]["limits"]["rank_multiple"] == 48


@pytest.mark.parametrize(
    ("limits", "axes", "field", "words"),
    [
        (
            Limits(fp32_rows=100),
            {},
            "training.per_device_train_batch_size",
            r"a forward pass of \d+ tokens in float32: on this card products of more than 100 rows",
        ),
        (
            Limits(output_bytes=1 << 12),
            {"batching": {"type": "tokens", "tokens_per_batch": 64}},
            "batching.tokens_per_batch",
            r"at most \d+ tokens a pass are right",
        ),
    ],
    ids=["rows", "bytes"],
)
def test_what_would_be_wrong_is_refused_before_the_first_step(
    tmp_path: Path,
    tiny_dir: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: Limits,
    axes: dict[str, Any],
    field: str,
    words: str,
) -> None:
    limit(monkeypatch, limits)
    run_dir = write_run(tmp_path / "run", tiny_dir, rows, **AXES | axes)
    assert run(run_dir) == EXIT_FAILED
    error = events(run_dir)[-1]
    assert (error["failure"], error["field"]) == ("user", field), error
    assert re.search(words, error["message"])
    assert not events(run_dir, "metrics")


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
            3200,
            "evaluation.per_device_eval_batch_size",
        ),
    ],
    ids=["rows", "packed", "one long row", "evaluation"],
)
def test_the_largest_pass(axes: dict[str, Any], tokens: int, field: str) -> None:
    assert largest_pass(spec(**axes), longest=100) == (tokens, field)


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
    check_products(job, model, Limits(output_bytes=100 * 32 * 2), bf16, 100, False)
    with pytest.raises(SpecError, match="at most 99 tokens"):
        check_products(job, model, Limits(output_bytes=100 * 32 * 2 - 1), bf16, 100, False)
    with pytest.raises(SpecError, match=r"\(1,000 wide\)"):
        check_products(job, model, Limits(output_bytes=100 * 32 * 2), bf16, 100, True)
    check_products(job, model, Limits(fp32_rows=99), bf16, 100, True)
    with pytest.raises(SpecError, match="silently wrong"):
        check_products(job, model, Limits(fp32_rows=99), torch.float32, 100, True)
