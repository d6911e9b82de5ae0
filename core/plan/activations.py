"""Bytes that a pass through a decoder's block takes: activations kept for the backward, and working memory.

Counted tensor by tensor from the modules of transformers and from autograd's rules of what an operation keeps (a
product keeps the operands whose gradients are wanted, softmax its result, and so on). n tokens, H the model's width,
D = heads · head width, K the same of keys, I the feed-forward's inner width; c bytes of a number that is computed (2;
4 in fp32), s of the residual stream (4 where all parameters are trained in float32, else c):

    each norm           4 H n       its input in float32 (+ 4 H n, normalised, where its weight is trained)
    … in one operator   s H n + 4 n its input; the gate then keeps one c I n less
    attention's input   c H n       once, or once a projection where autocast casts it (s ≠ c)
    attention           c (2 D + 2 K) n + 4 heads n        q, k, v, its answer, the log-sum-exps
    … in plain operations, or by torch's math: 4 (+ c) heads · rows · T², the scores, and q, k, v of D each
    feed-forward        c H n + c 3 I n + c I n            its input; gate, its activation, up; their product
    adapters            c r n each; with dropout what is left of their own input and its mask, in place of the input
    OFT                 c in n + 7 c in b each             the input as the rotation takes it; with blocks of b, the
                                                           powers of the rotation's series (4 in fp32)
    DoRA                2 c out n each                     the results of base and adapter; packed, their sum alone

tests/train/test_plan_bytes.py holds it to what autograd keeps, and bench/plan.py to what a process takes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from core.plan.models.shape import Shape, Weight
from core.spec.axes.method import OFT

Attention = Literal["flash", "math", "eager"]
Role = Literal["attention in", "attention out", "inner in", "inner out"]
_ATTENTION_IN = ("q_proj", "k_proj", "v_proj", "qkv", "query", "c_attn", "key", "value")
_ATTENTION_OUT = ("o_proj", "out_proj", "attn.c_proj", "attention.dense", "self_attn.dense")
_INNER_OUT = ("down_proj", "mlp.c_proj", "fc2", "4h_to_h", "mlp.w2")


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass: tokens, padding counted, in rows of at most `longest` tokens."""

    tokens: int
    longest: int

    @property
    def scores(self) -> int:
        """Pairs of tokens that attend to one another in each head: rows · longest²."""
        return self.tokens * min(self.longest, self.tokens)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numeric formats of a run, and how it computes."""

    computed: int
    """Bytes of a number that products are made of."""
    residual: int
    """Bytes of a number of the residual stream."""
    trained: bool
    """All parameters are trained: norms keep more, and every product keeps its input."""
    adapted: frozenset[str]
    """Linear layers of the block with an adapter."""
    rank: int = 0
    dropout: int = 0
    """Bytes of a number of its mask (GPU 1, CPU as computed); 0 without dropout."""
    dora: bool = False
    fused: bool = False
    """Base and adapter in one operator (packed weights)."""
    rotation: OFT | None = None
    """Adapters rotate the inputs of their layers, each its own copy."""
    rounded: bool = False
    """Layers round weight and input, and do so again in the backward (`quantization: qat`)."""
    attention: Attention = "flash"
    cpu: bool = False
    whole: bool = False
    """Logits are made whole, however many they are."""
    parts: bool = False
    """Frozen RMS norms and SiLU gates are one operator each, which keeps its inputs."""


def role(weight: Weight) -> Role:
    """Where a linear layer stands in its block."""
    name = weight.module
    if any(name.endswith(part) for part in _ATTENTION_OUT):
        return "attention out"
    if any(name.endswith(part) for part in _INNER_OUT):
        return "inner out"
    if any(part in name.rpartition(".")[2] for part in _ATTENTION_IN):
        return "attention in"
    return "inner in"


def kept(shape: Shape, block: Collection[Weight], numbers: Numbers, what: Pass) -> int:
    """Bytes that one block keeps for its backward, all of it."""
    n = what.tokens
    total = _norms(shape, block, numbers, n)
    for each in ("attention in", "inner in", "inner out"):
        total += _inputs([w for w in block if w.kind == "linear" and role(w) == each], numbers, n)
    total += _attention(shape, numbers, what) + _inner(shape, block, numbers, n)
    return total + sum(_adapter(weight, numbers, n) for weight in block if weight.module in numbers.adapted)


def selected(shape: Shape, block: Collection[Weight], numbers: Numbers, what: Pass) -> int:
    """Bytes that one block keeps with selective checkpoints: its input, the results of its large products and of
    attention, and x·Aᵀ of each adapter (core/train/memory/checkpointing/selective.py)."""
    c, n = numbers.computed, what.tokens
    saved = [w for w in block if w.kind == "linear" and role(w) != "inner out"]
    total = numbers.residual * shape.hidden * n + c * sum(weight.outputs for weight in saved) * n
    if numbers.attention == "flash":
        total += (c * shape.heads * shape.head_dim + 4 * shape.heads) * n
    total += sum(c * numbers.rank * n for weight in block if weight.module in numbers.adapted)
    return total + (0 if numbers.trained or numbers.fused else c * shape.hidden * n)


def worked(shape: Shape, block: Collection[Weight], numbers: Numbers, what: Pass) -> int:
    """Bytes that one block's backward has at once beside all that was kept: the gradient of the residual stream, and of
    the inner products two; in plain attention the gradients of the scores, when those of the feed-forward are gone."""
    c, n = numbers.computed, what.tokens
    width = shape.inner * (shape.experts_per_token or 1)
    inner = 2 * c * width * n
    if numbers.attention != "flash":
        inner = max(inner, 8 * shape.heads * what.scores - _inner(shape, block, numbers, n))
    if numbers.dora and numbers.fused:  # a result with its magnitudes in float32, and its gradient
        inner += max((8 * w.outputs * n for w in block if w.module in numbers.adapted), default=0)
    elif numbers.dora:  # an identity, its product with both factors, and base plus that, in the weights' own dtype
        inner += max((c * w.inputs**2 + 3 * c * w.numel for w in block if w.module in numbers.adapted), default=0)
    if numbers.rotation is not None:  # an input and its gradient in float32, beside those of the products
        inner += max((8 * w.inputs * n for w in block if w.module in numbers.adapted), default=0)
    return numbers.residual * shape.hidden * n + inner


def passed(shape: Shape, numbers: Numbers, what: Pass) -> int:
    """Bytes that one block's forward has at once where nothing is kept (evaluation)."""
    c, n = numbers.computed, what.tokens
    width = shape.inner * (shape.experts_per_token or 1)
    attention = c * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim * n
    scores = 0 if numbers.attention == "flash" else (4 + 2 * c) * shape.heads * what.scores
    return (2 * numbers.residual + 4) * shape.hidden * n + max(3 * c * width * n, attention + scores)


def ended(shape: Shape, numbers: Numbers, n: int) -> int:
    """Bytes between the last block and the logits: the final norm, its answer, and that once more at the labels (which
    all tokens are taken to have), for the products of the head."""
    s = numbers.residual
    return (_per_norm(shape, numbers) + 2 * s + numbers.computed) * shape.hidden * n


def _norms(shape: Shape, block: Collection[Weight], numbers: Numbers, n: int) -> int:
    per_number = _per_norm(shape, numbers)
    total, names = 0, {weight.name for weight in block}
    for weight in block:
        if not weight.name.endswith("weight") or not ("norm" in weight.name or weight.name.startswith("ln_")):
            continue
        width = weight.shape[0]
        if f"{weight.module}.bias" in names:  # a LayerNorm keeps its input, which autocast on a GPU makes float32
            total += ((numbers.residual if numbers.cpu else 4) * width + 8) * n
            continue
        if weight.module.endswith(("q_norm", "k_norm")) and width == shape.head_dim:
            width *= shape.heads if weight.module.endswith("q_norm") else shape.kv_heads
        total += (per_number * width + 4) * n
    return total


def _per_norm(shape: Shape, numbers: Numbers) -> int:
    """Bytes that a norm without a bias keeps of each number."""
    if numbers.trained:
        return 8
    return numbers.residual if numbers.parts and shape.rms_norms else 4


def _inputs(fed: Collection[Weight], numbers: Numbers, n: int) -> int:
    """Bytes kept of the input that these layers share: one copy, or a copy for each where autocast makes one; nothing
    where no gradient needs it, or where dropout has replaced it."""
    c, first = numbers.computed, next(iter(fed), None)
    if first is None:
        return 0
    if numbers.trained or numbers.rounded:
        apart = numbers.residual != c and role(first) != "inner out"
        return (len(fed) if apart else 1) * c * first.inputs * n
    if numbers.rotation is not None:
        return c * first.inputs * n * sum(weight.module in numbers.adapted for weight in fed)
    wanted = any(weight.module in numbers.adapted for weight in fed)
    return c * first.inputs * n if wanted and (numbers.dropout == 0) else 0


def _attention(shape: Shape, numbers: Numbers, what: Pass) -> int:
    c, n = numbers.computed, what.tokens
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    match numbers.attention:
        case "flash":
            return c * (2 * queries + 2 * keys) * n + 4 * shape.heads * n
        case "math":  # in float32; every head of the queries has its own copy of the keys and values
            scores = (12 if shape.own_dropout else 4) * shape.heads * what.scores
            return (4 * 3 * queries + c * queries) * n + scores
        case "eager":  # the softmax in float32, and as the product with the values takes it
            scores = (4 + (c if c < 4 else 0) + (c if shape.scores_capped else 0)) * shape.heads * what.scores
            return c * 4 * queries * n + scores


def _inner(shape: Shape, block: Collection[Weight], numbers: Numbers, n: int) -> int:
    """Bytes kept between the products of the feed-forward layer."""
    c = numbers.computed
    if any(weight.kind == "experts" for weight in block):
        routed = n * shape.experts_per_token
        router = (4 + c) * shape.experts * n  # probabilities in float32, and the logits
        return router + routed * (2 * c * shape.hidden + 4 * c * shape.inner)
    masks = 2 * (c if numbers.cpu else 1) * shape.hidden * n if shape.own_dropout else 0
    apart = any(weight.module.endswith("gate_proj") for weight in block)  # Phi-3 has both in one product
    gate = 2 if numbers.parts and shape.silu and apart else 3
    return (gate if shape.gated else 4 if shape.plain_gelu else 1) * c * shape.inner * n + masks


def _adapter(weight: Weight, numbers: Numbers, n: int) -> int:
    c = numbers.computed
    if numbers.rounded:
        return 0
    total = c * numbers.rank * n
    if numbers.rotation is not None:
        total += (7 if c < 4 else 4) * c * weight.inputs * (numbers.rotation.block_of(weight.inputs) or 0)
    if numbers.dropout:
        total += (c + numbers.dropout) * weight.inputs * n
    if numbers.dora:
        total += (1 if numbers.fused else 2) * c * weight.outputs * n
    return total
