"""Sizes that the plan counts with and the trainer keeps to: each is written once, here."""

from __future__ import annotations

from typing import Literal

Kind = Literal["cpu", "gpu"]
MIB = 1 << 20

# --- rollouts --------------------------------------------------------------------------------------------

PROMPT_TOKENS = 4096
"""Tokens of one pass over prompts at most, padding counted; a longer prompt is a pass by itself."""
SAMPLED_LOGIT_BYTES = 40
"""Bytes that choosing a token takes for each logit: float32 logits, log-probabilities and what is left of them, and
running sums of float64."""

MOST_ALIKE = 0.9
"""Share of groups whose answers all have the same reward above which they teach next to nothing: a trial's job is
refused, and a training says so."""

# --- the loss --------------------------------------------------------------------------------------------

CHUNK_BYTES: dict[Kind, int] = {"cpu": 24 * MIB, "gpu": 256 * MIB}
"""Logits of one chunk of the loss in float32; with the Triton kernel, which makes no copy of them, in their own dtype.
On a CPU they stay in the last-level cache: for 1,024 rows of 576 and a vocabulary of 49,152 one Zen 4 core took 0.88 s
in chunks of 64 rows, 0.86 of 128, 1.00 of 256, and 1.14 for the full computation (128 rows in all: 0.10 and 0.10)."""
WHOLE_LOGITS_BYTES = CHUNK_BYTES["gpu"]
"""Largest size of the float32 logits of a batch at which a trained head runs on all label tokens at once.

A trained head costs the chunked form one more sum [vocabulary, hidden] in float32 for every chunk. On a GPU this many
logits are one chunk, which saves nothing. Whole logits take about four times as much at their peak (the product, its
float32 copy, the softmax and its gradient): 1 GiB, little beside what training every parameter takes anyway (weights,
gradients and AdamW's state are 16 bytes each: 2.2 GB for the smallest model in use here, of 135 million).
"""


def chunk_rows(kind: Kind, vocabulary: int, itemsize: int) -> int:
    """Rows whose logits, of `itemsize` bytes each, fill CHUNK_BYTES: a multiple of 32, so that products stay matrix
    products."""
    return max(32, CHUNK_BYTES[kind] // (itemsize * vocabulary) // 32 * 32)


# --- packed and streamed weights -------------------------------------------------------------------------

SCRATCH_BYTES: dict[Kind, int] = {"cpu": 32 * MIB, "gpu": 512 * MIB}
"""Budget for dense copies of packed weights (core/train/kernels/scratch.py); a single weight that is larger gets a
buffer all the same. On a CPU more would leave the cache; on a GPU a layer of 8B parameters in bfloat16 has 436 MB."""
QUANT_BLOCK = 64
"""Elements of a packed weight that share a scale, by default."""
NESTED_BLOCK = 256
"""Scales of an NF4 weight that share a second scale (double quantisation)."""
NESTED_MAP = 256
"""Values of the table that quantised scales are looked up in."""
ALIGNMENT = 256
"""Alignment of the streamed tensors of a block, bytes. Kernels read up to 16 at once; a copy engine likes more."""


def aligned(nbytes: int) -> int:
    """The bytes that a streamed tensor takes, up to where the next one begins."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# --- offload ---------------------------------------------------------------------------------------------
PIECE_BYTES = 32 * MIB
"""Size of each of the two buffers between the device and the host. At 25 GB/s a piece takes 1.3 ms, long beside the
20 µs that a copy takes to start."""
INPUTS_IN_FLIGHT = 2
"""Offloaded block inputs that are still on the device while they are copied out: one on its way, one next."""

# --- ranks -----------------------------------------------------------------------------------------------

BUCKET_BYTES = 32 * MIB
"""Size of a bucket of gradients that ranks sum at once: small tensors travel together. torch's DDP takes 25 MiB."""
BUCKETS_IN_FLIGHT = 2
"""Buckets on their way at once. Their content is a copy, so this bounds the memory."""

# --- exports ---------------------------------------------------------------------------------------------

GGUF_BITS = {"F16": 16.0, "Q8_0": 8.5, "Q6_K": 8.5, "Q5_K_M": 8.5, "Q4_K_M": 6.6}
"""Most bits of a weight in a GGUF file, scales included; for K-quants those of a model whose rows their blocks do not
divide (core/train/export/gguf/mixtures.py)."""
