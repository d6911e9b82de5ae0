"""Weights of other libraries' formats as those libraries dequantise them, to the bit.

Each function takes the tensors of a layer by their last name and answers its weight, [outputs, inputs] in the dtype in
which the library computes it. ModelError where the tensors do not fit one another or what config.json says.

GPTQ        scale * (q - zero), in the dtype of the scales; q [inputs * bits / 32, outputs], zeros stored less one
            (AutoGPTQ and GPTQModel, `checkpoint_format`)
AWQ         the same with q [inputs, outputs / 8], eight to a word in the order 0 2 4 6 1 3 5 7 (AutoAWQ, GEMM)
fp8         8-bit floats (OCP E4M3 or fnuz) times a scale of the tensor, of each output, or of each block
MXFP4       E2M1 times a power of two for 32 weights (OCP Microscaling 1.0); experts [E, inputs, outputs]
int8, fp4   bitsandbytes: int8 times SCB / 127; 4-bit indices into a table, times the absmax of a block
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from core.train.hub.unpack.packing import Packing
from core.train.hub.unpack.pieces import Pieces, check, columns_of, rows_of, take, unfit, words

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in a word of each of eight neighbouring outputs."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
SCB_FACTOR = 7.874015718698502e-3
"""1 / 127 as bitsandbytes writes it."""


def gptq(pieces: Pieces, packing: Packing, where: str) -> Tensor:
    stored, scales = words(pieces, "qweight", where), take(pieces, "scales", where)
    values = rows_of(stored, packing.bits)  # [inputs, outputs]
    inputs, outputs = values.shape
    zeros = columns_of(words(pieces, "qzeros", where), packing.bits)
    groups = 1 if packing.group == -1 else -(-inputs // packing.group)
    check(where, "scales", scales, (groups, outputs))
    check(where, "qzeros, unpacked", zeros, (groups, outputs))
    zeros = (zeros + packing.zero_offset) & (2**packing.bits - 1)
    index = pieces.get("g_idx")
    if index is None:
        index = torch.arange(inputs) // (inputs if packing.group == -1 else packing.group)
    check(where, "g_idx", index, (inputs,))
    index = index.long()
    if inputs and not 0 <= int(index.min()) <= int(index.max()) < groups:
        raise unfit(where, f"g_idx names groups from {int(index.min())} to {int(index.max())}, and there are {groups}")
    found: Tensor = scales[index] * (values - zeros[index]).to(scales.dtype)
    return found.t().contiguous()


def awq(pieces: Pieces, packing: Packing, where: str) -> Tensor:
    stored, scales = words(pieces, "qweight", where), take(pieces, "scales", where)
    values = columns_of(stored, 4, AWQ_PLACES)
    inputs, outputs = values.shape
    zeros = columns_of(words(pieces, "qzeros", where), 4, AWQ_PLACES)
    group = inputs if packing.group == -1 else packing.group
    groups = -(-inputs // max(1, group))
    check(where, "scales", scales, (groups, outputs))
    check(where, "qzeros, unpacked", zeros, (groups, outputs))
    index = torch.arange(inputs) // max(1, group)
    return ((values - zeros[index]).to(scales.dtype) * scales[index]).t().contiguous()


def fp8(pieces: Pieces, packing: Packing, where: str, dtype: torch.dtype) -> Tensor:
    weight = take(pieces, "weight", where)
    scale = pieces.get("weight_scale_inv", pieces.get("weight_scale"))
    if scale is None or weight.element_size() != 1 or not weight.is_floating_point() or weight.dim() != 2:
        raise unfit(where, f"it is {weight.dtype} {list(weight.shape)}, and not a matrix of 8-bit floats with a scale")
    rows, columns = weight.shape
    if packing.block is None:
        if scale.numel() not in (1, rows):
            raise unfit(where, f"it has {scale.numel()} scales, and neither one nor one for each of {rows} outputs")
        spread = scale.float().reshape(-1, 1)
    else:
        high, wide = packing.block
        check(where, "weight_scale_inv", scale, (-(-rows // high), -(-columns // wide)))
        spread = scale.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    return (weight.float() * spread).to(dtype)


def mxfp4(pieces: Pieces, where: str) -> Tensor:
    """[experts, inputs, outputs] in bfloat16, as transformers has the weights of fused experts."""
    blocks, scales = take(pieces, "blocks", where), take(pieces, "scales", where)
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape[:-1] != scales.shape:
        raise unfit(where, f"blocks are {list(blocks.shape)} and scales {list(scales.shape)}, or no bytes")
    table = torch.tensor(E2M1, dtype=torch.bfloat16)
    values = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), dim=-1).flatten(-2)
    values = torch.ldexp(values, (scales.int() - 127).unsqueeze(-1))
    return values.flatten(-2).transpose(-2, -1).contiguous()


def int8(pieces: Pieces, where: str, dtype: torch.dtype) -> Tensor:
    weight, absmax = take(pieces, "weight", where), take(pieces, "SCB", where)
    if weight.dtype != torch.int8 or weight.dim() != 2:
        raise unfit(where, f"it is {weight.dtype} {list(weight.shape)}, and not a matrix in int8")
    layout = pieces.get("weight_format")
    if layout is not None and int(layout) != 0:
        raise unfit(where, "its rows are arranged for a GPU (weight_format); save the model again with bitsandbytes")
    check(where, "SCB", absmax, (weight.shape[0],))
    found: Tensor = weight * absmax.float().view(-1, 1) * SCB_FACTOR
    return found.to(dtype)


def four_bits(pieces: Pieces, where: str, dtype: torch.dtype) -> Tensor:
    name = next(name for name in pieces if name.startswith("quant_state"))
    try:
        about = json.loads(bytes(pieces[name].tolist()))
        shape, block = tuple(int(size) for size in about["shape"]), int(about["blocksize"])
        absmax, table = pieces["absmax"], pieces["quant_map"].float()
        if "nested_offset" in about:
            nested, second = pieces["nested_absmax"].float(), pieces["nested_quant_map"].float()
            groups = torch.arange(absmax.numel()) // int(about["nested_blocksize"])
            absmax = second[absmax.long()] * nested[groups] + float(about["nested_offset"])
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise unfit(where, f"its state is not readable ({error!r})") from error
    count = math.prod(shape)
    packed = take(pieces, "weight", where).contiguous().view(torch.uint8).flatten()
    if packed.numel() != -(-count // 2) or absmax.numel() != -(-count // max(1, block)) or table.numel() != 16:
        raise unfit(where, f"{packed.numel()} bytes and {absmax.numel()} scales do not belong to shape {list(shape)}")
    values = torch.stack((table[(packed >> 4).long()], table[(packed & 15).long()]), dim=-1).flatten()[:count]
    scales = absmax.float().repeat_interleave(block)[:count]
    return (values * scales).to(dtype).view(shape)
