"""Every way to train some of a model's parameters, as whole runs: stopped and resumed to the bit, read again by plain
PEFT or transformers, and counted by the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.plan.device import Device
from core.plan.memory.plan import plan
from core.plan.models.shape import Shape
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.base.stop import Stop
from core.train.export.merge_first import write_merged_model
from tests.support.trainer import events, pairs, run, write_rows, write_run

AXES: dict[str, Any] = {
    "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1},
    "training": {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "precision": "fp32",
        "max_length": 64,
    },
}
NEW = ["<look>", "zyx wvu"]
METHODS: dict[str, dict[str, Any]] = {
    "rslora": {"method": {"type": "lora", "r": 4, "use_rslora": True}},
    "rank 1": {"method": {"type": "lora", "r": 1, "target_modules": ["q_proj", "layers.1.mlp.up_proj"]}},
    "lora+": {"method": {"type": "lora", "r": 4, "loraplus_lr_ratio": 16}},
    "lora+ with dora": {"method": {"type": "qlora", "r": 4, "loraplus_lr_ratio": 4, "use_dora": True}},
    "pissa": {"method": {"type": "lora", "r": 4, "init_lora_weights": "pissa", "use_rslora": True}},
    "olora over nf4": {"method": {"type": "qlora", "r": 4, "init_lora_weights": "olora"}},
    "whole modules": {"method": {"type": "lora", "r": 4, "modules_to_save": ["model.norm", "layers.1.mlp"]}},
    "embeddings and head": {
        "method": {"type": "qlora", "r": 4, "modules_to_save": ["embed_tokens", "lm_head"]},
        "export": [{"type": "merged", "dtype": "fp32"}],
        "model": "untied",
        "training": AXES["training"] | {"precision": "bf16"},
    },
    "new tokens": {
        "method": {"type": "lora", "r": 4, "new_tokens": NEW, "loraplus_lr_ratio": 4},
        "export": [{"type": "merged", "dtype": "fp32"}],
    },
    "new tokens of an untied model": {
        "method": {"type": "qlora", "r": 4, "target_modules": "attention", "new_tokens": NEW},
        "optimizer": AXES["optimizer"] | {"type": "muon"},
        "export": [{"type": "merged", "dtype": "fp32"}],
        "model": "untied",
        "training": AXES["training"] | {"precision": "bf16"},
    },
    "neftune": {"method": {"type": "lora", "r": 4}, "training": AXES["training"] | {"neftune_noise_alpha": 5}},
    "oft": {"method": {"type": "oft", "oft_block_size": 8}},
    "oft over nf4": {"method": {"type": "oft", "r": 4, "use_cayley_neumann": False}, "quantization": "nf4"},
    "rounded to int4": {
        "method": {"type": "lora", "r": 4, "target_modules": "attention", "modules_to_save": ["layers.1.mlp"]},
        "quantization": {"type": "qat", "weights": "int4"},
        "training": AXES["training"] | {"precision": "bf16"},
    },
    "rounded to int8": {"method": "full", "quantization": {"type": "qat", "skip_modules": ["o_proj"]}},
    "last layer": {"method": {"type": "full", "train": {"layers": "last 1"}}},
    "listed layer and norms": {"method": {"type": "full", "train": {"layers": [0], "norms": True}}},
    "head": {"method": {"type": "full", "train": {"layers": "none", "head": True, "embeddings": True}}},
    "groups": {
        "method": {"type": "lora", "r": 4},
        "optimizer": AXES["optimizer"]
        | {
            "parameter_groups": [
                {"pattern": "*.mlp.*lora_A.weight", "learning_rate_factor": 0.1},
                {"pattern": "model.layers.0.*", "weight_decay_factor": 0.0},
            ]
        },
    },
}


class StopInside(Stop):
    """Asked to leave at the n-th place of training where the run looks whether it should."""

    def __init__(self, run_dir: Path, place: int) -> None:
        self.run_dir, self.left = run_dir, place

    @property  # type: ignore[override]
    def requested(self) -> bool:
        if not any(event["phase"] == "training" for event in events(self.run_dir, "phase")):
            return False
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", pairs(12))


def handed_back(run_dir: Path) -> list[bytes]:
    """The adapter or the model; a merged model beside it is left out."""
    files = [*run_dir.glob("artifacts/adapter/*.safetensors"), *run_dir.glob("artifacts/model/*.safetensors")]
    assert files
    return [path.read_bytes() for path in files]


def untied(tiny: Path, folder: Path) -> Path:
    """The tiny model with an output head of its own."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", METHODS)
def test_a_method_resumes_to_the_bit_and_is_read_again(tiny_dir: Path, rows: Path, tmp_path: Path, name: str) -> None:
    axes = AXES | METHODS[name]
    if axes.pop("model", "tied") == "untied":
        tiny_dir = untied(tiny_dir, tmp_path / "untied")
    calm = write_run(tmp_path / "calm", tiny_dir, rows, **axes)
    assert run(calm) == EXIT_OK, events(calm, "error")
    first = write_run(tmp_path / "first", tiny_dir, rows, **axes)
    assert run(first, StopInside(first, 4)) == EXIT_CHECKPOINTED, events(first)[-1]
    (left,) = events(first, "checkpoint")
    assert left["micro_step"] == 1, "not inside a window"
    second = write_run(tmp_path / "second", tiny_dir, rows, resume_from=[first], **axes)
    assert run(second) == EXIT_OK, events(second, "error")
    assert handed_back(second) == handed_back(calm)

    record = events(calm, "run_record")[0]["record"]
    job = parse_job({"model": str(tiny_dir), "data": "/rows.jsonl", **axes})
    planned = plan(resolve(job), Shape.of_folder(tiny_dir), longest=64, device=Device("cpu", products="fp32"))
    for outcome in events(calm, "result")[0]["result"].get("export", ()):
        assert outcome["released"], outcome
    assert planned.trained == record["parameters"]["trained"]

    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    ids = torch.arange(3, 20)[None]
    before = base(ids).logits.detach()
    adapter = calm / "artifacts" / "adapter"
    if adapter.is_dir():
        base.resize_token_embeddings(len(AutoTokenizer.from_pretrained(adapter)))
        again: Any = PeftModel.from_pretrained(base, str(adapter))
    else:
        again = AutoModelForCausalLM.from_pretrained(calm / "artifacts" / "model")
        same = {n for n, p in again.named_parameters() if torch.equal(p, base.get_parameter(n))}
        assert sum(base.get_parameter(n).numel() for n in same) == planned.parameters - planned.trained
    assert not torch.equal(again(ids).logits[..., : before.shape[-1]], before)
    if name == "new tokens":
        new = AutoTokenizer.from_pretrained(adapter)("<look> and zyx wvu", return_tensors="pt")["input_ids"]
        assert int((new >= before.shape[-1]).sum()) == 2
        write_merged_model(tiny_dir, adapter, None, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(merged(new).logits, again(new).logits, rtol=1e-4, atol=1e-4)
