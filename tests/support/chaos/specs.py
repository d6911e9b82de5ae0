"""The jobs of a chaos run: a few different ones, tiny, with several checkpoints each, all of them exact to the bit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = 96


@dataclass(frozen=True)
class Files:
    """Training rows of each kind, and held-out rows of the first; paths, or ids of uploads."""

    rows: Any
    pairs: Any
    judged: Any
    held_out: Any


def write_rows(folder: Path) -> Files:
    kinds = {"rows": _row, "pairs": _pair, "judged": _judged, "held_out": _row}
    paths = {name: folder / f"{name}.jsonl" for name in kinds}
    for name, row in kinds.items():
        numbers = range(1000, 1012) if name == "held_out" else range(ROWS)
        paths[name].write_text("".join(json.dumps(row(n)) + "\n" for n in numbers))
    return Files(**paths)


def _row(n: int) -> dict[str, Any]:
    return {"prompt": f"say {n}", "completion": f" it is {n * n}" + " so" * (n % 5)}


def _pair(n: int) -> dict[str, Any]:
    return {"prompt": f"say {n}", "chosen": f" it is {n * n}", "rejected": f" no, {n}" + " so" * (n % 5)}


def _judged(n: int) -> dict[str, Any]:
    return {"prompt": f"say {n}", "completion": f" it is {n * n}" + " so" * (n % 5), "label": n % 3 > 0}


def all_specs(model: Path, files: Files, scale: float = 1.0) -> list[dict[str, Any]]:
    """`scale` stretches their length. The first two, which every storm has, compute a reference before their steps."""

    def steps(count: int) -> int:
        return round(count * scale)

    return [
        {
            "model": str(model),
            "data": files.pairs,
            "stage": "dpo",
            "method": {"type": "lora"},
            "training": {"max_steps": steps(80), "per_device_train_batch_size": 2, "max_length": 64},
            "checkpoint": {"type": "disk", "save_steps": steps(8)},
        },
        {  # a gang: two ranks, on all slots of a node
            "model": str(model),
            "data": files.judged,
            "stage": "kto",
            "method": {"type": "lora"},
            "training": {"max_steps": steps(40), "per_device_train_batch_size": 1, "max_length": 64, "seed": 5},
            "checkpoint": {"type": "disk", "save_steps": steps(6)},
            "resources": {"type": "single", "gpus": 2},
        },
        {
            "model": str(model),
            "data": files.rows,
            "method": {"type": "lora", "r": 4, "lora_alpha": 8, "lora_dropout": 0.05},
            "schedule": {"type": "cosine"},
            "training": {
                "max_steps": steps(36),
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 3,
                "max_length": 64,
                "seed": 7,
            },
            "checkpoint": {"type": "disk", "save_steps": steps(5), "keep_last": 1},
        },
        {
            "model": str(model),
            "data": {"train": files.rows, "eval": files.held_out},
            "method": {"type": "lora", "r": 16, "lora_dropout": 0.2},
            "training": {"max_steps": steps(60), "per_device_train_batch_size": 6, "max_length": 64, "seed": 3},
            "evaluation": {"type": "held_out", "eval_steps": steps(20), "per_device_eval_batch_size": 4},
            "checkpoint": {"type": "disk", "save_steps": steps(10)},
        },
    ]
