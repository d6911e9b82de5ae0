"""The jobs of a chaos run: a few different ones, tiny, with several checkpoints each, all of them exact to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = 96


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Training rows and held-out rows."""
    train, held_out = folder / "rows.jsonl", folder / "held-out.jsonl"
    train.write_text(_rows(range(ROWS)))
    held_out.write_text(_rows(range(1000, 1012)))
    return train, held_out


def _rows(numbers: range) -> str:
    lines = ({"prompt": f"say {n}", "completion": f" it is {n * n}" + " so" * (n % 5)} for n in numbers)
    return "".join(json.dumps(line) + "\n" for line in lines)


def all_specs(model: Path, train: str, held_out: str, scale: float = 1.0) -> list[dict[str, Any]]:
    """`scale` stretches their length; files are ids of uploads."""

    def steps(count: int) -> int:
        return round(count * scale)

    return [
        {
            "model": str(model),
            "data": train,
            "method": {"type": "lora", "lora_dropout": 0.1},
            "training": {"max_steps": steps(80), "per_device_train_batch_size": 4, "max_length": 64},
            "checkpoint": {"type": "disk", "save_steps": steps(8)},
        },
        {  # a gang: two ranks, on all slots of a node
            "model": str(model),
            "data": train,
            "method": {"type": "lora", "lora_dropout": 0.1},
            "training": {"max_steps": steps(40), "per_device_train_batch_size": 2, "max_length": 64, "seed": 5},
            "checkpoint": {"type": "disk", "save_steps": steps(6)},
            "resources": {"type": "single", "gpus": 2},
        },
        {
            "model": str(model),
            "data": train,
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
            "data": {"train": train, "eval": held_out},
            "method": {"type": "lora", "r": 16, "lora_dropout": 0.2},
            "training": {"max_steps": steps(60), "per_device_train_batch_size": 6, "max_length": 64, "seed": 3},
            "evaluation": {"type": "held_out", "eval_steps": steps(20), "per_device_eval_batch_size": 4},
            "checkpoint": {"type": "disk", "save_steps": steps(10)},
        },
    ]
