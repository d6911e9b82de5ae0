"""The batching axis: which rows go through the model at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.base import SpecModel, by_type, short_form

TokensPerBatch = Annotated[int, Field(ge=8, le=16_777_216)]


class Rows(SpecModel):
    """`training.per_device_train_batch_size` rows per forward pass, padded to the longest of them."""

    type: Literal["rows"] = "rows"
    group_by_length: bool = False
    """Put rows of similar length into one optimizer step: less padding. The order of steps is random."""


class Tokens(SpecModel):
    """As many rows of similar length as fit a token budget, padding included. `per_device_train_batch_size` is not
    used."""

    type: Literal["tokens"] = "tokens"
    tokens_per_batch: TokensPerBatch = 8192
    """Token budget of one forward pass: rows times the longest of them. An optimizer step has at most
    gradient_accumulation_steps times as many. A longer row is a batch by itself. If omitted, the budget is smaller for
    small files: enough for about 100 optimizer steps."""


class Packed(SpecModel):
    """Rows concatenated without padding; positions restart with each row, and no token attends to another row (Krell et
    al. 2021, arXiv:2107.02027). Logits and gradients equal those of unpacked rows; a model that cannot keep rows apart
    is rejected at the start. `per_device_train_batch_size` is not used."""

    type: Literal["packed"] = "packed"
    tokens_per_batch: TokensPerBatch = 8192
    """Token budget of one forward pass. An optimizer step has at most gradient_accumulation_steps times as many. A
    longer row is a batch by itself. If omitted, the budget is smaller for small files: enough for about 100 optimizer
    steps."""
    share_prompts: bool = True
    """For pairs of answers: compute the prompt that both begin with once, if the model's attention allows it; the run
    record says whether (`packing`). Results are those of separate sequences up to rounding, and the rows of a step are
    the same: `tokens_per_batch` counts the prompt for each answer."""


Batching = Annotated[Rows | Tokens | Packed, Field(discriminator="type"), short_form(by_type)]
