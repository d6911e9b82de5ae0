"""What a plan knows of a model: from headers, from config.json alone, and by the names a job gives."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelError, SpecError
from core.plan.models.shape import Shape
from core.spec.axes.method import LoRA

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip


def write(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, list[int]]], data: bytes = b"") -> Path:
    """A folder of headers; `data` are the bytes of the last tensor, zeros before."""
    sizes = {"BF16": 2, "F32": 4, "U8": 1}
    header, position = {}, 0
    for name, (dtype, shape) in tensors.items():
        count = sizes[dtype]
        for size in shape:
            count *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + count]}
        position += count
    raw = json.dumps(header).encode()
    folder.mkdir(parents=True)
    body = b"\0" * (position - len(data)) + data
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_config_says_what_the_files_say(tmp_path: Path) -> None:
    of_config = Shape.of_config(LLAMA)
    tensors = {weight.name: ("BF16", list(weight.shape)) for weight in of_config.outside}
    for number, block in enumerate(of_config.blocks):
        tensors |= {f"model.layers.{number}.{weight.name}": ("BF16", list(weight.shape)) for weight in block}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", [8])
    of_files = Shape.of_folder(write(tmp_path / "model", LLAMA, tensors))
    assert of_files == of_config
    assert (of_files.layers, len(of_files.patterns), of_files.file_bits) == (3, 1, 16)
    assert of_files.parameters == 2 * 97 * 64 + 64 + 3 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64 + 2 * 64)
    assert Shape.from_dict(json.loads(json.dumps(of_files.as_dict()))) == of_files


def test_a_vocabulary_that_the_config_does_not_name_is_the_embeddings(tmp_path: Path) -> None:
    """Old configurations leave out what their class has by itself; a plan divides by it."""
    config = {name: value for name, value in LLAMA.items() if name != "vocab_size"} | {"num_hidden_layers": 1}
    whole = Shape.of_config(LLAMA)
    tensors = {weight.name: ("BF16", list(weight.shape)) for weight in whole.outside}
    tensors |= {f"model.layers.0.{weight.name}": ("BF16", list(weight.shape)) for weight in whole.blocks[0]}
    assert Shape.of_folder(write(tmp_path / "model", config, tensors)).vocab == 97


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    tied = Shape.of_config(LLAMA | {"tie_word_embeddings": True})
    assert tied.tied and tied.parameters == Shape.of_config(LLAMA).parameters - 97 * 64


def test_packed_files_stand_for_what_they_were_made_from(tmp_path: Path) -> None:
    about = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": [96, 64], "dtype": "bfloat16"}).encode()
    name = "model.layers.0.mlp.up_proj.weight"
    folder = write(
        tmp_path / "packed",
        LLAMA | {"num_hidden_layers": 1, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {
            "model.embed_tokens.weight": ("BF16", [97, 64]),
            name: ("U8", [96 * 64 // 2, 1]),
            f"{name}.absmax": ("U8", [96]),
            f"{name}.nested_absmax": ("F32", [1]),
            f"{name}.quant_state.bitsandbytes__nf4": ("U8", [len(about)]),
        },
        about,
    )
    found = Shape.of_folder(folder)
    (weight,) = found.blocks[0]
    assert (weight.dtype, weight.shape, weight.kind) == ("NF4", (96, 64), "linear")
    assert found.packed and found.packed_double


def test_experts_that_lie_apart_are_one_weight_as_transformers_holds_them(tmp_path: Path) -> None:
    at = "model.layers.0.block_sparse_moe"
    folder = write(
        tmp_path / "experts",
        LLAMA | {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1},
        {f"{at}.experts.{n}.{w}.weight": ("BF16", [8, 64]) for n in (0, 1) for w in ("w1", "w2", "w3")}
        | {f"{at}.gate.weight": ("BF16", [2, 64]), "model.layers.0.self_attn.q_proj.weight": ("BF16", [64, 64])},
    )
    kinds = {weight.name: (weight.kind, weight.numel) for weight in Shape.of_folder(folder).blocks[0]}
    assert kinds == {
        "block_sparse_moe.gate.weight": ("other", 128),
        "mlp.experts": ("experts", 6 * 8 * 64),
        "self_attn.q_proj.weight": ("linear", 64 * 64),
    }


@pytest.mark.parametrize(
    "asked, here",
    [
        ("all-linear", 7),
        ("attention", 4),
        (["up_proj"], 1),
        (["self_attn.q_proj", "down_proj"], 2),
    ],
)
def test_targets(asked: Any, here: int) -> None:
    outside, blocks = Shape.of_config(LLAMA).targets(LoRA(target_modules=asked))
    assert not outside
    assert [len(block) for block in blocks] == [here] * 3


def test_one_layer_of_one_block_by_its_full_name() -> None:
    shape = Shape.of_config(LLAMA)
    _, blocks = shape.targets(LoRA(target_modules=["model.layers.1.mlp.up_proj"]))
    assert [sorted(block) for block in blocks] == [[], ["mlp.up_proj"], []]
    _, packed = shape.packable(["up_proj", "model.layers.2.mlp.down_proj"])
    assert [len(block) for block in packed] == [6, 6, 5]


def test_a_name_that_the_model_does_not_have() -> None:
    with pytest.raises(SpecError, match="q_proj") as caught:
        Shape.of_config(LLAMA).targets(LoRA(target_modules=["c_attn"]))
    assert caught.value.field == "method.target_modules"


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "config.json"),
        ({"quantization_config": {"quant_method": "gptq"}}, "packed"),
        ({"text_config": {"hidden_size": 1}}, "parts"),
    ],
)
def test_what_a_config_does_not_say(changes: dict[str, Any], word: str) -> None:
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    with pytest.raises(ModelError, match=word) as caught:
        Shape.of_config(config)
    assert caught.value.code == "model_unmeasured"
