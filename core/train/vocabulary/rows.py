"""Rows of embedding and head for the tokens that a job adds to its model.

PEFT trains them (`trainable_token_indices`), tied or not; all other rows stay frozen. A new row begins as the mean of
those of the model's own tokens, in the base too, so that the base without its adapter is a function of the model's
files alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

from core.errors import SpecError
from core.train.vocabulary.new_tokens import NEW


@torch.no_grad()
def grow(model: Any, ids: Sequence[int]) -> None:
    """Give the model rows of these tokens. SpecError where PEFT would compute its head in another way."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and getattr(head, "bias", None) is not None:
        raise SpecError("the model's output head has a bias, and PEFT trains no rows of such a head", field=NEW)
    if max(ids) >= embedding.weight.shape[0]:
        model.resize_token_embeddings(max(ids) + 1, mean_resizing=False)
    for weight in _ends(model):
        weight[torch.tensor(ids)] = weight[: min(ids)].float().mean(0).to(weight.dtype)


def token_indices(model: Any, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """What PEFT takes as `trainable_token_indices` of a model without adapters; None: there are no new tokens. A head
    that is the embedding follows that."""
    if not ids:
        return None
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is None or head.weight is embedding.weight
    chosen = [embedding] if tied else [embedding, head]
    return {name: list(ids) for name, module in model.named_modules() if module in chosen}


def train_rows(model: nn.Module) -> None:
    """Train the rows in float32, whatever the model is in."""
    for layer in model.modules():
        if isinstance(layer, TrainableTokensLayer) and layer.tied_adapter is None:
            for rows in layer.trainable_tokens_delta.values():
                rows.data = rows.data.float()


def with_rows(wrapper: TrainableTokensWrapper) -> Tensor | None:
    """The weight with its trained rows, in float32; None: it is that of another module."""
    layer: Any = wrapper.token_adapter
    if layer.tied_adapter is not None:
        return None
    merged: Tensor = layer.base_layer.weight.detach().float()
    for name in layer.active_adapters:
        rows = layer.trainable_tokens_delta[name].detach().float()
        merged = merged.index_copy(0, torch.tensor(layer.token_indices[name], device=merged.device), rows)
    return merged


def _ends(model: Any) -> list[Tensor]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return list({id(one.weight): one.weight for one in ends if one is not None}.values())
