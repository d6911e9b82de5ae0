"""Jobs whose blocks are streamed: what they hand back is what the resident job hands back, byte for byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from core.plan.compatibility import check
from core.plan.device import Device
from core.plan.memory.plan import need as need_of
from core.plan.models.shape import Shape
from core.plan.stream import Free, decide
from core.spec.axes.runtime import AutoStream
from core.spec.load import parse_job
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.train.base.stop import Stop
from core.train.memory.streaming.blocks import lay_out
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions
from tests.support import tiny_model
from tests.support.trainer import events, log, pairs, run, write_rows, write_run

BLOCKS = 4
AXES: dict[str, Any] = {
    "method": {"type": "qlora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_length": 64,
    },
    "evaluation": {"type": "held_out", "eval_steps": 2, "samples": {"type": "greedy", "rows": 2, "max_new_tokens": 4}},
    "checkpoint": {"save_steps": 2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few blocks, rows, and a cache."""
    folder = tmp_path_factory.mktemp("streams")
    tiny_model.make(folder / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    config.num_hidden_layers = BLOCKS
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    write_rows(folder / "train.jsonl", pairs(24))
    write_rows(folder / "held.jsonl", pairs(6))
    return folder


def order(place: Path, run_dir: Path, stream: Any, resume_from: list[Path] | None = None, **axes: Any) -> Path:
    return write_run(
        run_dir,
        place / "model",
        place / "train.jsonl",
        held_out=place / "held.jsonl",
        cache_dir=place / "cache",
        resume_from=resume_from,
        memory={"stream": stream},
        **AXES | axes,
    )


def done(place: Path, run_dir: Path, stream: Any, **axes: Any) -> Path:
    path = order(place, run_dir, stream, **axes)
    assert run(path) == EXIT_OK, (events(path)[-1], log(path))
    return path


def handed_back(run_dir: Path) -> tuple[Any, ...]:
    """Every weight, every figure that a step or an evaluation gave, every sample."""
    files = {path.name: path.read_bytes() for path in sorted((run_dir / "artifacts").glob("*/*.safetensors"))}
    figures = [(e["values"]["loss"], e["values"].get("grad_norm")) for e in events(run_dir, "metrics")]
    evaluations = [e["values"] for e in events(run_dir, "evaluation")]
    return files, figures, evaluations, [e["samples"] for e in events(run_dir, "samples")]


def memory_of(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = events(run_dir, "run_record")[0]["record"]["memory"]["stream"]
    return record


@pytest.mark.parametrize(
    "axes, streams",
    [
        ({"batching": {"type": "packed", "tokens_per_batch": 128}, "export": ["merged"]}, ["disk", "host"]),
        ({"method": {"type": "lora", "r": 4, "target_modules": "attention"}, "export": ["merged"]}, ["host"]),
        ({"method": {"type": "lora", "r": 4}, "training": AXES["training"] | {"precision": "fp8"}}, ["disk"]),
    ],
    ids=["packed qlora, merged", "lora on attention, merged", "fp8"],
)
def test_a_streamed_job_hands_back_what_the_resident_one_does(
    place: Path, tmp_path: Path, axes: dict[str, Any], streams: list[str]
) -> None:
    wanted = handed_back(done(place, tmp_path / "none", "none", **axes))
    assert len(wanted[0]) == 1 + len(axes.get("export", [])) and len(wanted[3]) == 3
    for slots, where in enumerate(streams, start=1):
        assert handed_back(done(place, tmp_path / where, {"type": where, "slots": slots}, **axes)) == wanted
        told = memory_of(tmp_path / where)
        assert (told["where"], told["blocks"], told["slots"]) == (where, BLOCKS, slots)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run that nothing disturbs, with `stream: auto`: its blocks are resident."""
    return done(place, place / "auto", "auto")


def test_resume_is_exact_to_the_bit_from_and_to_every_way_of_holding_blocks(
    place: Path, tmp_path: Path, whole: Path
) -> None:
    """Stopped in the middle of an accumulation window on disk, gone on with in host memory; and the same checkpoint
    gone on with resident."""
    wanted = handed_back(whole)
    stop = Stop()
    first = order(place, tmp_path / "first", "disk")
    watching = _StopAtStep(first, stop, after=3)
    assert run(first, watching) == EXIT_CHECKPOINTED
    assert [e["micro_step"] for e in events(first, "checkpoint")][-1] == 1
    for stream in ("host", "none"):
        second = order(place, tmp_path / f"then-{stream}", stream, resume_from=[first])
        assert run(second) == EXIT_OK, events(second)[-1]
        assert events(second, "resumed")[0]["micro_step"] == 1
        assert handed_back(second)[0] == wanted[0]


class _StopAtStep(Stop):
    """Asks to stop in the window after some steps, once its first micro-step is done."""

    def __init__(self, run_dir: Path, stop: Stop, after: int) -> None:
        super().__init__()
        self._run_dir, self._after, self._asked = run_dir, after, 0

    @property
    def requested(self) -> bool:  # type: ignore[override]
        if len(events(self._run_dir, "metrics")) >= self._after:
            self._asked += 1
        return self._asked > 1

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def test_a_data_root_that_disappears_ends_the_job_as_the_machines_fault(place: Path, tmp_path: Path) -> None:
    class Cut(Stop):
        """Cuts a block's file short after the first step, as a disk that is gone would."""

        @property
        def requested(self) -> bool:  # type: ignore[override]
            if events(path, "metrics"):
                for file in (tmp_path / "cache" / "packed").glob("*/block-00002.safetensors"):
                    os.truncate(file, 100)
            return False

        @requested.setter
        def requested(self, value: bool) -> None:
            pass

    axes = {key: value for key, value in AXES.items() if key != "evaluation"}
    path = write_run(
        tmp_path / "run",
        place / "model",
        place / "train.jsonl",
        cache_dir=tmp_path / "cache",
        memory={"stream": "disk"},
        **axes,
    )
    assert run(path, Cut()) == EXIT_FAILED
    error = events(path)[-1]
    assert (error["failure"], error["code"]) == ("machine", "blocks_lost"), error
    assert "block-00002" in error["message"] and "retry" in error["message"]


def test_auto_is_settled_at_the_start_and_says_why(whole: Path) -> None:
    told = memory_of(whole)
    assert told["where"] == "none" and "fits on the device" in told["reason"]
    assert [e["message"] for e in events(whole, "notice") if e["code"] == "stream"] == [
        f"no block is streamed: {told['reason']}"
    ]


@pytest.mark.parametrize("method, options", [("lora", None), ("qlora", QuantOptions("nf4"))])
def test_what_auto_counts_is_what_is_there(place: Path, method: str, options: QuantOptions | None) -> None:
    spec = parse_job(
        {"model": str(place / "model"), "data": str(place / "train.jsonl"), "method": {"type": method, "r": 4},
         "quantization": "none" if options is None else "nf4", "memory": {"stream": "auto"}}
    )  # fmt: skip
    need = need_of(spec, Shape.of_folder(place / "model"), longest=64, device=Device("cpu", products="bf16"))
    assert need is not None
    if options is None:
        model: Any = LlamaForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
    else:
        model, _ = load_quantized(place / "model", torch.bfloat16, options)
    blocks = lay_out(model, trained=False)
    assert need.of == BLOCKS
    for planned, there in ((need.blocks, sum(b.nbytes for b in blocks)), (need.largest_block, blocks[0].nbytes)):
        assert 0 <= planned - there <= 256 * BLOCKS  # the last tensor of a block needs no gap behind it
    free = Free(device=need.blocks // 2, host=None, one_memory=False)
    assert decide(AutoStream(), need, free).where == "host"


def test_full_fine_tuning_cannot_stream() -> None:
    spec = parse_job(
        {"model": "a/b", "data": "file-0123456789abcdefghjkmnpqrs", "method": "full", "memory": {"stream": "disk"}}
    )
    (fault,) = check(spec)
    assert fault.code == "stream_of_what_is_trained" and fault.field == "memory.stream"
