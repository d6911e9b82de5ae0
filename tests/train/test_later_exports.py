"""Formats that are made after the training have the bytes of those that the training run makes at its end."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from core.spec.axes.method import Adapter
from core.spec.axes.quantization import QAT
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.entry import export
from tests.support.tools import CACHE, gguf_tools, torchao_tools
from tests.support.trainer import Forked, events, log, pairs, run, start, write_rows, write_run
from tests.train.test_exports import model_dir

__all__ = ["model_dir"]

ROUNDED: dict[str, dict[str, Any]] = {
    "rounded": {"type": "qat", "weights": "int4", "group_size": 32, "skip_modules": ["down_proj"]},
    "rounded full": {"type": "qat", "weights": "int8"},
}
METHODS: dict[str, tuple[Any, Any]] = {
    "rounded": ({"type": "lora", "r": 4, "target_modules": "attention"}, ["torchao_int4"]),
    "rounded full": ("full", ["torchao_int8"]),
    "qlora": ({"type": "qlora", "r": 4, "target_modules": "all-linear"}, ["merged"]),
    "pissa": ({"type": "lora", "r": 4, "init_lora_weights": "pissa"}, ["merged", "vllm"]),
    "full": ("full", [{"type": "gguf", "quantization": "F16"}]),
}


def check_rounded(base: Path, trained: Path, folder: Path, spec: QAT) -> None:
    """Each weight that the folder has in few bits is, to the bit, the trained one as torchao's own fake quantiser
    rounds it."""
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

    share = PerGroup(spec.group_size) if spec.weights == "int4" else PerAxis(0)
    theirs = IntxFakeQuantizer(IntxFakeQuantizeConfig(getattr(torch, spec.weights), share))
    model: Any = AutoModelForCausalLM.from_pretrained(base if trained.name == "adapter" else trained, dtype="float32")
    if trained.name == "adapter":
        model = PeftModel.from_pretrained(model, str(trained)).merge_and_unload()
    files = load_file(folder / "model.safetensors")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = {name.removesuffix("._weight_qdata") for name in files if name.endswith("._weight_qdata")}
    assert found == {name for name in layers if not name.endswith(("lm_head", *spec.skip_modules))}
    for name in found:
        q, scale = files[f"{name}._weight_qdata"], files[f"{name}._weight_scale"]
        assert scale.dtype == torch.float32
        read = q * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)
        assert torch.equal(read, theirs(layers[name].weight.detach())), name


@pytest.mark.parametrize("name", METHODS)
def test_later_is_the_same_to_the_bit(tmp_path: Path, model_dir: Path, name: str) -> None:
    method, exports = METHODS[name]
    if name == "full":
        gguf_tools()
    if name in ROUNDED:
        torchao_tools()
    rows = write_rows(tmp_path / "train.jsonl", pairs(8))
    training = {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"}
    axes: dict[str, Any] = {"method": method, "training": training, "optimizer": {"learning_rate": 1e-2}}
    if name in ROUNDED:
        axes["quantization"] = ROUNDED[name]
    first = write_run(tmp_path / "first", model_dir, rows, cache_dir=CACHE, name="Same", export=exports, **axes)
    assert run(first) == EXIT_OK, (events(first)[-1], log(first))
    plain = RunOrder.model_validate_json((first / ORDER_FILE).read_bytes())
    trained = first / "artifacts" / ("model" if method == "full" else "adapter")

    later = tmp_path / "later"
    later.mkdir()
    spec = plain.spec
    if isinstance(spec.method, Adapter):
        spec = spec.model_copy(update={"method": spec.method.handed_back()})
    order = plain.model_copy(update={"spec": spec, "adapter_dir": str(trained), "tokenizer_dir": str(trained)})
    (later / ORDER_FILE).write_text(order.model_dump_json())
    if name == "qlora":  # one as a worker starts it; a fork has what a process of its own would import
        assert start(later, "-m", "core.train.entry.export").wait(200) == EXIT_OK, log(later)
    else:
        assert Forked(later, program=partial(export.main, [str(later)])).wait() == EXIT_OK, log(later)
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
    if name in ROUNDED:
        assert outcomes[0][0]["retention"]["kl_exported"] < 1e-6, "torchao computes what the training did"
        check_rounded(model_dir, trained, first / "artifacts" / folder, QAT(**ROUNDED[name]))
    hashes = [{one["path"]: one["sha256"] for one in each["artifacts"]} for each in told]
    folders = tuple(f"{one['folder']}/" for one in outcomes[0])
    made = {path for path in hashes[1] if not path.endswith("README.md")}
    assert made and made == {path for path in hashes[0] if path.startswith(folders) and "README" not in path}
    if name in ROUNDED:  # what safetensors says beside the tensors has another order in each process
        made.remove(weights := f"{folder}/model.safetensors")
        one, other = (load_file(run_dir / "artifacts" / weights) for run_dir in (first, later))
        assert one.keys() == other.keys() and all(torch.equal(one[tensor], other[tensor]) for tensor in one)
    assert {path: hashes[0][path] for path in made} == {path: hashes[1][path] for path in made}
    card = (later / "artifacts" / folder / "README.md").read_text()
    assert "## What the exported formats have kept" in card and "## How it was trained" in card
