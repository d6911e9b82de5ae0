"""The model as a stage sees it: losses and log-probabilities of labels, by kernels that are chosen here for all stages.

An engine makes one over its model, under the precision and the loss scale that it set.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from core.plan.constants import WHOLE_LOGITS_BYTES
from core.train.attention.exact import Exact
from core.train.attention.kept import continuing, keeping
from core.train.batch import Batch
from core.train.logits import (
    label_figures,
    label_hidden,
    label_logits,
    label_logprobs,
    label_logprobs_and_hidden,
    scores_at,
)
from core.train.loss.chunk import loss_backend
from core.train.loss.head import OutputHead, head_of
from core.train.loss.linear_cross_entropy import TokenFigures, linear_cross_entropy
from core.train.model.heads import has_head
from core.train.model.scaler import LossScaler
from core.train.model.value_head import values_of

T = TypeVar("T")


class PolicyModel:
    """See the module."""

    def __init__(
        self,
        model: nn.Module,
        inference: Callable[[], AbstractContextManager[nn.Module]],
        *,
        autocast: torch.dtype | None = None,
        scaler: LossScaler | None = None,
    ) -> None:
        """`inference` makes a context in which the model computes without gradients and dropout."""
        self.model = model
        self._inference, self._autocast, self._scaler = inference, autocast, scaler
        self._head: OutputHead | str | None = None
        self.exact: Exact | None = None
        """The arithmetic of all passes, where tokens are drawn with the log-probabilities of training to the bit."""

    def head(self, veto: str | None = None) -> OutputHead | str:
        """The output head as the chunked loss takes it, or why it is none of those. Found by trying, at the first call;
        `veto`, which counts then, is a reason not to try."""
        if self._head is None:
            with self._inference() as model:
                self._head = head_of(model) if veto is None else veto
        return self._head

    @property
    def whole_logits(self) -> str | None:
        """Why the logits of a batch are always made whole; None where the chunked loss is taken."""
        head = self.head()
        if isinstance(head, str):
            return head
        trained = head.bias is not None and head.bias.requires_grad
        return "the output head's bias is trained" if trained else None

    def cross_entropy(self, batch: Batch, divisor: float = 1.0) -> Tensor:
        """Sum of -log p over the labels of the batch, in float32. `divisor`: what the caller divides the sum by before
        the backward; all that it decides is how gradients in 16 bits are rounded.

        The head and the cross-entropy are computed in one, chunk by chunk, where the head is frozen and of the known
        form: that needs less memory and no more time. A trained head costs the chunked form a sum of its own gradient
        over the chunks, so it is taken only where the logits are large; each batch decides by its label tokens.
        """
        head = self._chunked_head(batch)
        if head is None:
            logits, targets = label_logits(self.model, batch)
            return functional.cross_entropy(logits.float(), targets, reduction="sum")
        hidden, targets = label_hidden(head, batch)
        upstream = (1.0 if self._scaler is None else self._scaler.scale) / divisor
        return linear_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, options=head.options, upstream=upstream
        )

    def figures(self, batch: Batch) -> TokenFigures:
        """Loss and rightness of every label, row after row. No gradients."""
        return label_figures(self.model, self.head(), batch)

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> Tensor:
        """Log-probability of every label at a temperature, float32 [label tokens], row after row."""
        return label_logprobs(self.model, self.whole_logits or self.head(), batch, temperature, self.exact)

    def logprobs_and_values(self, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """`logprobs`, and what the value head says before each label, float32 [label tokens]; of one pass."""
        head = self.whole_logits or self.head()
        logprobs, hidden = label_logprobs_and_hidden(self.model, head, batch, temperature, self.exact)
        return logprobs, values_of(self.model, hidden)

    def sequence_logprobs(self, batch: Batch) -> Tensor:
        """Summed log-probability of each sequence's labels, float32 [examples, sequences]."""
        parts = torch.split(self.logprobs(batch), batch.label_counts())
        return torch.stack([part.sum() for part in parts]).view(-1, batch.sequences)

    def continued(self, batch: Batch, function: Callable[[Batch], T]) -> tuple[Tensor, T]:
        """`sequence_logprobs` of a batch, and what a function finds of the batch beside it, without gradients and
        dropout."""
        assert batch.beside is not None
        with keeping() as kept:
            found = self.sequence_logprobs(batch)
        with self._inference(), continuing(kept):
            return found, function(batch.beside)

    def scores(self, batch: Batch) -> Tensor:
        """Output of a reward model's head at the last token of each sequence, float32 [examples, sequences]."""
        return scores_at(self.model, batch, batch.last_positions()).squeeze(-1).view(-1, batch.sequences)

    def label_scores(self, batch: Batch) -> Tensor:
        """Output of a process reward model's head at each labelled token, float32 [label tokens, labels], row after
        row."""
        return scores_at(self.model, batch, batch.label_positions() + 1)

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        if has_head(self.model):
            return {"loss": {"kernel": "scores"}}
        head = self.head()
        if (reason := self.whole_logits) is not None:
            return {"loss": {"kernel": "logits", "reason": reason}}
        assert isinstance(head, OutputHead)
        dtype = self._autocast or head.weight.dtype
        backend = loss_backend(head.weight.device, dtype, head.bias, head.options)
        if not head.weight.requires_grad:
            return {"loss": {"kernel": "chunked", "backend": backend}}
        above = WHOLE_LOGITS_BYTES // (4 * head.weight.shape[0])
        return {"loss": {"kernel": "by size", "backend": backend, "chunked_above_tokens": above}}

    def _chunked_head(self, batch: Batch) -> OutputHead | None:
        head = self.head()
        if isinstance(head, str) or self.whole_logits is not None:
            return None
        small = batch.label_tokens * head.weight.shape[0] * 4 <= WHOLE_LOGITS_BYTES
        return None if head.weight.requires_grad and small else head


def describe_whole_logits(reason: str, model: nn.Module) -> str:
    """The notice of a run without the chunked loss."""
    vocabulary: int = model.get_output_embeddings().weight.shape[0]  # type: ignore[operator]
    return (
        f"logits are made whole, for {reason}: about {12 * vocabulary:,} bytes a label token in training, and up "
        "to that in evaluations"
    )
