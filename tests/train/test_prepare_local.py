"""Local folders: what may be read, what is refused, and that a model is measured as torch would measure it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core.errors import ModelError
from core.spec.axes.model import LocalModel
from core.train.hub.model_files import causal_lm_classes, inspect, read_header
from core.train.prepare.models import Prepared, prepare_model

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def build(folder: Path, config: PretrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build(tmp_path / "models" / "tiny", LlamaConfig(**SMALL))


def prepare(path: Path, roots: list[Path] | None, cache: Path) -> Prepared:
    return prepare_model(LocalModel(path=str(path)), cache, roots, True, lambda phase, done, total: None)


def meta_count(folder: Path) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL),
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        LlamaConfig(**SMALL, num_key_value_heads=2, attention_bias=True),
        Qwen2Config(**SMALL, num_key_value_heads=2, tie_word_embeddings=True),
        GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ],
    ids=["llama", "llama-tied", "llama-gqa-bias", "qwen2-tied", "gpt2"],
)
def test_parameters_are_those_of_the_meta_device(tmp_path: Path, config: PretrainedConfig) -> None:
    folder = build(tmp_path / "model", config)
    summary = inspect(folder, field="model.path")
    assert summary.parameters == meta_count(folder)
    assert summary.dtypes == {"F32": summary.parameters}


def test_tied_weights_and_constants_that_were_stored_anyway(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=64))
    model = AutoModelForCausalLM.from_pretrained(folder)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    stored["transformer.h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    stored["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    assert "lm_head.weight" in stored
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect(folder, field="model.path").parameters == meta_count(folder)


def test_the_table_of_classes_is_transformers_own() -> None:
    assert causal_lm_classes() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_used_where_it_lies(folder: Path, tmp_path: Path) -> None:
    first = prepare(folder, [tmp_path / "models"], tmp_path / "cache")
    assert first.model_dir == folder
    assert first.source["type"] == "local" and first.source["path"] == str(folder)
    again = prepare(folder, None, tmp_path / "cache")
    assert again == first
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert prepare(folder, None, tmp_path / "cache").source["sha256"] != first.source["sha256"]


def refused(path: Path, roots: list[Path] | None, tmp_path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        prepare(path, roots, tmp_path / "cache")
    assert caught.value.field == "model.path"
    return caught.value


def test_only_below_the_roots(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert refused(folder, [elsewhere], tmp_path).code == "model_path_not_allowed"
    assert refused(folder, [], tmp_path).code == "model_path_not_allowed"
    assert "EFT_MODEL_ROOTS" in refused(folder, [], tmp_path).message
    assert refused(elsewhere / ".." / "models" / "tiny", [elsewhere], tmp_path).code == "model_path_not_allowed"
    # A neighbour whose name only begins like the root is not below it.
    assert refused(folder, [tmp_path / "models" / "ti"], tmp_path).code == "model_path_not_allowed"


def test_symlinks_are_followed_before_they_are_judged(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(folder)
    assert refused(root / "link", [root], tmp_path).code == "model_path_not_allowed"
    assert prepare(root / "link", [root, tmp_path / "models"], tmp_path / "cache").model_dir == folder

    inside = root / "inside"
    inside.mkdir()
    for path in folder.iterdir():
        (inside / path.name).symlink_to(path)
    assert refused(inside, [root], tmp_path).code == "model_path_not_allowed"
    # As the hub's own cache is laid out: links that stay below the root.
    assert prepare(inside, [tmp_path], tmp_path / "cache").parameters > 0


def test_what_is_not_a_model(folder: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere", None, tmp_path).code == "model_not_found"
    assert refused(folder / "config.json", None, tmp_path).code == "model_unreadable"
    (folder / "tokenizer.json").unlink()
    assert "tokenizer" in refused(folder, None, tmp_path).message
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").unlink()
    assert "config.json is missing" in refused(folder, None, tmp_path).message


def test_pickle_and_code_and_adapters(folder: Path, tmp_path: Path) -> None:
    (folder / "training_args.bin").write_bytes(b"beside the weights it does not matter")
    prepare(folder, None, tmp_path / "cache")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(folder, None, tmp_path).code == "model_pickle"
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in refused(folder, None, tmp_path).message
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}))
    assert refused(folder, None, tmp_path).code == "model_needs_code"


def header_file(path: Path, header: object, data: bytes = b"\0" * 8) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},  # too short for its shape
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},  # a gap before it
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},  # and one behind
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
         "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},  # overlap
        {"a": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": 1},
        [1],
        None,
    ],
)  # fmt: skip
def test_broken_safetensors(tmp_path: Path, header: object) -> None:
    path = tmp_path / "model.safetensors"
    header_file(path, header)
    with pytest.raises(ModelError):
        read_header(path, field="model.path")


@pytest.mark.parametrize("data", [b"", b"\x08\0", struct.pack("<Q", 2**62) + b"{}", b"\x80\x04" * 40, b"[" * 100_000])
def test_no_safetensors_at_all(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(ModelError):
        read_header(path, field="model.path")


def test_deep_json(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    raw = b"[" * 100_000
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(ModelError):
        read_header(path, field="model.path")
