"""Bytes of the logits, whole or chunk by chunk, and of what goes with them."""

from __future__ import annotations

from core.plan.activations import Numbers
from core.plan.constants import WHOLE_LOGITS_BYTES, chunk_rows
from core.plan.device import Device
from core.plan.models.shape import Shape


def chunked(shape: Shape, numbers: Numbers, tokens: int) -> bool:
    """Whether the loss makes its logits chunk by chunk (core/train/stages/sft.py)."""
    if numbers.whole:
        return False
    return not numbers.trained or 4 * shape.vocab * tokens > WHOLE_LOGITS_BYTES


def training_bytes(shape: Shape, numbers: Numbers, tokens: int, device: Device) -> int:
    """Bytes of the logits in the loss and of what goes with them. Whole: the softmax's logarithms, their gradient and
    that of the logits, each in float32. A chunk: the product, which becomes its own gradient; on a CPU also the capped
    logits, in float32. A trained head: the gradient of a chunk, and the sum of all chunks."""
    if not chunked(shape, numbers, tokens):
        return 12 * shape.vocab * tokens
    return _chunk(shape, numbers, tokens, device) + (2 * 4 * shape.vocab * shape.hidden if numbers.trained else 0)


def logprobs_bytes(shape: Shape, numbers: Numbers, tokens: int, device: Device) -> int:
    """Bytes of the same where a stage needs the log-probability of each label (core/train/policy.py): always chunks,
    unless the head is none of the known ones. The product is in float32, the gradient beside it in the head's dtype,
    and that of every label's hidden state, in float32, is kept for the backward."""
    if numbers.whole:
        return 12 * shape.vocab * tokens
    each = 4 + (numbers.computed if numbers.computed < 4 else 0)
    each += 4 if shape.logits_capped and device.kind == "cpu" else 0
    rows = min(tokens, chunk_rows(device.kind, max(1, shape.vocab), 4))
    head = 2 * 4 * shape.vocab * shape.hidden if numbers.trained else 0
    return rows * shape.vocab * each + 4 * tokens * shape.hidden + head


def reference_bytes(shape: Shape, numbers: Numbers, tokens: int, device: Device) -> int:
    """Bytes of the same without gradients, where the reference is computed (core/train/evaluation/reference.py)."""
    if numbers.whole:
        return (8 + numbers.computed) * shape.vocab * tokens
    each = 4 + (4 if shape.logits_capped and device.kind == "cpu" else 0)
    return min(tokens, chunk_rows(device.kind, max(1, shape.vocab), 4)) * shape.vocab * each


def evaluation_bytes(shape: Shape, numbers: Numbers, tokens: int, device: Device) -> int:
    """Bytes of the logits in evaluation. Whole: the product, and in float32 the product and the softmax's
    logarithms."""
    if numbers.whole:
        return (8 + numbers.computed) * shape.vocab * tokens
    return _chunk(shape, numbers, tokens, device)


def _chunk(shape: Shape, numbers: Numbers, tokens: int, device: Device) -> int:
    wide = (8 if numbers.computed == 2 else 4) if shape.logits_capped else 0
    wide = wide if device.kind == "cpu" else 0
    counted = numbers.computed if device.kind == "gpu" else 4
    rows = min(tokens, chunk_rows(device.kind, max(1, shape.vocab), counted))
    return rows * shape.vocab * (numbers.computed + wide)


def logits_why(shape: Shape, numbers: Numbers, tokens: int, *, logprobs: bool = False) -> str:
    if logprobs and not numbers.whole:
        return "a chunk of them, and a gradient for every label" + (
            ", and the head's gradient twice" if numbers.trained else ""
        )
    if not chunked(shape, numbers, tokens):
        return "all of them: the head is trained, and they are few"
    return "a chunk of them" + (", and the head's gradient twice" if numbers.trained else "")
