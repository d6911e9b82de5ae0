"""Bytes that a pass through a decoder's block makes: what it keeps for the backward, and what it works in.

Counted tensor by tensor from the modules of transformers and from autograd's rules of what an operation keeps (a
product keeps the operands whose gradients are wanted, softmax its result, and so on). n tokens, H the model's width,
D = heads · head width, K the same of keys, I the feed-forward's inner width; c bytes of a number that is computed (2;
4 in fp32), s of the residual stream (4 where all parameters are trained in float32, else c):

    each norm           4 H n       its input in float32 (+ 4 H n, normalised, where its weight is trained)
    attention's input   c H n       once, or once a projection where autocast casts it (s ≠ c)
    attention           c (2 D + 2 K) n + 4 heads n        q, k, v, its answer, the log-sum-exps
    … of T tokens a row, in plain operations: more, rows · heads · T² (see `_scores`)
    feed-forward        c H n + c 3 I n + c I n            its input; gate, its activation, up; their product
    adapters            c r n each; with dropout c in n + in n (what is left of its input, and the mask)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from core.plan.shape import Shape, Weight

Attention = Literal["flash", "math", "eager"]
Role = Literal["attention in", "attention out", "inner in", "inner out"]
_ATTENTION_IN = ("q_proj", "k_proj", "v_proj", "qkv", "query", "c_attn", "key", "value")
_ATTENTION_OUT = ("o_proj", "out_proj", "attn.c_proj", "attention.dense", "self_attn.dense")
_INNER_OUT = ("down_proj", "mlp.c_proj", "fc2", "4h_to_h", "mlp.w2")


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass: tokens with padding, in rows of at most `longest`."""

    tokens: int
    longest: int

    @property
    def scores(self) -> int:
        """Pairs of tokens that see one another, all heads' the same: rows · longest²."""
        return self.tokens * min(self.longest, self.tokens)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a run computes."""

    computed: int
    """Bytes of a number that products are made of."""
    residual: int
    """Bytes of a number of the residual stream."""
    trained: bool
    """All parameters are: norms keep more, and every product keeps its input."""
    adapted: frozenset[str]
    """Linear layers of the block with an adapter."""
    rank: int = 0
    dropout: bool = False
    dora: bool = False
    fused: bool = False
    """Base and adapter in one operator (packed weights)."""
    attention: Attention = "flash"

    @property
    def casts(self) -> bool:
        """Autocast makes a copy of what comes from the residual stream, for each product anew."""
        return self.residual != self.computed


def role(weight: Weight) -> Role:
    """What a linear layer of a block is fed with, and feeds."""
    name = weight.module
    if any(name.endswith(part) for part in _ATTENTION_OUT):
        return "attention out"
    if any(name.endswith(part) for part in _INNER_OUT):
        return "inner out"
    if any(part in name.rpartition(".")[2] for part in _ATTENTION_IN):
        return "attention in"
    return "inner in"


def kept(shape: Shape, block: Collection[Weight], numbers: Numbers, what: Pass) -> int:
    """Bytes that one block keeps for its backward."""
    c, n = numbers.computed, what.tokens
    linear = [weight for weight in block if weight.kind == "linear"]
    wide = [w for w in block if len(w.shape) == 1 and w.shape[0] == shape.hidden and "norm" in _norm_name(w.name)]
    narrow = [w for w in block if w.name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")]
    per_norm = 8 if numbers.trained else 4
    total = len(wide) * per_norm * shape.hidden * n
    if narrow:
        total += per_norm * (shape.heads + shape.kv_heads) * shape.head_dim * n
    for each in ("attention in", "inner in", "inner out"):
        fed = [weight for weight in linear if role(weight) == each]
        if not fed or not (numbers.trained or any(weight.module in numbers.adapted for weight in fed)):
            continue
        copies = len(fed) if numbers.casts and each != "inner out" else 1
        total += copies * c * fed[0].inputs * n
    total += _attention(shape, numbers, what) + _inner(shape, block, numbers, n)
    for weight in linear:
        if weight.module in numbers.adapted:
            total += _adapter(weight, numbers, n)
    return total


def worked(shape: Shape, block: Collection[Weight], numbers: Numbers, what: Pass) -> int:
    """Bytes that one block's backward has beside what was kept, at most: the gradients of the inner products, of the
    residual stream, and of a norm in float32."""
    c, n = numbers.computed, what.tokens
    inner = 2 * c * shape.inner * n if not shape.experts else 2 * c * shape.inner * n * shape.experts_per_token
    stream = (numbers.residual + 2 * 4) * shape.hidden * n
    scores = 0 if numbers.attention == "flash" else 2 * 4 * shape.heads * what.scores
    return max(inner, scores) + stream


def passed(shape: Shape, numbers: Numbers, what: Pass) -> int:
    """Bytes that one block's forward has at once where nothing is kept (evaluation)."""
    c, n = numbers.computed, what.tokens
    width = shape.inner * (shape.experts_per_token or 1)
    attention = c * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * n
    scores = 0 if numbers.attention == "flash" else (4 + 2 * c) * shape.heads * what.scores
    return (2 * numbers.residual + 4) * shape.hidden * n + max(3 * c * width * n, attention + scores)


def _norm_name(name: str) -> str:
    return "norm" if "norm" in name or name.startswith("ln_") else name


def _attention(shape: Shape, numbers: Numbers, what: Pass) -> int:
    c, n = numbers.computed, what.tokens
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    match numbers.attention:
        case "flash":
            return c * (2 * queries + 2 * keys) * n + 4 * shape.heads * n
        case "math":  # in float32; every head of the queries has its own copy of the keys and values
            return (4 * 3 * queries + c * queries) * n + 4 * shape.heads * what.scores
        case "eager":  # the softmax in float32, and as the product with the values takes it
            scores = (4 + (c if c < 4 else 0)) * shape.heads * what.scores
            return c * 4 * queries * n + scores


def _inner(shape: Shape, block: Collection[Weight], numbers: Numbers, n: int) -> int:
    """Between the products of the feed-forward layer."""
    c = numbers.computed
    if any(weight.kind == "experts" for weight in block):
        routed = n * shape.experts_per_token
        return routed * (2 * c * shape.hidden + 4 * c * shape.inner)
    return (3 if shape.gated else 1) * c * shape.inner * n


def _adapter(weight: Weight, numbers: Numbers, n: int) -> int:
    total = numbers.computed * numbers.rank * n
    if numbers.dropout:
        total += (numbers.computed + 1) * weight.inputs * n
    if numbers.dora:
        total += 2 * numbers.computed * weight.outputs * n
    return total
