"""Ask a model one thing, with plain transformers and PEFT: proof that what a job hands back loads without eft."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    text: str
    prompt_tokens: int
    new_tokens: int
    finished: bool
    """The model ended by itself; otherwise max_new_tokens cut it off."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ask(
    model_dir: Path,
    prompt: str,
    *,
    adapter: Path | None = None,
    system: str | None = None,
    plain: bool = False,
    max_new_tokens: int = 64,
) -> ModelAnswer:
    """Greedy answer to one user message through the chat template. `plain`, or without a template: to the prompt as it
    stands."""
    tokenizer: Any = AutoTokenizer.from_pretrained(adapter or model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, use_safetensors=True)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    if tokenizer.chat_template and not plain:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
    new = output[0, ids.shape[1] :].tolist()
    return ModelAnswer(
        text=tokenizer.decode(new, skip_special_tokens=True).strip(),
        prompt_tokens=int(ids.shape[1]),
        new_tokens=len(new),
        finished=bool(new) and new[-1] == tokenizer.eos_token_id,
    )
