"""Quantised base models of other libraries: each format as its library dequantises it, whole folders made dense and
trained on, and folders whose config.json lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GptOssConfig, GptOssForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from core.errors import ModelError
from core.spec.axes.model import LocalModel
from core.spec.run.exit_codes import EXIT_OK
from core.train.hub.unpack import formats
from core.train.hub.unpack.packing import Packing
from core.train.model.load import load_model
from core.train.prepare.models import Prepared, prepare_model
from tests.support.trainer import events, pairs, run, write_rows, write_run

GROUP = 16
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of eight, in the order in which AutoAWQ puts them into a word, the lowest bits first."""


def quantised(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q [inputs, outputs], zeros and scales [groups, outputs]), by rounding to the nearest."""
    grouped = weight.float().t().reshape(-1, GROUP, weight.shape[0])
    low, high = grouped.amin(1).clamp(max=0), grouped.amax(1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1).int()
    q = (grouped / scales.float().unsqueeze(1)).round() + zeros.unsqueeze(1)
    return q.clamp(0, 2**bits - 1).int().flatten(0, 1), zeros, scales


def in_words(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Rows of small numbers as rows of 32-bit words, one number after the other from the lowest bits on."""
    count = 32 // bits
    places = torch.tensor(order or range(count))
    words = (values.long().reshape(len(values), -1, count)[..., places] << bits * torch.arange(count)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def gptq_pieces(
    weight: Tensor, bits: int, offset: int, index: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer, and what they stand for [outputs, inputs]."""
    q, zeros, scales = quantised(weight, bits)
    stored = (zeros - offset) & (2**bits - 1)
    pieces = {
        "qweight": in_words(q.t(), bits).t().contiguous(),
        "qzeros": in_words(stored, bits),
        "scales": scales,
    }
    groups = torch.arange(q.shape[0]) // GROUP if index is None else index
    if index is not None:
        pieces["g_idx"] = index.int()
    return pieces, (scales[groups] * (q - zeros[groups]).half()).t()


@pytest.mark.parametrize(("bits", "offset"), [(4, 1), (4, 0), (8, 1), (2, 0)])
@pytest.mark.parametrize("by_activation", [False, True])
def test_gptq_is_scale_times_difference(bits: int, offset: int, by_activation: bool) -> None:
    torch.manual_seed(bits)
    index = torch.randint(0, 3, (48,)) if by_activation else None
    pieces, expected = gptq_pieces(torch.randn(32, 48), bits, offset, index)
    packing = Packing("gptq", "", bits, GROUP, zero_offset=offset)
    assert torch.equal(formats.gptq(pieces, packing, "w"), expected)


def awq_pieces(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    q, zeros, scales = quantised(weight, 4)
    words = {"qweight": in_words(q, 4, AWQ_ORDER), "qzeros": in_words(zeros, 4, AWQ_ORDER)}
    groups = torch.arange(q.shape[0]) // GROUP
    return words | {"scales": scales}, ((q - zeros[groups]).half() * scales[groups]).t()


def test_awq_is_difference_times_scale() -> None:
    torch.manual_seed(0)
    pieces, expected = awq_pieces(torch.randn(32, 48))
    assert torch.equal(formats.awq(pieces, Packing("awq", "", 4, GROUP), "w"), expected)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_is_that_of_transformers(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, scale = torch.randn(32, 64).to(kind), torch.rand(2, 4)
    theirs: Any = Fp8Dequantize(None)
    for block, scales in (((16, 16), scale), (None, torch.rand(1, 1)), (None, torch.rand(32, 1))):
        packing = Packing("fp8", "", 8, block=block)
        ours = formats.fp8({"weight": weight, "weight_scale_inv": scales}, packing, "w", torch.bfloat16)
        assert torch.equal(ours, theirs._dequantize_one(weight, scales, torch.bfloat16))
    odd = formats.fp8(  # the last blocks are cut off, which transformers refuses
        {"weight": weight[:30, :60], "weight_scale_inv": scale},
        Packing("fp8", "", 8, block=(16, 16)),
        "w",
        torch.float32,
    )
    assert torch.equal(odd[16:, 48:], weight[16:30, 48:60].float() * scale[1, 3])


def test_mxfp4_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), dtype=torch.uint8)
    ours = formats.mxfp4({"blocks": blocks, "scales": scales}, "experts")
    assert ours.shape == (2, 96, 6) and torch.equal(ours, convert_moe_packed_tensors(blocks, scales))


def test_int8_is_that_of_bitsandbytes() -> None:
    torch.manual_seed(0)
    weight, absmax = torch.randint(-127, 128, (16, 32), dtype=torch.int8), torch.rand(16)
    ours = formats.int8({"weight": weight, "SCB": absmax}, "w", torch.float16)
    assert torch.equal(ours, bnb.int8_vectorwise_dequant(weight, absmax).half())


@pytest.mark.parametrize("kind", ["fp4", "nf4"])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits_are_those_of_bitsandbytes(kind: str, nested: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)  # bitsandbytes' own code for CPUs is wrong where blocks go across rows
    packed, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    pieces = {name.removeprefix("weight."): tensor for name, tensor in state.as_dict(packed=True).items()}
    ours = formats.four_bits(pieces | {"weight": packed.flatten().view(torch.bfloat16)}, "w", torch.float32)
    assert torch.equal(ours, bnb.dequantize_4bit(packed, state))


# --- folders ---------------------------------------------------------------------------------------------


RULE = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False},
    "awq": {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "fp8": {"weight_block_size": [16, 16], "activation_scheme": "dynamic"},
    "bitsandbytes": {"load_in_8bit": True, "load_in_4bit": False},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": RULE}},
        "ignore": ["lm_head"],
    },
    "int-quantized": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
    },
    "hqq": {"quant_config": {}},
    "aqlm": {"nbits_per_codebook": 8, "num_codebooks": 2, "in_group_size": 8, "out_group_size": 1},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


def as_bytes(text: str) -> Tensor:
    """Text as HQQ keeps it in safetensors."""
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def packed_layer(method: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that stand for a layer's weight, by their last names, and what they stand for in float32."""
    match method:
        case "gptq":
            pieces, value = gptq_pieces(weight, 4, 1)
        case "awq":
            pieces, value = awq_pieces(weight)
        case "fp8":
            rows, columns = weight.shape
            scale = torch.full((-(-rows // 16), -(-columns // 16)), 0.5)
            pieces = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scale}
            value = pieces["weight"].float() * 0.5
        case "compressed-tensors":
            rows, columns = weight.shape
            scale = (weight.float().view(rows, -1, GROUP).abs().amax(-1) / 7 + 1e-4).bfloat16()
            q = (weight.float() / scale.float().repeat_interleave(GROUP, 1)).round().clamp(-8, 7).int()
            pieces = {
                "weight_packed": in_words(q + 8, 4),
                "weight_scale": scale,
                "weight_shape": torch.tensor([rows, columns]),
            }
            value = q.bfloat16() * scale.repeat_interleave(GROUP, 1)
        case "int-quantized":
            scale = (weight.float().abs().amax(1, keepdim=True) / 127 + 1e-4).bfloat16()
            q = (weight.float() / scale.float()).round().to(torch.int8)
            pieces, value = {"weight": q, "weight_scale": scale}, q.bfloat16() * scale
        case "hqq":
            grouped = weight.float().reshape(-1, GROUP)
            low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
            scale = ((high - low) / 15 + 1e-4).half()
            zero = (-low / scale.float()).half()
            q = (grouped / scale.float() + zero.float()).round().clamp(0, 15).to(torch.uint8)
            half = q.shape[0] // 2
            pieces = {
                "W_q": q[:half] << 4 | q[half:],
                "scale": scale,
                "zero": zero,
                "shape": torch.tensor(weight.shape),
                "nbits": torch.tensor(4, dtype=torch.int32),
                "packing": as_bytes("4bit_u8"),
                "compute_dtype": as_bytes("torch.float16"),
                "quant_scale": torch.tensor(0, dtype=torch.uint8),
                "quant_zero": torch.tensor(0, dtype=torch.uint8),
            }
            value = ((q.half() - zero) * scale).view(weight.shape)
        case "aqlm":
            rows, columns = weight.shape
            codes = torch.randint(0, 256, (rows, columns // 8, 2))
            books, scales = torch.randn(2, 256, 1, 8).half(), torch.rand(rows, 1, 1, 1).half()
            pieces = {"codes": codes.to(torch.uint8).view(torch.int8), "codebooks": books, "scales": scales}
            value = (books[0, codes[..., 0], 0] + books[1, codes[..., 1], 0]) * scales[:, :, 0]
            value = value.reshape(rows, columns)
        case "fp4":
            packed, state = bnb.quantize_4bit(weight.contiguous(), quant_type="fp4")
            pieces = {"weight": packed, **state.as_dict(packed=True)}
            pieces = {name if name == "weight" else f"weight.{name}": tensor for name, tensor in pieces.items()}
            value = bnb.dequantize_4bit(packed, state)
        case _:
            q, absmax, _ = bnb.int8_vectorwise_quant(weight.half())
            pieces = {"weight": q, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            value = bnb.int8_vectorwise_dequant(q, absmax)
    return pieces, value.float()


def folder_of(method: str, tiny: Path, folder: Path, **changes: Any) -> dict[str, Tensor]:
    """The tiny model with packed linear layers in `folder`; what its weights stand for."""
    shutil.copytree(tiny, folder)
    tensors, packed, stands = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if "_proj.weight" not in name:
            packed[name] = tensor
            continue
        module = name.removesuffix(".weight")
        pieces, stands[name] = packed_layer(method, tensor)
        packed |= {f"{module}.{last}": piece.contiguous() for last, piece in pieces.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    about = {"quant_method": method, **FORMATS[method], **changes}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    return stands


def prepare(folder: Path, cache: Path, phases: list[str] | None = None) -> Prepared:
    def progress(phase: str, done: int, total: int | None) -> None:
        if phases is not None:
            phases.append(phase)

    return prepare_model(LocalModel(path=str(folder)), cache, [folder.parent], True, progress)


@pytest.mark.parametrize("method", FORMATS)
def test_a_folder_is_unpacked_once_and_trained_on(tiny_dir: Path, tmp_path: Path, method: str) -> None:
    stands = folder_of(method, tiny_dir, tmp_path / "base")
    prepared = prepare(tmp_path / "base", tmp_path / "cache")
    dense, original = load_file(prepared.model_dir / "model.safetensors"), load_file(tiny_dir / "model.safetensors")
    assert dense.keys() == original.keys() and stands
    for name, tensor in dense.items():
        assert torch.equal(tensor.float(), stands.get(name, original[name]).to(tensor.dtype).float()), name
    assert "quantization_config" not in json.loads((prepared.model_dir / "config.json").read_text())
    assert prepared.source["path"] == str(tmp_path / "base") and prepared.source["unpacked"]["from"]
    phases: list[str] = []
    again = prepare(tmp_path / "base", tmp_path / "cache", phases)
    assert again == prepared and not phases
    if method != "gptq":
        return
    rows = write_rows(tmp_path / "rows.jsonl", pairs(4))
    training = {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": 48}
    folder = write_run(tmp_path / "run", prepared.model_dir, rows, method={"type": "qlora", "r": 4}, training=training)
    assert run(folder) == EXIT_OK, events(folder)[-1]


def test_experts_in_mxfp4_are_unpacked(tiny_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 1}
    vocabulary = AutoConfig.from_pretrained(tiny_dir).vocab_size
    made = GptOssForCausalLM(GptOssConfig(**sizes, **heads, vocab_size=vocabulary)).to(torch.bfloat16)
    made.save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(tmp_path / "base")
    tensors, expected = load_file(tmp_path / "base" / "model.safetensors"), {}
    for last, outputs, inputs in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        name = f"model.layers.0.mlp.experts.{last}"
        assert tensors.pop(name).shape == (2, inputs, outputs)
        blocks = torch.randint(0, 256, (2, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 122, (2, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    prepared = prepare(tmp_path / "base", tmp_path / "cache")
    read = dict(load_model(prepared.model_dir, torch.bfloat16).named_parameters())
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    assert prepared.parameters == sum(tensor.numel() for tensor in read.values())


def change(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", {"format": "pt"})


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("method", "about", "tensor", "words"),
    [
        ("gptq", {"bits": 8}, None, "follows from config.json"),
        ("gptq", {"group_size": 32}, None, "follows from config.json"),
        ("gptq", {"bits": 3}, None, "bits 3"),
        ("gptq", {"checkpoint_format": "marlin"}, None, "marlin"),
        ("gptq", {"quant_method": "awq"}, None, "follows from config.json"),
        ("gptq", {"quant_method": "fp8"}, None, "hold no such tensor"),
        ("gptq", {"quant_method": "hqq"}, None, "hold no such tensor"),
        ("gptq", {"quant_method": "eetq"}, None, "arranged for one kind of GPU"),
        ("gptq", {"quant_method": "quanto"}, None, "cannot save"),
        ("compressed-tensors", {"format": "marlin-24"}, None, "marlin-24"),
        ("compressed-tensors", {"format": "int-quantized"}, None, "num_bits 4"),
        ("compressed-tensors", {"transform_config": {"config_groups": {}}}, None, "compressed-tensors with"),
        ("compressed-tensors", {}, (f"{LAYER}.weight_shape", torch.tensor([64, 40])), "weight_shape says"),
        ("compressed-tensors", {}, (f"{LAYER}.weight_scale", torch.ones(7)), "does not divide"),
        ("hqq", {}, (f"{LAYER}.nbits", torch.tensor(8)), "`packing` is 4bit_u8"),
        ("hqq", {}, (f"{LAYER}.quant_scale", torch.tensor(1)), "quantised themselves"),
        ("hqq", {}, (f"{LAYER}.shape", torch.tensor([64, 65])), "its shape is"),
        ("aqlm", {"nbits_per_codebook": 12}, None, "follows from config.json"),
        ("aqlm", {"nbits_per_codebook": "8"}, None, "nbits_per_codebook 8"),
        ("gptq", {}, (f"{LAYER}.scales", None), "lack its scales"),
        ("awq", {"version": "gemv"}, None, "gemv"),
        ("fp8", {"weight_block_size": [8, 16]}, None, "follows from config.json"),
        ("fp8", {"weight_block_size": "16"}, None, "weight_block_size 16"),
        ("bitsandbytes", {}, (f"{LAYER}.SCB", torch.ones(3)), "follows from config.json"),
        ("bitsandbytes", {}, (f"{LAYER}.weight_format", torch.tensor(1, dtype=torch.uint8)), "arranged for a GPU"),
    ],
)
def test_a_folder_that_lies_is_refused(
    tiny_dir: Path,
    tmp_path: Path,
    method: str,
    about: dict[str, Any],
    tensor: tuple[str, Tensor | None] | None,
    words: str,
) -> None:
    folder_of(method, tiny_dir, tmp_path / "base", **about)
    if tensor is not None:
        change(tmp_path / "base", *tensor)
    with pytest.raises(ModelError, match=words) as refused:
        prepare(tmp_path / "base", tmp_path / "cache")
    assert refused.value.field in ("model", "model.path") and "16-bit model" in refused.value.message
    assert not any((tmp_path / "cache" / "unpacked").glob("*")), "nothing half-made is left"
