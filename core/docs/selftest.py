"""The section of docs/hardware.md on the self-test."""

from __future__ import annotations

PARTS = (
    ("matmul", "a layer's product and its transposed form", "the precision is not used"),
    ("lora.r8, lora.r16", "LoRA forward and backward at a narrow rank", "ranks are padded with zeros to 64"),
    ("lora.r64", "the same at rank 64", "the precision is not used"),
    ("rows.fp32", "a float32 product of more than 2^19 rows (GPUs)", "float32 products are made in parts"),
    ("optimizer.adamw", "three fused steps", "the card is refused"),
    (
        "attention.flash, .efficient, .math, .eager",
        "each kernel by itself, causal and under a mask of padding, forward and backward",
        "it is not used; where none is left, the precision is not",
    ),
    ("packed.segments, varlen", "rows end to end, as `batching: packed` computes them", "`varlen` is not used"),
    (
        "dequantize.triton, .native, .portable",
        "NF4 and int8, to the bit",
        "the backend does not dequantise; where it is the portable one, nothing over packed weights starts",
    ),
    ("qlora", "base and LoRA in one operator over what the portable backend unpacks", "nothing over packed weights"),
    ("gemv.triton", "the product of a few rows with packed weights", "the dense product is used"),
    ("loss.logits", "cross-entropy over whole logits", "the precision is not used"),
    ("loss.triton, .native, .portable", "the chunked loss and its gradient", "the next one, at last whole logits"),
    (
        "fp8.linear",
        "a linear layer in 8-bit floats, where there are such (GPUs with torchao)",
        "fp8 falls back to bf16",
    ),
)
"""(names, what is computed, what a failure means)."""


def section() -> list[str]:
    return [
        "## Self-test",
        "",
        "Before a worker offers a slot, each device is held against the CPU's arithmetic in float64: every part below,",
        "in bf16, fp16 and fp32. The worst error of a part, over the largest exact value, may be what a stated number",
        "of roundings makes. Parts run in a child that sees this device alone. It writes down which part it begins,",
        "so that a page fault, an abort or a hang (`EFT_SELFTEST_SECONDS`) is that part's verdict, and the rest is",
        "tried in a fresh child; after six of these the card is given up. A part that took the whole machine down is",
        "known by the journal and not tried again. A device that could not be tried, because others fill its memory or",
        "the disk is full, is refused with words and tried again every five minutes.",
        "",
        "| part | what is computed | a failure means |",
        "|---|---|---|",
        *(f"| {_code(names)} | {what} | {means} |" for names, what, means in PARTS),
        "",
        "On AMD a product that fails is tried again without hipBLASLt; where that helps, trainers on this card get",
        "those variables, unless the operator has set them. bf16 falls back to fp16 under a loss scale, fp16 to fp32.",
        "A card that computes rightly in no precision is not offered.",
        "",
        "A verdict holds for this card, its driver, the build of torch with the ROCm or CUDA that it was made for, the",
        "packages of libraries beside it (`rocm-sdk-…`, `nvidia-…`, Triton), the variables that steer them, and our",
        "source, and is kept in `cache/selftest/` below the data root; delete it to try again. What it means is",
        "in the worker's log, the node's row (`GET /nodes`), `eft doctor`, a notice of each job that it touches, and,",
        "with all figures, in the run record of every attempt. `EFT_SELFTEST_SECONDS=0` switches it off, and that is",
        "told, too.",
        "",
    ]


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))
