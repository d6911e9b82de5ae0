"""Every way of training on `device.type == "cuda"`: losses, norms and weights are the CPU's, to the bit.

Each row of WAYS is a job that is run on the CPU, and on a GPU with the streams beside the default one as late and as
early as the program allows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.spec.run.exit_codes import EXIT_OK
from core.train.batch import Batch
from core.train.memory.transfer.transfer import StagedTransfer, Transfer
from tests.rehearsal import numbers, support
from tests.support.trainer import events, log, pairs, weights, weights_file, write_rows, write_run

LORA, QLORA = {"type": "lora", "r": 4}, {"type": "qlora", "r": 4}
CHECKPOINTED = {"gradient_checkpointing": True}
WAYS: dict[str, dict[str, Any]] = {
    "lora": {"method": LORA},
    "lora, fp32": {"method": LORA, "training": {"precision": "fp32"}},
    "lora, fp16": {"method": LORA, "training": {"precision": "fp16"}},
    "lora, packed": {"method": LORA, "batching": {"type": "packed", "tokens_per_batch": 64}},
    "lora, selective": {"method": LORA, "memory": {"gradient_checkpointing": "selective"}},
    "lora, activations offloaded": {"method": LORA, "memory": CHECKPOINTED | {"activation_offloading": "host"}},
    "dora": {"method": LORA | {"use_dora": True}},
    "qlora nf4": {"method": QLORA},
    "qlora int8": {"method": QLORA, "quantization": "int8"},
    "qlora from host": {"method": QLORA, "memory": {"stream": "host"}},
    "qlora from disk": {"method": QLORA, "memory": {"stream": "disk"}},
    "full": {"method": "full"},
    "full, offloaded": {
        "method": "full",
        "memory": {"offload_optimizer": "host"},
        "training": {"gradient_accumulation_steps": 2},
    },
    "full, offloaded, fp16": {
        "method": "full",
        "memory": {"offload_optimizer": {"type": "host", "pinned": False}},
        "training": {"precision": "fp16"},
    },
    "evaluated": {
        "method": LORA,
        "evaluation": {
            "type": "held_out",
            "eval_steps": 2,
            "samples": {"type": "sampling", "rows": 2, "max_new_tokens": 4},
        },
    },
}
BESIDE = ("lora", "lora, activations offloaded", "qlora from host", "qlora from disk", "full, offloaded")
"""Ways that also run in the second order: those that copy beside the computation, and a plain one."""
OFF: dict[str, float] = {"lora, fp32": 1e-4, "lora, packed": 2e-3}
"""Ways that differ from the CPU, by how much at most, relative to each loss and to the largest weight."""


def _no_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transfer, "wait", lambda self, event: None)


def _no_event(patch: pytest.MonkeyPatch) -> None:
    copy = Transfer.copy
    patch.setattr(Transfer, "copy", lambda self, source, target, *, after: copy(self, source, target, after=None))


def _no_wait_for_pieces(patch: pytest.MonkeyPatch) -> None:
    """`fetch` hands out pieces, and buffers are used again, before their copies are done."""
    copy = Transfer.copy

    def forgotten(self: Transfer, source: Any, target: Any, *, after: Any) -> Any:
        copy(self, source, target, after=after)
        return None

    patch.setattr(Transfer, "copy", forgotten)


def _left_on_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Batch, "to", lambda self, device: self)


def _other_dtype(patch: pytest.MonkeyPatch) -> None:
    send = StagedTransfer.send
    patch.setattr(
        StagedTransfer,
        "send",
        lambda self, source, target, *, after: send(self, source.to(torch.float16).float(), target, after=after),
    )


ACTIVATIONS, OFFLOADED = "lora, activations offloaded", "full, offloaded"
MUTANTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "activations are used before they are back": (ACTIVATIONS, "late", _no_wait),
    "activations leave before they are computed": (ACTIVATIONS, "early", _no_event),
    "weights are used before they are updated": (OFFLOADED, "late", _no_wait),
    "gradients leave before they are computed": (OFFLOADED, "early", _no_event),
    "gradients are added up before they have arrived": (OFFLOADED, "late", _no_wait_for_pieces),
    "weights are sent by way of another dtype": (OFFLOADED, "late", _other_dtype),
    "blocks are used before they are there": ("qlora from host", "late", _no_wait),
    "slots are filled while they are in use": ("qlora from host", "early", _no_event),
    "blocks of files are used before they are there": ("qlora from disk", "late", _no_wait),
    "batches stay on the host": ("lora", "late", _left_on_host),
}
"""A line that orders copies and computation, taken out: the way of training, the order and the patch that shows it."""


@pytest.fixture(scope="module")
def train(blocks_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a way, an accelerator and an order to the folder of the run, which has ended well."""
    base = tmp_path_factory.mktemp("ways")
    rows = write_rows(base / "rows.jsonl", pairs(12)), write_rows(base / "held.jsonl", pairs(4))

    @cache
    def trained(way: str, accelerator: str, order: str = "", mutant: str = "") -> Path:
        axes = dict(WAYS[way])
        training = {"max_steps": 3, "per_device_train_batch_size": 2, "max_length": 64}
        training |= {"precision": "bf16"} | axes.pop("training", {})
        where = base / f"{way}-{accelerator}-{order}-{mutant}"
        run_dir = write_run(
            where, blocks_dir, rows[0], cache_dir=base / "cache", training=training,
            held_out=rows[1] if "evaluation" in axes else None, optimizer={"learning_rate": 1e-2},
            resources={"accelerator": accelerator}, **axes,
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch, numbers.order(order or "late"):
            if mutant:
                MUTANTS[mutant][2](patch)
            code = support.train(run_dir)
            assert mutant or code == EXIT_OK, (events(run_dir)[-1], log(run_dir))
        return run_dir

    return trained


@pytest.mark.parametrize(
    ("way", "order"),
    [
        pytest.param(way, order, marks=pytest.mark.xdist_group(way), id=f"{way}, {order}")
        for way in WAYS
        for order in ("late", "early")
        if order == "late" or way in BESIDE
    ],
)
def test_a_way_of_training_is_the_cpus(train: Any, way: str, order: str) -> None:
    here, there = train(way, "gpu", order), train(way, "cpu")
    record = events(here, "run_record")[0]["record"]["environment"]
    assert record["device"] == "cuda" and record["arch"] == "sm_80"
    figures = [
        [(event["type"], {name: value for name, value in event["values"].items() if "loss" in name or "norm" in name})
         for event in events(folder) if event["type"] in ("metrics", "evaluation")]
        for folder in (here, there)
    ]  # fmt: skip
    assert len(figures[0]) >= 3
    if way not in OFF:
        assert figures[0] == figures[1]
        assert weights(here) == weights(there)
        return
    for (_, mine), (_, wanted) in zip(*figures, strict=True):
        assert mine == pytest.approx(wanted, rel=OFF[way])
    tensors = [load_file(weights_file(folder)) for folder in (here, there)]
    for name, wanted in tensors[1].items():
        assert (tensors[0][name] - wanted).abs().max() <= OFF[way] * wanted.abs().max(), name


@pytest.mark.parametrize(
    "mutant", [pytest.param(name, marks=pytest.mark.xdist_group(way)) for name, (way, _, _) in MUTANTS.items()]
)
def test_a_line_taken_out_shows(train: Any, mutant: str) -> None:
    way, order, _ = MUTANTS[mutant]
    here, there = train(way, "gpu", order, mutant), train(way, "cpu")
    if not events(here, "error"):
        assert weights(here) != weights(there)
