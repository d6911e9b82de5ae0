"""The sum of gradients over the ranks, once for each optimizer step.

Data parallel training as in Li et al. 2020 (arXiv:2006.15704): every rank has the whole model, computes the gradients
of its share of the step's rows, and all use the sum. What torch's DistributedDataParallel does with hooks inside the
last backward pass is done behind it here, so that every backward pass is what DDP calls `no_sync`. That costs the
overlap of computing with sending. It buys what this engine promises: gradients between two steps are a rank's own and
can be saved at any micro-step; a step may end with a micro-batch that leaves parameters without gradients, on one rank
or on all (a mixture's experts); and the buckets, with them the order of sums, are the same in the first step after a
resume as in any other, where DDP cuts them anew after its first pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.plan.constants import BUCKET_BYTES, BUCKETS_IN_FLIGHT


def sum_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace every gradient by its sum over all ranks, in place. One that some ranks do not have is zero there; one
    that no rank has stays absent. Collective: every rank calls it with the same parameters in the same order."""
    trained = list(parameters.values())
    have = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
    dist.all_reduce(have, op=dist.ReduceOp.MAX)
    gradients = []
    for parameter, somewhere in zip(trained, have.tolist(), strict=True):
        if somewhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    pending: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
    for bucket in buckets(gradients):
        if len(pending) == BUCKETS_IN_FLIGHT:
            _arrived(*pending.popleft())
        flat = bucket[0] if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        flat = flat.contiguous()
        pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
    while pending:
        _arrived(*pending.popleft())


def _arrived(work: Any, flat: Tensor, bucket: list[Tensor]) -> None:
    work.wait()
    if len(bucket) == 1:
        if flat.data_ptr() != bucket[0].data_ptr():
            bucket[0].copy_(flat)
        return
    parts = torch.split(flat, [gradient.numel() for gradient in bucket])
    torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def buckets(gradients: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """In their order; of one dtype and device, and of at most BUCKET_BYTES unless one alone has more."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        more = gradient.numel() * gradient.element_size()
        alike = not bucket or (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + more > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += more
    if bucket:
        yield bucket
