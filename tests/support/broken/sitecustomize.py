"""A device whose libraries are wrong, for tests: Python imports this at its start when the folder is on PYTHONPATH.

`EFT_TEST_BROKEN` names the faults, with commas. Entry points of torch (and of one C kernel of ours) are replaced as
soon as they are imported; all that stands on them runs as it is.

- `flash`: SDPA's flash kernel drops the last row of its result.
- `bf16`, `fp16`, `fp32`: products in it are off by a tenth.
- `narrow`: a bf16 product with 16 columns takes the process with it, as a page fault of a GPU does, unless hipBLASLt
  is off.
- `hang`: the loss of bf16 logits never returns.
- `full`: a product finds no memory.
- `native`: the C kernels' dequantisation gives a wrong last element, once they have been taken into use.
- `exit`: importing torch ends the process.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import time
from typing import Any

BROKEN = set(filter(None, os.environ.get("EFT_TEST_BROKEN", "").split(",")))
_import = builtins.__import__
_done: set[str] = set()


def _watch(name: str, *rest: Any, **more: Any) -> Any:
    if name == "torch" and "exit" in BROKEN:
        print("libfault.so: cannot open the device", file=sys.stderr, flush=True)
        os._exit(7)
    module = _import(name, *rest, **more)
    for whose, ready, change in (
        ("torch", "optim", _break_torch),
        ("core.train.kernels.native", "_ready", _break_native),
    ):
        found = sys.modules.get(whose)
        if whose not in _done and found is not None and hasattr(found, ready):
            _done.add(whose)
            change(found)
    return module


def _break_torch(torch: Any) -> None:
    functional = torch.nn.functional
    linear, attend, cross_entropy = functional.linear, functional.scaled_dot_product_attention, functional.cross_entropy
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    seen: list[Any] = []
    wrong = {names[name] for name in BROKEN & names.keys()}

    def broken_linear(x: Any, weight: Any, bias: Any = None) -> Any:
        if "full" in BROKEN:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 12.00 MiB")
        y = linear(x, weight, bias)
        seen.append(y.dtype)
        routed = os.environ.get("TORCH_BLAS_PREFER_HIPBLASLT") == "0"
        if "narrow" in BROKEN and not routed and weight.shape[0] == 16 and y.dtype == torch.bfloat16:
            print("Memory access fault by GPU node-1 on address 0x7f", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        return y * 1.1 if y.dtype in wrong else y

    def broken_attention(*given: Any, **more: Any) -> Any:
        out = attend(*given, **more)
        if "flash" in BROKEN and torch.backends.cuda.flash_sdp_enabled():
            keep = torch.ones_like(out)
            keep[..., -1, :] = 0
            return out * keep
        return out

    def broken_cross_entropy(logits: Any, *rest: Any, **more: Any) -> Any:
        while "hang" in BROKEN and logits.dtype == torch.float32 and seen[-1] == torch.bfloat16:
            time.sleep(1)
        return cross_entropy(logits, *rest, **more)

    functional.linear, functional.scaled_dot_product_attention = broken_linear, broken_attention
    functional.cross_entropy = broken_cross_entropy


def _break_native(native: Any) -> None:
    fill = native.dequantize_into

    def broken(out: Any, *rest: Any) -> None:
        fill(out, *rest)
        if "native" in BROKEN:
            out.view(-1)[-1] += 1.0

    native.dequantize_into = broken


if BROKEN:
    builtins.__import__ = _watch
