"""A GGUF file small enough to convert in a test."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = "{% for message in messages %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endfor %}"
HIDDEN, FEED_FORWARD, HEADS = 64, 96, 2


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType, *, pre: str = "smollm", arch: str = "llama") -> Path:
    """One Llama block over a byte vocabulary, weights in `kind`, norms in fp32."""
    tokens = [
        *bytes_to_unicode().values(),  # type: ignore[no-untyped-call]
        "<|user|>",
        "<|end|>",
        "ĠĠ",
    ]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(257)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "output": (len(tokens), HIDDEN),
        **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")},
        "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
