"""The head of a model, found and tried: plain, capped, scaled, and one that does something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
)

from core.train.loss.head import OutputHead, head_of, hidden_states
from core.train.loss.linear_cross_entropy import linear_cross_entropy

SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=0.5)),
        lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)),
        lambda: HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**SMALL, logits_scaling=0.25)),
        lambda: FalconH1ForCausalLM(
            FalconH1Config(
                **SMALL, lm_head_multiplier=0.25, mamba_d_ssm=32, mamba_n_heads=2, mamba_d_head=16, mamba_d_state=8
            )
        ),
        lambda: MiniCPM3ForCausalLM(
            MiniCPM3Config(
                **SMALL,
                dim_model_base=12,
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=16,
            )
        ),
    ],
    ids=["llama", "gemma2", "cohere", "granite", "hyperclovax", "falcon-h1", "minicpm3"],
)
def test_loss_over_the_found_head_is_the_models_own(make: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make().to(dtype)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    head = head_of(model)
    assert isinstance(head, OutputHead), head
    ids = torch.randint(1, 61, (2, 7))
    hidden = hidden_states(head, ids)[:, :-1].flatten(0, 1)
    ours = linear_cross_entropy(
        hidden, head.weight, ids[:, 1:].flatten(), bias=head.bias, options=head.options, count=12
    )
    wanted = functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(ours, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_an_unknown_head_is_told() -> None:
    class Odd(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    torch.manual_seed(0)
    reason = head_of(Odd(LlamaConfig(**SMALL)))
    assert isinstance(reason, str) and "off by" in reason
