"""The weights of well-known decoders from their config.json alone, before any file is here. No torch.

Names and shapes are those of the classes of transformers (`transformers/models/<family>/modeling_<family>.py`); a test
holds them equal to what those make on the meta device. Experts are fused, as transformers holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.errors import ModelError
from core.plan.models.headers import Tensor, sizes

LLAMA_LIKE = frozenset(
    {
        "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo2", "smollm3",
        "mixtral", "qwen3_moe", "phi3", "starcoder2",
    }
)  # fmt: skip
FAMILIES = LLAMA_LIKE | {"gpt2", "gpt_neox"}

Named = Iterator[tuple[str, tuple[int, ...]]]


def weights_of(config: dict[str, Any], dtype: str) -> dict[str, Tensor]:
    """Every parameter of the model by its name, all in `dtype`. ModelError (`model_unmeasured`) for a family that is
    not known here, or a config.json that lacks a size."""
    family = str(config.get("model_type"))
    try:
        match family:
            case "gpt2":
                named = _gpt2(config)
            case "gpt_neox":
                named = _gpt_neox(config)
            case _ if family in LLAMA_LIKE:
                named = _llama_like(family, config)
            case _:
                raise unmeasured(f"the sizes of `{family}` models are not known from their config.json alone")
        return {name: Tensor(dtype, sizes(shape)) for name, shape in named}
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise unmeasured(f"its config.json (`{family}`) does not say {error}") from error


def unmeasured(why: str) -> ModelError:
    return ModelError(
        f"what this model takes cannot be known before its weights are here: {why}",
        field="model",
        code="model_unmeasured",
    )


def _llama_like(family: str, config: dict[str, Any]) -> Named:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        for name, shape in _llama_block(family, config, number):
            yield f"model.layers.{number}.{name}", shape
    yield "model.norm.weight", (hidden,)
    if family == "starcoder2":
        yield "model.norm.bias", (hidden,)
    if not config.get("tie_word_embeddings", family in ("gemma", "gemma2", "gemma3_text", "smollm3", "starcoder2")):
        yield "lm_head.weight", (vocab, hidden)


def _llama_block(family: str, config: dict[str, Any], number: int) -> Named:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    biased = _biased(family, config)
    if family == "phi3":
        yield from _linear("self_attn.qkv_proj", hidden, queries + 2 * keys, False)
    else:
        yield from _linear("self_attn.q_proj", hidden, queries, biased["qkv"])
        yield from _linear("self_attn.k_proj", hidden, keys, biased["qkv"])
        yield from _linear("self_attn.v_proj", hidden, keys, biased["qkv"])
    yield from _linear("self_attn.o_proj", queries, hidden, biased["o"])
    if family in ("qwen3", "qwen3_moe", "gemma3_text"):
        yield "self_attn.q_norm.weight", (width,)
        yield "self_attn.k_norm.weight", (width,)
    if family == "olmo2":
        yield "self_attn.q_norm.weight", (queries,)
        yield "self_attn.k_norm.weight", (keys,)
    yield from _feed_forward(family, config, number, biased["mlp"])
    names = ["post_attention_layernorm", "post_feedforward_layernorm"]
    if family != "olmo2":
        names = ["input_layernorm", "post_attention_layernorm"]
    if family in ("gemma2", "gemma3_text"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for name in names:
        yield f"{name}.weight", (hidden,)
        if family == "starcoder2":
            yield f"{name}.bias", (hidden,)


def _biased(family: str, config: dict[str, Any]) -> dict[str, bool]:
    match family:
        case "qwen2":
            return {"qkv": True, "o": False, "mlp": False}
        case "starcoder2":
            wanted = bool(config.get("use_bias", True))
            return {"qkv": wanted, "o": wanted, "mlp": wanted}
        case _:
            wanted = bool(config.get("attention_bias", False))
            return {"qkv": wanted, "o": wanted, "mlp": bool(config.get("mlp_bias", False))}


def _feed_forward(family: str, config: dict[str, Any], number: int, biased: bool) -> Named:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if family in ("mixtral", "qwen3_moe") and not _dense(family, config, number):
        experts = config.get("num_local_experts") or config["num_experts"]
        inner = config["moe_intermediate_size"] if family == "qwen3_moe" else inner
        yield "mlp.gate.weight", (experts, hidden)
        yield "mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)
        yield "mlp.experts.down_proj", (experts, hidden, inner)
    elif family == "phi3":
        yield from _linear("mlp.gate_up_proj", hidden, 2 * inner, False)
        yield from _linear("mlp.down_proj", inner, hidden, False)
    elif family == "starcoder2":
        yield from _linear("mlp.c_fc", hidden, inner, biased)
        yield from _linear("mlp.c_proj", inner, hidden, biased)
    else:
        yield from _linear("mlp.gate_proj", hidden, inner, biased)
        yield from _linear("mlp.up_proj", hidden, inner, biased)
        yield from _linear("mlp.down_proj", inner, hidden, biased)


def _dense(family: str, config: dict[str, Any], number: int) -> bool:
    """Whether this block of a mixture of experts has none."""
    if family == "mixtral":
        return False
    step = config.get("decoder_sparse_step") or 1
    return number in (config.get("mlp_only_layers") or []) or (number + 1) % step != 0


def _gpt2(config: dict[str, Any]) -> Named:
    """Its linear layers are Conv1D: [in, out]."""
    hidden, inner = config["n_embd"], config.get("n_inner") or 4 * config["n_embd"]
    yield "transformer.wte.weight", (config["vocab_size"], hidden)
    yield "transformer.wpe.weight", (config["n_positions"], hidden)
    for number in range(config["n_layer"]):
        at = f"transformer.h.{number}"
        for name, i, o in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, inner),
            ("mlp.c_proj", inner, hidden),
        ):
            yield f"{at}.{name}.weight", (i, o)
            yield f"{at}.{name}.bias", (o,)
        for name in ("ln_1", "ln_2"):
            yield f"{at}.{name}.weight", (hidden,)
            yield f"{at}.{name}.bias", (hidden,)
    yield "transformer.ln_f.weight", (hidden,)
    yield "transformer.ln_f.bias", (hidden,)
    if not config.get("tie_word_embeddings", True):
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _gpt_neox(config: dict[str, Any]) -> Named:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    biased = bool(config.get("attention_bias", True))
    yield "gpt_neox.embed_in.weight", (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        at = f"gpt_neox.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (hidden,)
            yield f"{at}{name}.bias", (hidden,)
        yield from _linear(f"{at}attention.query_key_value", hidden, 3 * hidden, biased)
        yield from _linear(f"{at}attention.dense", hidden, hidden, biased)
        yield from _linear(f"{at}mlp.dense_h_to_4h", hidden, inner, True)
        yield from _linear(f"{at}mlp.dense_4h_to_h", inner, hidden, True)
    yield "gpt_neox.final_layer_norm.weight", (hidden,)
    yield "gpt_neox.final_layer_norm.bias", (hidden,)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (vocab, hidden)


def _linear(name: str, inputs: int, outputs: int, biased: bool) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    if biased:
        yield f"{name}.bias", (outputs,)
