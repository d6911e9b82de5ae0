"""Formats that are made after the training have the bytes of those that the training run makes at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.spec.axes.method import Adapter
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from tests.support.tools import CACHE, gguf_tools
from tests.support.trainer import events, log, pairs, run, start, write_rows, write_run
from tests.train.test_exports import model_dir

__all__ = ["model_dir"]

METHODS: dict[str, tuple[Any, Any]] = {
    "qlora": ({"type": "qlora", "r": 4, "target_modules": "all-linear"}, ["merged"]),
    "pissa": ({"type": "lora", "r": 4, "init_lora_weights": "pissa"}, ["merged", "vllm"]),
    "full": ("full", [{"type": "gguf", "quantization": "F16"}]),
}


@pytest.mark.parametrize("name", METHODS)
def test_later_is_the_same_to_the_bit(tmp_path: Path, model_dir: Path, name: str) -> None:
    method, exports = METHODS[name]
    if name == "full":
        gguf_tools()
    rows = write_rows(tmp_path / "train.jsonl", pairs(8))
    training = {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"}
    axes: dict[str, Any] = {"method": method, "training": training, "optimizer": {"learning_rate": 1e-2}}
    first = write_run(tmp_path / "first", model_dir, rows, cache_dir=CACHE, name="Same", export=exports, **axes)
    assert run(first) == EXIT_OK, (events(first)[-1], log(first))
    plain = RunOrder.model_validate_json((first / ORDER_FILE).read_bytes())
    trained = first / "artifacts" / ("model" if name == "full" else "adapter")

    later = tmp_path / "later"
    later.mkdir()
    spec = plain.spec
    if isinstance(spec.method, Adapter):
        spec = spec.model_copy(update={"method": spec.method.handed_back()})
    order = plain.model_copy(update={"spec": spec, "adapter_dir": str(trained), "tokenizer_dir": str(trained)})
    (later / ORDER_FILE).write_text(order.model_dump_json())
    child = start(later, "-m", "core.train.entry.export")
    assert child.wait(200) == EXIT_OK, log(later)
    told = [events(folder)[-1] for folder in (first, later)]
    for outcome in (outcomes := [one["result"]["export"] for one in told])[1]:
        assert outcome["released"], outcome
    measured = [[{**one, "seconds": 0, "bytes": 0} for one in each] for each in outcomes]
    assert measured[0] == measured[1], "the same figures"
    if name == "pissa":
        served = outcomes[1][1]
        assert served["max_lora_rank"] == 8, "twice the rank of the training"
        assert served["retention"]["retention"] == pytest.approx(1, abs=1e-5)
        card = (later / "artifacts" / "vllm" / "README.md").read_text()
        assert "--max-lora-rank 8 --lora-modules" in card
    folder = outcomes[0][0]["folder"]
    hashes = [{one["path"]: one["sha256"] for one in each["artifacts"]} for each in told]
    folders = tuple(f"{one['folder']}/" for one in outcomes[0])
    made = {path for path in hashes[1] if not path.endswith("README.md")}
    assert made and made == {path for path in hashes[0] if path.startswith(folders) and "README" not in path}
    assert {path: hashes[0][path] for path in made} == {path: hashes[1][path] for path in made}
    card = (later / "artifacts" / folder / "README.md").read_text()
    assert "## What the exported formats have kept" in card and "## How it was trained" in card
