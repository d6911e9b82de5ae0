"""Small tokenizers with the control tokens of the template families: byte-level ones, some as SentencePiece's are."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from core.train.render.families import FAMILIES

_PROSE = (
    "the assistant and the user speak in turns; a system message says how to answer. What is one and one? It is two. "
    "Name a colour, please: red, blue, green. Thank you very much! You are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face, created by Alibaba Cloud. [INST] [/INST] <<SYS>> system user model 1234567890 \n\n"
) * 3

# BOS, EOS and, beside a family's tokens, what its tokenizers have as added tokens that are not flagged as special.
_ENDS: dict[str, tuple[str | None, str]] = {
    "chatml": (None, "<|im_end|>"),
    "command-r": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("<bos>", "<eos>"),
    "gemma3": ("<bos>", "<eos>"),
    "granite": (None, "<|end_of_text|>"),
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "phi4": (None, "<|im_end|>"),
    "qwen2.5": (None, "<|im_end|>"),
    "qwen3": (None, "<|im_end|>"),
    "smollm2": ("<|im_start|>", "<|im_end|>"),
    "zephyr": ("<s>", "</s>"),
}
_UNFLAGGED = {
    "command-r": ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    "deepseek": ("<｜User｜>", "<｜Assistant｜>"),
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
}
SENTENCEPIECE = ("gemma", "llama2", "mistral", "zephyr", "phi3")
"""Families whose real tokenizers are of that kind."""


@cache
def family_tokenizer(name: str, *, sentencepiece: bool = False) -> Any:
    """A tokenizer that the family's template can be used with; its own chat template is the caller's to set (on a copy:
    `copy.copy` is enough)."""
    bos, eos = _ENDS[name]
    unflagged = _UNFLAGGED.get(name, ())
    special = dict.fromkeys(token for token in ("<unk>", bos, eos, *FAMILIES[name].tokens) if token)
    tokenizer = Tokenizer(models.BPE(byte_fallback=sentencepiece, unk_token="<unk>" if sentencepiece else None))
    if sentencepiece:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        initial = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        initial = pre_tokenizers.ByteLevel.alphabet()
    if sentencepiece:  # while training: no merge goes across a space
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    kept = [token for token in special if token not in unflagged]
    trainer = trainers.BpeTrainer(
        vocab_size=1100,
        special_tokens=[*kept, *(initial if sentencepiece else [])],
        initial_alphabet=[] if sentencepiece else initial,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_PROSE.split("; "), trainer)
    if sentencepiece:
        tokenizer = _only_special(tokenizer, kept)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in unflagged])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, unk_token="<unk>")
    wrapped.chat_template = None
    return wrapped


def _only_special(tokenizer: Any, kept: list[str]) -> Any:
    """The byte tokens `<0x0A>` are pieces of the model, not added tokens: the trainer made them both."""
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in kept]
    return Tokenizer.from_str(json.dumps(state))
