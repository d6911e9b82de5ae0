"""A program over the `gguf` tools: a GGUF file in 16 bits as one of another type.

    quantise_program.py SOURCE TARGET TYPE

What the converter left in float32 (norms, vectors, routers) stays in float32. One tensor is in memory at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, ReaderTensor
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from gguf.quants import dequantize, quantize

FILE_TYPES = {"F16": LlamaFileType.MOSTLY_F16, "Q8_0": LlamaFileType.MOSTLY_Q8_0}
WRITTEN_ANEW = ("GGUF.", "general.architecture", "general.file_type", "general.finetune")


def main() -> None:
    source, target, kind = sys.argv[1:]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if not name.startswith(WRITTEN_ANEW):
            of = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of)
    writer.add_file_type(FILE_TYPES[kind])
    chosen = [(tensor, type_of(tensor, kind)) for tensor in reader.tensors]
    for tensor, to in chosen:
        block, size = GGML_QUANT_SIZES[to]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        count = int(tensor.n_elements) // block * size
        writer.add_tensor_info(tensor.name, _stored(shape, block, size), _dtype(to), count, raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, to in chosen:
        writer.write_tensor_data(_data(tensor, to, quantize))
    writer.close()


def type_of(tensor: ReaderTensor, kind: str) -> GGMLQuantizationType:
    """Type of a tensor in a file of type `kind`."""
    if tensor.tensor_type is not GGMLQuantizationType.F16 or kind == "F16":
        return GGMLQuantizationType(tensor.tensor_type)
    to = GGMLQuantizationType[kind]
    # Rows that blocks do not divide stay in 16 bits.
    return to if int(tensor.shape[0]) % GGML_QUANT_SIZES[to][0] == 0 else GGMLQuantizationType.F16


def _data(
    tensor: ReaderTensor, to: GGMLQuantizationType, quantizer: Callable[[Any, GGMLQuantizationType], Any]
) -> np.ndarray[Any, Any]:
    if to == tensor.tensor_type:
        return np.asarray(tensor.data)
    return np.asarray(quantizer(dequantize(tensor.data, tensor.tensor_type), to))


def _stored(shape: tuple[int, ...], block: int, size: int) -> tuple[int, ...]:
    """Shape in bytes of what is not made of numbers."""
    return shape if block == 1 else (*shape[:-1], shape[-1] // block * size)


def _dtype(to: GGMLQuantizationType) -> Any:
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    return np.dtype(plain.get(to, np.uint8))


if __name__ == "__main__":
    main()
