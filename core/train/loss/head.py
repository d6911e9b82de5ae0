"""From a causal language model to what the chunked loss takes: hidden states, and a head with its options.

The head of a model is not always hidden · Wᵀ: some scale or cap their logits, and a new architecture may do something
else. `head_of` reads the known settings and then tries: on a few tokens the model's own logits and the formula must
agree, or the answer is a reason, and the caller takes the model's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.train.loss.linear_cross_entropy import HeadOptions

TOLERANCE = 1e-3
"""Of the largest logit, in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """How a model makes logits. The tensors are the model's own."""

    backbone: nn.Module
    """input_ids → last hidden state"""
    weight: Tensor
    bias: Tensor | None
    options: HeadOptions


def head_of(model: nn.Module) -> Head | str:
    """The head of a transformers causal language model, inside a PeftModel or not; or why it is not of the known
    form."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    layer = base.get_output_embeddings()
    backbone = getattr(base, getattr(base, "base_model_prefix", ""), None)
    if hasattr(layer, "base_layer"):
        return "the output head has an adapter"
    if type(layer) is not nn.Linear:
        return f"the output head is a {type(layer).__name__}"
    if not isinstance(backbone, nn.Module):
        return "the model has no backbone of its own"
    config = base.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    options = HeadOptions(
        softcap=None if softcap is None else float(softcap),
        scale=float(scale) if scale is not None else 1.0 / float(divisor) if divisor else 1.0,
    )
    head = Head(backbone, layer.weight, layer.bias, options)
    gap = _gap(base, head, int(config.vocab_size))
    if gap > TOLERANCE:
        return f"its logits are not the head's product: off by {gap:.1%} of the largest"
    return head


def hidden_states(head: Head, input_ids: Tensor, **inputs: Any) -> Tensor:
    """[rows, tokens, H]: what the head is applied to. Adapters inside the backbone take part."""
    states: Tensor = head.backbone(input_ids=input_ids, use_cache=False, **inputs).last_hidden_state
    return states


@torch.no_grad()
def _gap(base: Any, head: Head, vocabulary: int) -> float:
    """Largest difference between the model's logits and the formula, over the largest logit; both from the same hidden
    states, the product in the model's dtype."""
    ids = torch.arange(1, 9, device=head.weight.device).unsqueeze(0) % vocabulary
    seen: list[Tensor] = []
    handle = base.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    training = base.training
    base.eval()
    try:
        logits = base(input_ids=ids, use_cache=False).logits.float()
        states = head.backbone(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()
        base.train(training)
    if not seen or seen[0].shape != states.shape or not torch.equal(seen[0], states):
        return float("inf")
    formula = nn.functional.linear(states.to(head.weight.dtype), head.weight, head.bias).float() * head.options.scale
    if head.options.softcap is not None:
        formula = head.options.softcap * torch.tanh(formula / head.options.softcap)
    largest = float(logits.abs().amax())
    # The cap and the scale in the model's own dtype round a little differently: bfloat16 has 8 bits.
    allowed = 8.0 if head.weight.dtype in (torch.bfloat16, torch.float16) else 1.0
    return float((formula - logits).abs().amax()) / max(largest, 1e-30) / allowed
