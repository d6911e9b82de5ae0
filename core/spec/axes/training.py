"""The axes that decide the numbers: stage, method, quantisation, optimizer, schedule, and the loop itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from core.spec.base import SpecModel, by_type, short_form

# --- stage -----------------------------------------------------------------------------------------


class SFT(SpecModel):
    """Supervised fine-tuning: cross-entropy on the tokens that the model learns to write."""

    type: Literal["sft"] = "sft"
    loss_on: Literal["completions", "last", "turns", "all"] | None = None
    """Tokens with a loss. `completions`: those of every assistant turn whose `weight` is not 0; prompts have none.
    `last`: those of the last assistant turn. `turns`: those of turns with `weight: 1`. `all`: every token. Default:
    `completions`, or `all` for raw text, which has no prompt."""


Stage = Annotated[SFT, short_form(by_type)]

# --- method ----------------------------------------------------------------------------------------

ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,128}$")]


class Full(SpecModel):
    """Full fine-tuning: all parameters are trained."""

    type: Literal["full"] = "full"


class LowRank(SpecModel):
    """Common fields of LoRA and QLoRA; not an arm."""

    type: str
    r: Annotated[int, Field(ge=1, le=256)] = 32
    """Rank of the update."""
    lora_alpha: Annotated[float, Field(gt=0, le=4096)] | None = None
    """The update is scaled by lora_alpha / r. Default: 2 r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input."""
    target_modules: (
        Literal["all-linear", "attention"] | Annotated[list[ModuleName], Field(min_length=1, max_length=64)]
    ) = "all-linear"
    """`all-linear` (every linear layer except the head), `attention` (its projections), or a list of module names."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (arXiv:2312.03732)."""
    use_dora: bool = False
    """DoRA: a trained magnitude beside the low-rank direction (arXiv:2402.09353)."""


class LoRA(LowRank):
    """Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    type: Literal["lora"] = "lora"


class QLoRA(LowRank):
    """LoRA over a 4-bit base (Dettmers et al. 2023, arXiv:2305.14314); `quantization` defaults to `nf4`."""

    type: Literal["qlora"] = "qlora"


class Auto(LowRank):
    """The first of these methods that fits the slot on which the job starts: `full`, `lora`, `lora` over int8, `qlora`,
    and `qlora` with streamed blocks. It is chosen once, at the job's first start, from its memory plan (docs/plans.md),
    and does not change afterwards. The job shows why each earlier candidate was rejected. `full` ignores the fields
    below."""

    type: Literal["auto"] = "auto"


Method = Annotated[Full | LoRA | QLoRA | Auto, Field(discriminator="type"), short_form(by_type)]
SettledMethod = Full | LoRA | QLoRA
"""What a run has."""

# --- quantisation ----------------------------------------------------------------------------------

ModuleNames = Annotated[list[ModuleName], Field(max_length=64)]


class NoQuantization(SpecModel):
    """The weights of the base model's files: in the run's precision, or packed if the files are NF4."""

    type: Literal["none"] = "none"


class NF4(SpecModel):
    """4 bits per weight, in blocks of 64, in bitsandbytes' layout. Embeddings, output head and norms stay dense. A base
    whose files are NF4 is used unchanged."""

    type: Literal["nf4"] = "nf4"
    double: bool = True
    """Quantise the blocks' scales too: 4.13 bits per weight instead of 4.5."""
    skip_modules: ModuleNames = Field(default=[])
    """Linear layers that stay dense: full names, or their last part."""


class Int8(SpecModel):
    """8 bits per weight, with one scale (absmax) per block."""

    type: Literal["int8"] = "int8"
    block_size: Literal[32, 64, 128, 256] = 64
    """Weights per scale; 64 gives 8.5 bits per weight."""
    skip_modules: ModuleNames = Field(default=[])
    """As for `nf4`."""


Quantization = Annotated[NoQuantization | NF4 | Int8, Field(discriminator="type"), short_form(by_type)]

# --- optimizer -------------------------------------------------------------------------------------

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(SpecModel):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate. Default: 2e-4 with adapters, 2e-5 for full fine-tuning (with `method: auto`, that of the
    chosen method)."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay; biases and norms are exempt."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)  # a list, as JSON has no tuples
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""


Optimizer = Annotated[AdamW, short_form(by_type)]

# --- schedule --------------------------------------------------------------------------------------


class Linear(SpecModel):
    """Warm-up, then linear decay to zero at the last step."""

    type: Literal["linear"] = "linear"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of all optimizer steps used for warm-up, rounded up."""


class Cosine(SpecModel):
    """Warm-up, then cosine decay to zero at the last step (arXiv:1608.03983, without restarts)."""

    type: Literal["cosine"] = "cosine"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """As for `linear`."""


Schedule = Annotated[Linear | Cosine, Field(discriminator="type"), short_form(by_type)]

# --- what is handed back ---------------------------------------------------------------------------


class Merged(SpecModel):
    """The whole model with the adapter merged into its weights; loads without PEFT. Plain transformers loads the
    written model, and its logits are compared with those of base and adapter. A model that differs is not released, and
    the job says so."""

    type: Literal["merged"] = "merged"
    merge_onto: Literal["trained", "original"] = "trained"
    """`trained`: the weights over which the adapter was trained (dequantised if packed), so that the merged model is
    the one that was evaluated. `original`: the weights of the model's files before packing."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Dtype of the weights; `auto`: fp16 if the base model's files are fp16, otherwise bf16."""


Export = Annotated[Merged, short_form(by_type)]


def _once(exports: list[Export]) -> list[Export]:
    if len({item.type for item in exports}) < len(exports):
        raise ValueError("each format may stand here once")
    return exports


Exports = Annotated[list[Export], AfterValidator(_once), short_form(lambda value: [value], "merged")]

# --- batches ---------------------------------------------------------------------------------------

TokensPerBatch = Annotated[int, Field(ge=8, le=16_777_216)]


class Rows(SpecModel):
    """`training.per_device_train_batch_size` rows per forward pass, padded to the longest of them."""

    type: Literal["rows"] = "rows"
    group_by_length: bool = False
    """Put rows of similar length into one optimizer step: less padding. The order of steps is random."""


class Tokens(SpecModel):
    """As many rows of similar length as fit a token budget, padding included. `per_device_train_batch_size` is not
    used."""

    type: Literal["tokens"] = "tokens"
    tokens_per_batch: TokensPerBatch = 8192
    """Token budget of one forward pass: rows times the longest of them. An optimizer step has at most
    gradient_accumulation_steps times as many. A longer row is a batch by itself. If omitted, the budget is smaller for
    small files: enough for about 100 optimizer steps."""


class Packed(SpecModel):
    """Rows concatenated without padding; positions restart with each row, and no token attends to another row (Krell et
    al. 2021, arXiv:2107.02027). Logits and gradients equal those of unpacked rows; a model that cannot keep rows apart
    is rejected at the start. `per_device_train_batch_size` is not used."""

    type: Literal["packed"] = "packed"
    tokens_per_batch: TokensPerBatch = 8192
    """Token budget of one forward pass. An optimizer step has at most gradient_accumulation_steps times as many. A
    longer row is a batch by itself. If omitted, the budget is smaller for small files: enough for about 100 optimizer
    steps."""


Batching = Annotated[Rows | Tokens | Packed, Field(discriminator="type"), short_form(by_type)]

# --- the loop --------------------------------------------------------------------------------------


class Training(SpecModel):
    """The training loop: duration, batch sizes, precision and seed."""

    num_train_epochs: Annotated[float, Field(gt=0, le=10_000)] = 3.0
    """Passes over the training rows; a fraction ends within an epoch."""
    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps; overrides num_train_epochs."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rows per forward pass with `batching: rows`."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=4096)] = 1
    """Forward passes per optimizer step; the loss is normalised by the tokens of all of them."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 1024
    """Maximum tokens of a row. The run record counts longer rows."""
    truncation: Literal["refuse", "cut_left", "cut_right", "split"] = "cut_right"
    """Handling of rows longer than max_length: reject the job, cut the beginning or the end of the row, or split it
    into rows of max_length (each begins with the last token of the previous one, so that every token is trained on)."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """Maximum global gradient norm; null disables clipping."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = "auto"
    """Precision of matrix products; trained parameters stay in fp32. `auto`: bf16 if the hardware supports it,
    otherwise fp16 on a GPU and fp32 on a CPU. `fp16` uses a loss scale that starts at 1024: a step that overflows is
    skipped and halves it. `fp8`: like bf16, but dense linear layers multiply in 8-bit floats, if the GPU supports them
    and its node has torchao (`pip install torchao`); emulated on a CPU. The job's events and run record report a
    fallback and the results of the self-test."""
    attention: Literal["auto", "flash", "efficient", "math", "eager"] = "auto"
    """PyTorch's attention kernel. `auto` uses the fastest that passed the GPU's self-test. `flash` and `efficient` are
    preferred, with `math` for inputs that they do not support (flash: a padding mask). `eager` is transformers' own
    implementation."""
    tf32: bool = False
    """Compute fp32 products with 10 bits of mantissa if the hardware supports it (NVIDIA from Ampere on, gfx942):
    several times faster, with the accuracy of fp16 products."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of adapter weights, dropout and the order of rows."""
