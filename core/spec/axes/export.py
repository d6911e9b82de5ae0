"""The export axis: what a job hands back beside what it trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from core.spec.base import SpecModel, by_type, short_form


class Merged(SpecModel):
    """The whole model with the adapter merged into its weights; loads without PEFT. Plain transformers loads the
    written model, and its logits are compared with those of base and adapter. A model that differs is not released, and
    the job says so."""

    type: Literal["merged"] = "merged"
    merge_onto: Literal["trained", "original"] = "trained"
    """`trained`: the weights over which the adapter was trained (dequantised if packed), so that the merged model is
    the one that was evaluated. `original`: the weights of the model's files before packing."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of the weights; `auto`: fp16 if the base model's files are fp16, otherwise bf16."""


Export = Annotated[Merged, short_form(by_type)]


def _once(exports: list[Export]) -> list[Export]:
    if len({item.type for item in exports}) < len(exports):
        raise ValueError("each format may occur only once")
    return exports


Exports = Annotated[list[Export], AfterValidator(_once), short_form(lambda value: [value], "merged")]
