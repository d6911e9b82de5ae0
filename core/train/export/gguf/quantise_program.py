"""A program over the `gguf` tools, and `quants` for K-quants: a GGUF file in 16 bits as one of another type.

    quantise_program.py SOURCE TARGET TYPE [IMPORTANCE]

IMPORTANCE: a NumPy archive (`.npz`) with the mean square of each input of a tensor, by the tensor's name. What the
converter left in float32 (norms, vectors, routers) stays in float32. One tensor is in memory at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, ReaderTensor
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from gguf.quants import dequantize, quantize

from core.train.export.gguf.mixtures import tensor_types

FILE_TYPES = {
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
    "Q5_K_M": LlamaFileType.MOSTLY_Q5_K_M,
    "Q4_K_M": LlamaFileType.MOSTLY_Q4_K_M,
}
WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type", "general.finetune")

Quantizer = Callable[[Any, GGMLQuantizationType, Any], Any]


def main() -> None:
    source, target, kind, *rest = sys.argv[1:]
    importance: Mapping[str, Any] = np.load(rest[0]) if rest else {}
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith(WRITTEN_ANEW):
            of = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
    writer.add_file_type(FILE_TYPES[kind])
    wide = {one.name: int(one.shape[0]) for one in reader.tensors if one.tensor_type is GGMLQuantizationType.F16}
    chosen = {name: GGMLQuantizationType[to] for name, to in tensor_types(wide, kind).items()}
    for tensor in reader.tensors:
        to = chosen.get(tensor.name, tensor.tensor_type)
        block, size = GGML_QUANT_SIZES[to]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        stored = shape if block == 1 else (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor_info(tensor.name, stored, _dtype(to), int(tensor.n_elements) // block * size, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    quantizer = _plain if kind in ("F16", "Q8_0") else _with_importance()
    for tensor in reader.tensors:
        to = chosen.get(tensor.name, tensor.tensor_type)
        weights = importance.get(tensor.name)
        writer.write_tensor_data(_data(tensor, to, quantizer, weights))
    writer.close()


def _data(
    tensor: ReaderTensor, to: GGMLQuantizationType, quantizer: Quantizer, importance: Any
) -> np.ndarray[Any, Any]:
    if to == tensor.tensor_type:
        return np.asarray(tensor.data)
    return np.asarray(quantizer(dequantize(tensor.data, tensor.tensor_type), to, importance))


def _plain(values: Any, to: GGMLQuantizationType, _: Any) -> Any:
    return quantize(values, to)


def _with_importance() -> Quantizer:
    import libgguf

    def quantizer(values: Any, to: GGMLQuantizationType, importance: Any) -> Any:
        return libgguf.quantize_rows(values, to, importance)

    return quantizer


def _dtype(to: GGMLQuantizationType) -> Any:
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return np.dtype(plain.get(to, np.uint8))


if __name__ == "__main__":
    main()
