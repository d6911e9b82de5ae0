"""The numbers of a config.json, bounded where they are read, and held against the weights beside it. No torch.

Anyone can put a model onto a hub. A size of 10^400 is no float, 10^12 layers are built for ever, and -1
is no size at all: what no real model comes near is refused before anything computes with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from core.plan.models.headers import Tensor, unreadable

MOST_LAYERS = 4096
MOST_EXPERTS = 4096
"""Largest number of experts in a layer."""
MOST = 1 << 24
"""Largest width, number of heads or vocabulary."""
INTEGER = (1 << 63) - 1
"""Largest value of any other number: the largest integer of torch, JSON readers and databases."""
DEPTH = 64
"""Largest nesting of objects and lists."""
SHOWN = 40
"""Characters of a value in a message."""

LAYERS = ("num_hidden_layers", "n_layer")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head")
VOCABULARY = ("vocab_size",)
OTHERS = ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "head_dim", "num_key_value_heads")
EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "num_experts_per_token",
)  # fmt: skip
"""May be 0: a family of mixtures has members that are none."""
MORE_LAYERS = (
    "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers",
    "num_nextn_predict_layers",
)  # fmt: skip
"""Other names of it, and lists of layers beside the main one."""
_SHARE = re.compile(r"(dropout|pdrop)(_prob)?$")
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in)\.weight$")
_BOUNDS: dict[str, tuple[int, int]] = (
    dict.fromkeys(LAYERS, (1, MOST_LAYERS))
    | dict.fromkeys((*HIDDEN, *HEADS, *VOCABULARY), (1, MOST))
    | dict.fromkeys(OTHERS, (0, MOST))
    | dict.fromkeys(EXPERTS, (0, MOST_EXPERTS))
    | dict.fromkeys(MORE_LAYERS, (0, MOST_LAYERS))
)


def check_numbers(config: Mapping[str, Any], *, field: str) -> None:
    """ModelError (`model_unreadable`), with the place in config.json, for a number that no model has."""
    for path, value in _values(config, "", field, 0):
        if isinstance(value, int) and abs(value) > INTEGER:
            raise unreadable(
                f"config.json: `{path}` is a number of {value.bit_length()} bits; no model has such", field
            )
    _check_sizes(config, "", field)
    if isinstance(text := config.get("text_config"), dict):
        _check_sizes(text, "text_config.", field)


def _check_sizes(part: Mapping[str, Any], path: str, field: str) -> None:
    for name, value in part.items():
        if _SHARE.search(name) and isinstance(value, int | float) and not 0 <= value <= 1:
            raise unreadable(f"config.json: `{path}{name}` is {_shown(value)}, and should lie between 0 and 1", field)
    for name, (least, most) in _BOUNDS.items():
        value = part.get(name)
        for size in value if isinstance(value, list) else () if value is None else (value,):  # one for each layer
            if isinstance(size, bool) or not isinstance(size, int):
                words = "should be a whole number"
            elif not least <= size <= most:
                words = f"should lie between {least} and {most}"
            else:
                continue
            raise unreadable(f"config.json: `{path}{name}` is {_shown(size)}, and {words}", field)


def _values(value: Any, path: str, field: str, depth: int) -> Iterator[tuple[str, Any]]:
    """All that is neither an object nor a list, by its path."""
    if depth > DEPTH:
        raise unreadable(f"config.json: more than {DEPTH} objects or lists lie within one another", field)
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _values(inner, f"{path}.{name}" if path else str(name), field, depth + 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _values(inner, f"{path}[{number}]", field, depth + 1)
    else:
        yield path, value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the sizes of the text model at the top, where a model has several parts."""
    nested = config.get("text_config")
    return dict(config) | nested if isinstance(nested, dict) else dict(config)


def number(config: Mapping[str, Any], *names: str) -> int:
    """Get the first of these fields that is set, or 0. Call `check_numbers` before."""
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def check_files(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], blocks: Mapping[str, int], *, same: bool, field: str
) -> None:
    """ModelError (`model_unreadable`) where config.json describes another model than the files hold.

    `blocks`: how many numbered modules each list in the files has. `same`: the family is one of which it is known that
    each layer is one of them; of others the files may hold more (layers that only predict further tokens), never less.
    """
    text = text_part(config)
    said, there = number(text, *LAYERS), max(blocks.values(), default=0)
    if said > there or (same and 0 < said < there):
        words = f"config.json describes {said} layers (`num_hidden_layers`), and the weight files hold {there}"
        raise unreadable(f"{words}: they do not belong together", field)
    embedding = next((tensors[name] for name in tensors if EMBEDDING.search(name)), None)
    if embedding is None or len(embedding.shape) != 2 or not same:
        return
    for name, size, stored in zip(
        ("vocab_size", "hidden_size"), (number(text, *VOCABULARY), number(text, *HIDDEN)), embedding.shape, strict=True
    ):
        if size and size != stored:
            words = f"config.json says `{name}: {size}`, and the embedding in the weight files has {stored}"
            raise unreadable(f"{words}: they do not belong together", field)
