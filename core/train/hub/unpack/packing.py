"""What config.json says of quantised weights, and whether the files hold such weights. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import ModelError

Format = Literal[
    "gptq", "awq", "fp8", "mxfp4", "int8", "four_bits", "compressed_words", "compressed_mxfp4", "compressed",
    "hqq", "aqlm",
]  # fmt: skip
WAY_OUT = "give the 16-bit model they were made from, with `method: qlora` if memory is short"
READ = (
    "NF4 of bitsandbytes is trained over as it is; GPTQ, AWQ, fp8, MXFP4, compressed-tensors, HQQ, AQLM, and 8- and "
    "4-bit bitsandbytes are unpacked"
)
NO_LAYOUT = {
    "eetq": "eetq, whose bytes are arranged for one kind of GPU",
    "quanto": "quanto, which transformers cannot save",
}
"""Formats without a public layout of files."""
MXFP4 = ("float", 4, "group", 32)
"""Type, bits, strategy and size of a group of MXFP4 (OCP Microscaling Formats 1.0)."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A format that is unpacked to 16 bits before training."""

    format: Format
    words: str
    """Its name for people."""
    bits: int = 4
    group: int = -1
    """Weights of an input that share a scale; -1: all of them."""
    zero_offset: int = 0
    """Added to stored zero points."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Endings of names that only packed weights have."""
        match self.format:
            case "gptq" | "awq":
                return (".qweight",)
            case "fp8":
                return (".weight_scale_inv", ".weight_scale")
            case "mxfp4":
                return ("_blocks",)
            case "int8":
                return (".SCB",)
            case "compressed_words" | "compressed_mxfp4":
                return (".weight_packed",)
            case "compressed":
                return (".weight_scale",)
            case "hqq":
                return (".W_q",)
            case "aqlm":
                return (".codes",)
            case "four_bits":
                return (".weight.quant_state.bitsandbytes__fp4", ".weight.quant_state.bitsandbytes__nf4")


def packing_of(about: Any, *, field: str) -> Packing | None:
    """How weights with this `quantization_config` are unpacked; None for those that are trained over as they are: NF4
    as bitsandbytes writes it. ModelError, by its name, for every other format."""
    about = about if isinstance(about, dict) else {}
    method = str(about.get("quant_method", "a method that config.json does not name"))
    bits, group = about.get("bits"), about.get("group_size", 128)
    match method:
        case "gptq":
            layout = str(about.get("checkpoint_format", "gptq"))
            if bits not in (2, 4, 8) or not _is_group(group) or layout not in ("gptq", "gptq_v2"):
                raise refused(f"gptq with bits {bits}, group_size {group}, checkpoint_format {layout}", field)
            return Packing("gptq", f"GPTQ, {bits} bits", bits, group, zero_offset=int(layout == "gptq"))
        case "awq":
            layout = str(about.get("version", "gemm")).lower()
            if bits != 4 or not _is_group(group) or layout != "gemm":
                raise refused(f"awq with bits {bits}, group_size {group}, version {layout}", field)
            return Packing("awq", "AWQ, 4 bits", bits, group)
        case "fp8":
            block = about.get("weight_block_size")
            if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
                raise refused(f"fp8 with weight_block_size {block}", field)
            return Packing("fp8", "fp8", 8, block=None if block is None else (block[0], block[1]))
        case "mxfp4":
            return Packing("mxfp4", "MXFP4")
        case "compressed-tensors":
            return _compressed(about, field)
        case "hqq":
            return Packing("hqq", "HQQ")
        case "aqlm":
            codes = about.get("nbits_per_codebook")
            if type(codes) is not int or not 1 <= codes <= 16:
                raise refused(f"aqlm with nbits_per_codebook {codes}", field)
            return Packing("aqlm", "AQLM", codes)
        case "eetq" | "quanto":
            method = NO_LAYOUT[method]
        case "bitsandbytes" if about.get("load_in_8bit"):
            return Packing("int8", "LLM.int8 of bitsandbytes", 8)
        case "bitsandbytes" if about.get("bnb_4bit_quant_type") == "fp4":
            return Packing("four_bits", "FP4 of bitsandbytes")
        case "bitsandbytes" if about.get("bnb_4bit_quant_type") == "nf4":
            storage = about.get("bnb_4bit_quant_storage", "uint8")
            return None if storage == "uint8" else Packing("four_bits", f"NF4 of bitsandbytes, stored as {storage}")
        case "bitsandbytes":
            method = "bitsandbytes with neither 8 bits nor a 4-bit type"
    raise refused(method, field)


def _compressed(about: dict[str, Any], field: str) -> Packing:
    """How weights of compressed-tensors are unpacked: all layers by the same rule, and no rotation around them."""
    layout, groups = about.get("format"), about.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    rules = [one.get("weights") if isinstance(one, dict) else None for one in found]
    weights: dict[str, Any] = rules[0] if rules and isinstance(rules[0], dict) else {}
    strategy, bits, group = weights.get("strategy"), weights.get("num_bits", 8), weights.get("group_size", -1)
    sparsity = about.get("sparsity_config") or {"format": "dense"}
    whole = layout == "pack-quantized" and weights.get("type") == "int" and bits in (2, 4, 8)
    mxfp4 = layout == "mxfp4-pack-quantized" and (weights.get("type"), bits, strategy, group) == MXFP4
    bytes_ = layout in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8
    block = weights.get("block_structure") if strategy == "block" else None
    fits = (
        (whole or mxfp4 or bytes_)
        and all(one == rules[0] for one in rules)
        and strategy in ("tensor", "channel", "group", "block")
        and (strategy != "group" or _is_size(group))
        and (strategy != "block" or (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))))
        and weights.get("actorder") not in ("group", True)
        and not any(about.get(name) for name in ("transform_config", "kv_cache_scheme"))
        and isinstance(sparsity, dict)
        and sparsity.get("format", "dense") == "dense"
        and about.get("quantization_status", "compressed") == "compressed"
    )
    if not fits:
        what = f"format {layout}, num_bits {bits}, strategy {strategy}, in {len(rules)} groups"
        raise refused(f"compressed-tensors with {what}", field)
    size = int(group) if strategy == "group" else -1
    pair = None if block is None else (block[0], block[1])
    words = "MXFP4 of compressed-tensors" if mxfp4 else f"compressed-tensors, {bits} bits"
    layout_of: Format = "compressed_words" if whole else "compressed_mxfp4" if mxfp4 else "compressed"
    return Packing(layout_of, words, int(bits), size, block=pair)


def hold_packing_against_files(packing: Packing, names: Collection[str], *, field: str) -> None:
    """ModelError where no tensor of the files is packed as config.json says."""
    if not any(name.endswith(packing.marks) for name in names):
        raise ModelError(
            f"config.json says that the weights are quantised ({packing.words}, "
            f"{packing.format}), and the files hold no such tensor ({packing.marks[0]}); if they are dense, remove "
            "`quantization_config` from config.json, or give the 16-bit model they were made from",
            field=field,
            code="model_quantized",
        )


def refused(what: str, field: str) -> ModelError:
    return ModelError(
        f"the weights are already quantised ({what}), and this format is not read. {READ}; {WAY_OUT}",
        field=field,
        code="model_quantized",
    )


def _is_group(value: Any) -> bool:
    return type(value) is int and (value == -1 or _is_size(value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= 1 << 20
