"""What was trained and saved, as Tinker's SDK lists it."""

from __future__ import annotations

import json
from typing import Any

from api.tinker import door
from api.tinker.door import Door


def weights_info(of: Door, path: str) -> dict[str, Any]:
    """Base and shape of saved weights. Raises NotFound."""
    found, name = of.saved(path)
    config = json.loads((of.folder(found.row.id, name) / "adapter_config.json").read_bytes())
    return {
        "base_model": door.base_model(found),
        "is_lora": True,
        "lora_rank": int(config["r"]),
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }
