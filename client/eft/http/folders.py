"""The files of a model's folder that go up."""

from __future__ import annotations

from pathlib import Path

from eft.errors import LocalError

CODE = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5")
"""Weights that can run code when they are read."""
KEPT = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "adapter_config.json", "README.md"),
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "LICENSE"),
)


def files_of(folder: Path) -> list[Path]:
    """Weights, configuration and tokenizer, in the order of their names; other files (checkpoints, optimizer state,
    code) stay here. Raises LocalError for a folder without safetensors."""
    try:
        found = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise LocalError(f"{folder}: {error.strerror or error}") from error
    chosen = [path for path in found if path.name in KEPT or path.suffix == ".safetensors"]
    if not any(path.suffix == ".safetensors" for path in chosen):
        pickled = next((path.name for path in found if path.suffix in CODE), None)
        why = "has no safetensors files" if pickled is None else f"has its weights in {pickled}, which can run code"
        raise LocalError(f"{folder} {why}: save the model with save_pretrained(), and upload that folder")
    return chosen
