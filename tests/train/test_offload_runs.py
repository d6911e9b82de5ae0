"""Jobs whose optimizer is in host memory: what they hand back is what the resident job hands back, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from core.plan.compatibility import check
from core.spec.load import parse_job
from core.spec.run.exit_codes import EXIT_OK
from tests.support import tiny_model
from tests.support.trainer import events, log, pairs, run, write_rows, write_run

AXES: dict[str, Any] = {
    "training": {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
        "precision": "bf16",
    },
    "checkpoint": {"save_steps": 2},
}
FULL: dict[str, Any] = AXES | {
    "method": "full",
    "optimizer": {"learning_rate": 2e-1},  # so high that the best evaluation is not the last
    "evaluation": {
        "type": "held_out", "eval_steps": 1, "load_best_model_at_end": True,
        "samples": {"type": "greedy", "rows": 2, "max_new_tokens": 4},
    },
}  # fmt: skip
QLORA: dict[str, Any] = AXES | {
    "method": {"type": "qlora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "export": ["merged"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own, saved in bfloat16, and rows."""
    folder = tmp_path_factory.mktemp("offloads")
    tiny_model.make(folder / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", pairs(24))
    write_rows(folder / "held.jsonl", pairs(6))
    return folder


def done(place: Path, run_dir: Path, axes: dict[str, Any], memory: dict[str, Any]) -> Path:
    held_out = place / "held.jsonl" if "evaluation" in axes else None
    path = write_run(
        run_dir, place / "model", place / "train.jsonl", held_out=held_out, cache_dir=place / "cache", memory=memory,
        **axes,
    )  # fmt: skip
    assert run(path) == EXIT_OK, (events(path)[-1], log(path))
    return path


def handed_back(run_dir: Path) -> tuple[Any, ...]:
    """Every weight, every figure that a step or an evaluation gave, every sample, what the result says of the best."""
    files = {path.parent.name: path.read_bytes() for path in sorted((run_dir / "artifacts").glob("*/*.safetensors"))}
    figures = [(e["values"]["loss"], e["values"].get("grad_norm")) for e in events(run_dir, "metrics")]
    evaluations = [e["values"] for e in events(run_dir, "evaluation")]
    samples = [e["samples"] for e in events(run_dir, "samples")]
    return files, figures, evaluations, samples, events(run_dir, "result")[0]["result"]["best"]


def test_full_fine_tuning_hands_back_the_same_model(place: Path, tmp_path: Path) -> None:
    """The best step's weights, loaded once training is over; the record and a notice say what was done."""
    wanted = handed_back(done(place, tmp_path / "none", FULL, {}))
    assert wanted[4]["restored"] and wanted[4]["step"] not in (0, 4)
    found = done(place, tmp_path / "host", FULL, {"offload_optimizer": "host"})
    assert handed_back(found) == wanted
    record = events(found, "run_record")[0]["record"]
    about = record["memory"]["offload_optimizer"]
    assert (about["where"], about["units"], about["narrow_dtype"]) == ("host", 4, "bfloat16")
    assert about["trained"] == record["parameters"]["trained"] == record["parameters"]["total"]
    assert 0 < about["narrowed"] < about["trained"] and about["host_bytes"] == 16 * about["trained"]
    assert "offload" in [event["code"] for event in events(found, "notice")]


def test_adapters_over_streamed_blocks(place: Path, tmp_path: Path) -> None:
    """Blocks from host memory, checkpointed by themselves, and the merged model."""
    wanted = handed_back(done(place, tmp_path / "none", QLORA, {}))
    assert set(wanted[0]) == {"adapter", "merged"}
    memory = {"offload_optimizer": {"type": "host", "pinned": False}, "stream": {"type": "host", "slots": 1}}
    found = done(place, tmp_path / "host", QLORA, memory)
    assert handed_back(found) == wanted
    held = events(found, "run_record")[0]["record"]["memory"]
    assert (held["stream"]["where"], held["offload_optimizer"]["narrowed"]) == ("host", 0)


def test_several_ranks_are_refused() -> None:
    job = {"model": "a/b", "data": {"train": "x.jsonl"}, "memory": {"offload_optimizer": "host"}}
    assert [fault.code for fault in check(parse_job(job | {"resources": {"gpus": 2}}))] == ["offload_over_ranks"]
    assert not check(parse_job(job))
