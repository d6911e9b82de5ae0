"""Unpacking against the memory's own speed, and decoding: `python -m bench.kernels [--device cuda] [--model smollm2]`.

- **Unpacking**: bytes moved a second (packed weight and scales read, the dense weight written) while a 14336 × 4096
  weight becomes bfloat16, NF4 with double quantisation and int8, by each backend there is here; against a plain copy
  that moves as many bytes (the roofline), and against bitsandbytes' own NF4. In turn, in one process.
- **Decoding**: tokens a second of one greedy answer, cache on, from a model packed by us and from bitsandbytes', the
  same weights to the bit. On a GPU with Triton ours multiplies a row with the packed weight; elsewhere it unpacks
  first.

The same command runs on CPU and GPU; each line names the backend that did the work.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.qlora import Tee, quiet
from bench.qlora_models import ROOT, folder_of, vocabulary_of
from bench.qlora_peers import Shape, _four_bits
from bench.report import finish, hardware, in_turn, show
from core.train.kernels.format import Format
from core.train.kernels.interface import available, backend_for, dequantize_with, describe
from core.train.quant.int8 import quantize_int8
from core.train.quant.nf4 import quantize_nf4

ROWS, COLUMNS = 14336, 4096
"""A feed-forward weight of an 8B Llama."""
PROMPT = 16


def _clock(device: torch.device, times: int, work: Callable[[], Any]) -> float:
    """Seconds of one `work`, after one that does not count."""
    work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    _wait(device)
    return (time.perf_counter() - began) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- unpacking -------------------------------------------------------------------------------------


def unpacking(device: torch.device, runs: int, times: int) -> dict[str, dict[str, Any]]:
    """GB/s, by format and backend."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)
    out = torch.empty(ROWS * COLUMNS, dtype=torch.bfloat16, device=device)
    formats: dict[Format, Any] = {"nf4": quantize_nf4(weight), "int8": quantize_int8(weight)}
    results: dict[str, dict[str, Any]] = {}
    for format, packed in formats.items():
        moved = packed.packed.nbytes + sum(scale.nbytes for scale in packed.scales) + out.nbytes
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)

        def copy(source: Tensor = source, target: Tensor = target, moved: int = moved) -> float:
            return moved / _clock(device, times, lambda: target.copy_(source)) / 1e9

        for backend in available(device):

            def ours(
                backend: Any = backend, format: Format = format, packed: Any = packed, moved: int = moved
            ) -> float:
                def work() -> None:
                    dequantize_with(backend, out, packed.packed, packed.scales, format, packed.block)

                return moved / _clock(device, times, work) / 1e9

            name = f"{format} to bfloat16 by {backend}"
            results[f"{name}, against a copy"] = in_turn(ours, copy, runs)
            show(f"{name}, against a copy", results[f"{name}, against a copy"], "GB/s")
            if format == "nf4":
                results[f"{name}, against bitsandbytes"] = in_turn(ours, _bitsandbytes(weight, moved, times), runs)
                show(f"{name}, against bitsandbytes", results[f"{name}, against bitsandbytes"], "GB/s")
    return results


def _bitsandbytes(weight: Tensor, moved: int, times: int) -> Callable[[], float]:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    return lambda: moved / _clock(weight.device, times, lambda: dequantize_4bit(packed, state)) / 1e9


# --- decoding --------------------------------------------------------------------------------------


def decoding(folder: Path, device: torch.device, runs: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Tokens a second of one answer of `tokens` tokens."""
    from core.train.quant.model import load_quantized

    ours: Any = load_quantized(folder, torch.bfloat16)[0].to(device).eval()  # type: ignore[no-untyped-call]
    peer = _four_bits(folder, Shape(1, PROMPT, 1, device)).eval()
    low = min(100, vocabulary_of(folder) // 2)
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(low, vocabulary_of(folder), (1, PROMPT), generator=generator).to(device)

    def speed(model: Any) -> Callable[[], float]:
        def answer() -> None:
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, use_cache=True, pad_token_id=0,
            )  # fmt: skip
            assert made.shape[1] == PROMPT + tokens

        def timed() -> float:
            with torch.inference_mode():
                return tokens / _clock(device, 1, answer)

        return timed

    fused = backend_for(device, "gemv") == "triton"
    how = "Triton's product of few rows" if fused else f"{backend_for(device)} unpacking and a product"
    name = f"decoding, {how}, against bitsandbytes"
    found = in_turn(speed(ours), speed(peer), runs)
    show(name, found, "tokens/s")
    return {name: found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="smollm2", help="as for bench.qlora; llama-8b on a GPU")
    parser.add_argument("--layers", type=int, help="of a model with random weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--times", type=int, help="unpackings of one measurement (default: 5, on a GPU 100)")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--report", type=Path, help="default bench/results/kernels-<device>-<day>.txt")
    arguments = parser.parse_args()
    quiet()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    label = kind.lower().replace(" ", "-")
    report = arguments.report or ROOT / "bench" / "results" / f"kernels-{label}-{datetime.now(UTC).date()}.txt"
    with Tee(report):
        print(f"{kind if on_gpu else hardware()}; torch {torch.__version__}; {describe(device)}")
        print(f"load average {os.getloadavg()[0]:.2f} before")
        results = unpacking(device, arguments.runs, arguments.times or (100 if on_gpu else 5))
        results |= decoding(folder_of(arguments.model, arguments.layers), device, arguments.runs, arguments.tokens)
        if on_gpu:
            for found in results.values():
                found["hardware"] = kind
        finish(results)


if __name__ == "__main__":
    main()
