"""Quantised base formats against their own libraries: `python -m bench.formats [--size 2048] [--rows 256] [--runs 5]`.

One weight of each format that is unpacked at preparation, of random numbers. Two figures of processor time: to unpack
it, ours and the library's in turn in one process; and a training product, ours with the weight that was unpacked once,
the library's with its dequantisation each time, as it computes on a CPU. Both weights are compared bit by bit first. Of
libraries that are not installed a line says so; NF4 and our int8 stay packed, and `bench.kernels` has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.report import finish, hardware, in_turn, seconds, show
from core.train.hub.unpack import codes, compressed, formats
from core.train.hub.unpack.packing import Packing

GROUP = 128
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Subject:
    ours: Callable[[], Tensor]
    """[outputs, inputs]"""
    library: str
    theirs: Callable[[], Callable[[], Tensor]] | None
    """Makes the library's dequantisation; ImportError where it is not installed."""


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).to(torch.int32)


def subjects(size: int) -> dict[str, Subject]:
    """Every format, with the same numbers at every call."""
    torch.manual_seed(0)
    groups = size // GROUP
    scales = (torch.rand(groups, size) * 0.01).half()
    gptq = {"qweight": words(size // 8, size), "qzeros": words(groups, size // 8), "scales": scales}
    awq = {"qweight": words(size, size // 8), "qzeros": words(groups, size // 8), "scales": scales}
    eight = torch.randn(size, size).to(torch.float8_e4m3fn)
    fp8 = {"weight": eight, "weight_scale_inv": torch.rand(groups, groups)}
    mxfp4 = {
        "blocks": torch.randint(0, 256, (1, size, size // 32, 16), dtype=torch.uint8),
        "scales": torch.randint(110, 130, (1, size, size // 32), dtype=torch.uint8),
    }
    llm = {"weight": torch.randint(-127, 128, (size, size), dtype=torch.int8), "SCB": torch.rand(size)}
    packed = {
        "weight_packed": words(size, size // 8),
        "weight_scale": torch.rand(size, groups).to(DTYPE),
        "weight_shape": torch.tensor([size, size]),
    }
    hqq = {
        "W_q": torch.randint(0, 256, (size * groups // 2, GROUP), dtype=torch.uint8),
        "scale": torch.rand(size * groups, 1).to(DTYPE),
        "zero": (torch.rand(size * groups, 1) * 15).to(DTYPE),
        "shape": torch.tensor([size, size]),
        "nbits": torch.tensor(4),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        "compute_dtype": torch.tensor(list(b"torch.bfloat16"), dtype=torch.uint8),
        "quant_scale": torch.tensor(0),
        "quant_zero": torch.tensor(0),
    }
    aqlm = {
        "codes": torch.randint(-128, 128, (size, size // 8, 2), dtype=torch.int8),
        "codebooks": torch.randn(2, 256, 1, 8).to(DTYPE),
        "scales": torch.rand(size, 1, 1, 1).to(DTYPE),
    }
    four, plain = Packing("gptq", "", 4, GROUP, zero_offset=1), Packing("compressed_words", "", 4, GROUP)

    def of_compressed_tensors() -> Callable[[], Tensor]:
        import compressed_tensors.compressors.pack_quantized as library  # type: ignore[import-not-found,unused-ignore]
        from compressed_tensors.quantization import (  # type: ignore[import-not-found,unused-ignore]
            QuantizationArgs,
            QuantizationScheme,
        )

        rule = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
        scheme = QuantizationScheme(targets=["Linear"], weights=rule)
        return lambda: library.PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]

    def of_aqlm() -> Callable[[], Tensor]:
        from aqlm.utils import _dequantize_weight, unpack_int_data  # type: ignore[import-not-found,unused-ignore]

        return lambda: _dequantize_weight(unpack_int_data(aqlm["codes"], 8), aqlm["codebooks"], aqlm["scales"])

    def of_hqq() -> Callable[[], Tensor]:
        from hqq.core.quantize import Quantizer  # type: ignore[import-not-found,unused-ignore]

        meta: dict[str, Any] = {"packing": "4bit_u8", "nbits": 4, "view_as_float": False, "compute_dtype": DTYPE}
        meta |= {"scale": hqq["scale"], "zero": hqq["zero"], "shape": (size, size), "axis": 1, "group_size": GROUP}
        return lambda: Quantizer.dequantize(hqq["W_q"], meta)

    def of_bitsandbytes() -> Callable[[], Tensor]:
        import bitsandbytes.functional as library

        return lambda: library.int8_vectorwise_dequant(llm["weight"], llm["SCB"]).to(DTYPE)

    def of_transformers_fp8() -> Callable[[], Tensor]:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        library: Any = Fp8Dequantize(None)
        return lambda: library._dequantize_one(fp8["weight"], fp8["weight_scale_inv"], DTYPE)

    def of_transformers_mxfp4() -> Callable[[], Tensor]:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return lambda: convert_moe_packed_tensors(mxfp4["blocks"], mxfp4["scales"])[0]

    blocks = Packing("fp8", "", 8, block=(GROUP, GROUP))
    return {
        "gptq": Subject(lambda: formats.gptq(gptq, four, "w"), "GPTQModel", None),
        "awq": Subject(lambda: formats.awq(awq, Packing("awq", "", 4, GROUP), "w"), "AutoAWQ", None),
        "fp8": Subject(lambda: formats.fp8(fp8, blocks, "w", DTYPE), "transformers", of_transformers_fp8),
        "mxfp4": Subject(lambda: formats.mxfp4(mxfp4, "w")[0], "transformers", of_transformers_mxfp4),
        "bitsandbytes 8-bit": Subject(lambda: formats.int8(llm, "w", DTYPE), "bitsandbytes", of_bitsandbytes),
        "compressed-tensors": Subject(
            lambda: compressed.packed(packed, plain, "w", DTYPE), "compressed-tensors", of_compressed_tensors
        ),
        "hqq": Subject(lambda: codes.hqq(hqq, "w", DTYPE), "hqq", of_hqq),
        "aqlm": Subject(lambda: codes.aqlm(aqlm, Packing("aqlm", "", 8), "w", DTYPE), "aqlm", of_aqlm),
    }


def multiply(x: Tensor, weight: Tensor | Callable[[], Tensor]) -> Tensor:
    """x @ weight.T, over a weight that is there or is made now."""
    made = weight if isinstance(weight, Tensor) else weight().to(DTYPE)
    return x @ made.reshape(x.shape[1], x.shape[1]).t()


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """Milliseconds of processor time of a call; the first one does not count."""
    work()

    def measure() -> float:
        began = seconds("cpu")
        work()
        return (seconds("cpu") - began) * 1e3

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="inputs and outputs of the weight")
    parser.add_argument("--rows", type=int, default=256, help="tokens of a product")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{hardware()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    x = torch.randn(arguments.rows, arguments.size).to(DTYPE)
    results: dict[str, dict[str, Any]] = {}
    for name, subject in subjects(arguments.size).items():
        dense = subject.ours().to(DTYPE)
        product = timed(partial(multiply, x, dense))
        try:
            if subject.theirs is None:
                raise ImportError(f"{subject.library} has no code for CPUs")
            dequantise = subject.theirs()
        except ImportError as error:
            results[name] = {"unpack": timed(subject.ours)(), "product": product(), "peer": None, "why": str(error)}
            print(f"{name:<52} unpack {results[name]['unpack']:10.4g} ms   no peer: {error}", flush=True)
            continue
        assert torch.equal(dense, dequantise().to(DTYPE).reshape(dense.shape)), f"{name}: other bits than the library's"
        unpack = in_turn(timed(subject.ours), timed(dequantise), arguments.runs)
        show(f"{name}: unpack, against {subject.library}", unpack, "ms")
        again = timed(partial(multiply, x, dequantise))
        products = in_turn(product, again, arguments.runs)
        show(f"{name}: product, against {subject.library}", products, "ms")
        results[name] = {"unpack": unpack, "product": products, "library": subject.library}
    finish(results)


if __name__ == "__main__":
    main()
