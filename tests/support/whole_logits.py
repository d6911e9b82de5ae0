"""The chunked loss and the same from whole logits in float64: what tests of its backends compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.train.loss.linear_cross_entropy import HeadOptions, linear_cross_entropy, token_logprobs

OPTIONS = [
    HeadOptions(),
    HeadOptions(softcap=3.0),
    HeadOptions(scale=0.25),
    HeadOptions(label_smoothing=0.1),
    HeadOptions(z_loss=1e-2),
    HeadOptions(softcap=5.0, scale=2.0, label_smoothing=0.2, z_loss=1e-3),
]


def row_losses(logits: Tensor, labels: Tensor, bias: Tensor | None, options: HeadOptions) -> Tensor:
    """[n] from float64 logits as the head makes them, 0 where the label is -100."""
    z = (logits if bias is None else logits + bias) * options.scale
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    loss = functional.cross_entropy(z, labels, reduction="none", label_smoothing=options.label_smoothing)
    return loss + torch.where(labels != -100, options.z_loss * z.logsumexp(1).square(), 0.0)


def loss_and_gradients(
    hidden: Tensor, head: Tensor, labels: Tensor, bias: Tensor | None, options: HeadOptions, chunk_rows: int
) -> list[Tensor]:
    """Return the chunked loss by the process's backend: the sum, and its gradients for hidden and head."""
    hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    loss = linear_cross_entropy(hidden, head, labels, bias=bias, options=options, chunk_rows=chunk_rows)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, head])]


def logprobs_and_gradients(
    hidden: Tensor, head: Tensor, labels: Tensor, options: HeadOptions, upstream: Tensor, chunk_rows: int
) -> list[Tensor]:
    """Return the tokens' log-probabilities and their gradients."""
    hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
    found = token_logprobs(hidden, head, labels, options=options, chunk_rows=chunk_rows)
    return [found.detach(), *torch.autograd.grad(found, [hidden, head], upstream)]


def far_away(folder: str, **options: Any) -> tuple[Tensor, Tensor]:
    """The Triton kernel on three rows that lie 2^30 elements apart in a sparse file: losses, and the gradient of the
    last row, which begins past element 2^31."""
    from core.train.kernels.triton.loss import loss_rows_

    width, vocabulary = 2**30 + 64, 4100
    size = 3 * width * 2
    path = Path(folder) / "sparse"
    with path.open("wb") as file:
        file.truncate(size)
    storage = torch.UntypedStorage.from_file(str(path), True, size)
    logits = torch.empty(0, dtype=torch.float16).set_(storage, 0, (3, width), (width, 1))  # type: ignore[call-overload]
    values = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(0)).half()
    logits[:, :vocabulary] = values
    out = torch.empty(3)
    loss_rows_(logits, vocabulary, torch.tensor([7, -100, 4099]), out, gradient=True, **options)
    return out, logits[2, :vocabulary].clone()
