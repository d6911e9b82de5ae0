"""The self-test section of docs/hardware.md."""

from __future__ import annotations

PARTS = (
    ("matmul", "a layer's product and its transposed form", "the precision is not used"),
    ("lora.r8, lora.r16", "LoRA forward and backward at a narrow rank", "ranks are padded with zeros to 64"),
    ("lora.r64", "the same at rank 64", "the precision is not used"),
    ("rows.fp32", "a float32 product of more than 2^19 rows (GPUs)", "float32 products are split"),
    ("optimizer.adamw", "three fused steps", "the device is rejected"),
    (
        "attention.flash, .efficient, .math, .eager",
        "each kernel by itself, causal and under a mask of padding, forward and backward",
        "it is not used; if none is left, neither is the precision",
    ),
    ("packed.segments, varlen", "concatenated rows, as in `batching: packed`", "`varlen` is not used"),
    (
        "library.flash_attn_3, .flash_attn, .aiter",
        "concatenated rows by an attention library, where the architecture has a row and the node the library",
        "it is not used",
    ),
    ("library.cudnn", "cuDNN's attention (NVIDIA)", "`attention: cudnn` takes what `auto` does"),
    (
        "dequantize.triton, .native, .portable",
        "NF4 and int8, bitwise",
        "the backend does not dequantise; without the portable one, no job over packed weights starts",
    ),
    ("qlora", "base and LoRA in one operator over weights from the portable backend", "no jobs over packed weights"),
    ("gemv.triton, .native", "the product of a few rows with packed weights", "the dense product is used"),
    ("loss.logits", "cross-entropy over whole logits", "the precision is not used"),
    (
        "loss.triton, .native, .portable",
        "the chunked loss and its gradient",
        "the next one is used, finally whole logits",
    ),
    (
        "block.triton, .native",
        "both RMS norms, the gated activation and rotary embedding, forward and backward",
        "they and LoRA over dense weights are computed as transformers and PEFT do",
    ),
    (
        "fp8.linear",
        "a linear layer in 8-bit floats, if supported (GPUs with torchao)",
        "fp8 falls back to bf16",
    ),
)
"""(names, computation, meaning of a failure)."""


def section() -> list[str]:
    return [
        "## Self-test",
        "",
        "Before a worker offers a slot, it compares the device with the CPU's arithmetic in float64: every part",
        "below, in bf16, fp16 and fp32. The worst error of a part, relative to the largest exact value, may be that",
        "of a stated number of roundings. Parts run in a child process that sees only this device. The child records",
        "each part before it begins, so a page fault, an abort or a hang (`EFT_SELFTEST_SECONDS`) counts as a failure",
        "of that part, and the remaining parts run in a new child. After six such failures the device is given up. A",
        "part that crashed the whole machine is recognised from the journal and not run again. A device that cannot",
        "be tested, because other processes use its memory or the disk is full, is rejected with a message and tested",
        "again every five minutes.",
        "",
        "| part | what is computed | a failure means |",
        "|---|---|---|",
        *(f"| {_code(names)} | {what} | {means} |" for names, what, means in PARTS),
        "",
        "On AMD, a product that fails is tested again without hipBLASLt. If that helps, trainers on this card get the",
        "variables that disable it, unless the operator has set them. bf16 falls back to fp16 with a loss scale, fp16",
        "to fp32. A device that is not correct in any precision is not offered.",
        "",
        "A verdict is valid for this card, its driver, the build of torch with its ROCm or CUDA version, the library",
        "packages beside it (`rocm-sdk-…`, `nvidia-…`, Triton), the variables that control them, and eft's source. It",
        "is stored in `cache/selftest/` below the data root; delete it to test again. Its consequences appear in the",
        "worker's log, the node's row (`GET /nodes`), `eft doctor`, a notice of each affected job and, with all",
        "figures, the run record of every attempt. `EFT_SELFTEST_SECONDS=0` turns the self-test off, which is",
        "reported too.",
        "",
    ]


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))
