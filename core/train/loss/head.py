"""From a causal language model to what the chunked loss takes: hidden states, and a head with its options.

The head of a model is not always hidden · Wᵀ: some scale or cap their logits, and a new architecture may do something
else. `head_of` reads the known settings and then tries: on a few tokens the model's own logits and the formula must
agree, or the answer is a reason, and the caller takes the model's logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn

from core.train.loss.linear_cross_entropy import HeadOptions

TOLERANCE = 1e-3
"""Largest difference between the logits and the formula, as a share of the largest logit in float32."""
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Settings that logits are multiplied by: of Cohere, Falcon-H1 and Muse."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """How a model makes logits. The tensors are the model's own."""

    backbone: nn.Module
    """input_ids → last hidden state"""
    weight: Tensor
    bias: Tensor | None
    options: HeadOptions


def head_of(model: nn.Module) -> OutputHead | str:
    """The head of a transformers causal language model, inside a PeftModel or not; or why it is not of the known
    form."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    layer = base.get_output_embeddings()
    if isinstance(layer, ModulesToSaveWrapper):
        layer = layer.modules_to_save[layer.active_adapters[0]]
    if isinstance(layer, TrainableTokensWrapper):
        return "the output head has rows of new tokens"
    backbone = getattr(base, getattr(base, "base_model_prefix", ""), None)
    if layer is None:
        return "the model has the head of a reward model"
    if hasattr(layer, "base_layer"):
        return "the output head has an adapter"
    if type(layer) is not nn.Linear:
        return f"the output head is a {type(layer).__name__}"
    if not isinstance(backbone, nn.Module):
        return "the model has no backbone of its own"
    config = base.config.get_text_config()
    seen = _look(base, backbone, int(config.vocab_size))
    heads = [OutputHead(backbone, layer.weight, layer.bias, options) for options in _candidates(config)]
    gaps = [_gap(seen, head) for head in heads]
    best = min(range(len(heads)), key=lambda at: gaps[at])
    if gaps[best] > TOLERANCE:
        return f"its logits are not the head's product: off by {gaps[best]:.1%} of the largest"
    return heads[best]


def _candidates(config: Any) -> list[HeadOptions]:
    """What the settings may mean for the logits, which only a trial tells: Granite divides by its logits_scaling,
    and HyperCLOVA X multiplies by a setting of the same name."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = math.prod(float(getattr(config, name, None) or 1.0) for name in MULTIPLIERS)
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    scales = dict.fromkeys((scale / scaling, scale * scaling, 1.0))
    return [HeadOptions(softcap=None if softcap is None else float(softcap), scale=each) for each in scales]


def hidden_states(head: OutputHead, input_ids: Tensor, **inputs: Any) -> Tensor:
    """[rows, tokens, H]: what the head is applied to. Adapters inside the backbone take part."""
    states: Tensor = head.backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return states


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A forward pass of the model over a few tokens."""

    states: Tensor
    """Hidden states from its backbone."""
    fed: Tensor | None
    """Input of its head."""
    logits: Tensor
    """Its logits, float32."""


@torch.no_grad()
def _look(base: Any, backbone: nn.Module, vocabulary: int) -> _Seen:
    ids = torch.arange(1, 9, device=base.get_output_embeddings().weight.device).unsqueeze(0) % vocabulary
    fed: list[Tensor] = []
    handle = base.get_output_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    training = base.training
    base.eval()
    try:
        logits = base(input_ids=ids, use_cache=False).logits.float()
        states = backbone(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()
        base.train(training)
    return _Seen(states, fed[0] if fed else None, logits)


@torch.no_grad()
def _gap(seen: _Seen, head: OutputHead) -> float:
    """Largest difference between the model's logits and the formula, over the largest logit; both from the same hidden
    states, the product in the model's dtype."""
    states, fed, options = seen.states, seen.fed, head.options
    if fed is None or fed.shape != states.shape:
        return float("inf")
    rtol, atol = (2**-7, 1e-5) if states.dtype in (torch.bfloat16, torch.float16) else (1e-5, 1e-8)
    if not torch.equal(fed, states) and not torch.allclose(fed, states * options.scale, rtol=rtol, atol=atol):
        return float("inf")  # MiniCPM3 scales what it gives to its head
    formula = nn.functional.linear(states.to(head.weight.dtype), head.weight, head.bias).float() * options.scale
    if options.softcap is not None:
        formula = options.softcap * torch.tanh(formula / options.softcap)
    largest = float(seen.logits.abs().amax())
    # The cap and the scale in the model's own dtype round a little differently: bfloat16 has 8 bits.
    allowed = 8.0 if head.weight.dtype in (torch.bfloat16, torch.float16) else 1.0
    return float((formula - seen.logits).abs().amax()) / max(largest, 1e-30) / allowed
