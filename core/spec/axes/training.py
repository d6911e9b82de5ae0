"""The axes that decide the numbers: stage, method, quantisation, optimizer, schedule, and the loop itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from core.spec.base import SpecModel, by_type, short_form

# --- stage -----------------------------------------------------------------------------------------


class SFT(SpecModel):
    """Supervised fine-tuning: cross-entropy on the tokens that the model is to learn to write."""

    type: Literal["sft"] = "sft"
    loss_on: Literal["completions", "last", "turns", "all"] | None = None
    """`completions`: the prompt's tokens carry no loss; every assistant turn of a chat does, unless its `weight` is 0.
    `last`: only the last assistant turn. `turns`: only those with `weight: 1`. `all`: every token. Default:
    `completions`, or `all` for raw text, which has no prompt."""


Stage = Annotated[SFT, short_form(by_type)]

# --- method ----------------------------------------------------------------------------------------

ModuleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.]{1,128}$")]


class Full(SpecModel):
    """Every parameter is trained."""

    type: Literal["full"] = "full"


class LowRank(SpecModel):
    """What LoRA and QLoRA share; no arm by itself."""

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
    """`all-linear` (every linear layer but the head), `attention` (its projections), or a list of module names."""
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) instead (arXiv:2312.03732)."""
    use_dora: bool = False
    """DoRA: a trained magnitude beside the low-rank direction (arXiv:2402.09353)."""


class LoRA(LowRank):
    """Low-rank adapters beside frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    type: Literal["lora"] = "lora"


class QLoRA(LowRank):
    """LoRA over a base that is packed into 4 bits (Dettmers et al. 2023, arXiv:2305.14314): `quantization` is `nf4`
    unless another packing is named."""

    type: Literal["qlora"] = "qlora"


class Auto(LowRank):
    """The first of these that fits the slot on which the job starts: `full`, `lora`, `lora` over int8, `qlora`, and
    `qlora` with streamed blocks. Settled once, at the job's first start, by the plan of its memory (docs/plans.md); it
    stays so whatever happens to the job afterwards, and the job says why each one before it was not taken. `full` has
    no use for the fields below."""

    type: Literal["auto"] = "auto"


Method = Annotated[Full | LoRA | QLoRA | Auto, Field(discriminator="type"), short_form(by_type)]
SettledMethod = Full | LoRA | QLoRA
"""What a run has."""

# --- quantisation ----------------------------------------------------------------------------------

ModuleNames = Annotated[list[ModuleName], Field(max_length=64)]


class NoQuantization(SpecModel):
    """The base model's weights are kept as its files have them: in the run's precision, or packed, if somebody else has
    packed them as NF4."""

    type: Literal["none"] = "none"


class NF4(SpecModel):
    """4 bits a weight, in blocks of 64, as bitsandbytes lays them out. Embeddings, output head and norms stay dense. A
    base whose files are NF4 already is taken as it is."""

    type: Literal["nf4"] = "nf4"
    double: bool = True
    """Quantise the blocks' scales too: 4.13 bits a weight in place of 4.5."""
    skip_modules: ModuleNames = Field(default=[])
    """Linear layers to leave dense: full names, or their last part."""


class Int8(SpecModel):
    """8 bits a weight: one scale (absmax) a block."""

    type: Literal["int8"] = "int8"
    block_size: Literal[32, 64, 128, 256] = 64
    """Weights that share a scale; 64 make it 8.5 bits a weight."""
    skip_modules: ModuleNames = Field(default=[])
    """As for `nf4`."""


Quantization = Annotated[NoQuantization | NF4 | Int8, Field(discriminator="type"), short_form(by_type)]

# --- optimizer -------------------------------------------------------------------------------------

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(SpecModel):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate. Default: 2e-4 with adapters, 2e-5 for full fine-tuning (with `method: auto`, of what that
    comes to)."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay; biases and norms are exempt."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)  # a list, as JSON has no tuples
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""


Optimizer = Annotated[AdamW, short_form(by_type)]

# --- schedule --------------------------------------------------------------------------------------


class Linear(SpecModel):
    """Warm-up, then a straight line to zero at the last step."""

    type: Literal["linear"] = "linear"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Share of all optimizer steps that the learning rate rises for, rounded up."""


class Cosine(SpecModel):
    """Warm-up, then half a cosine to zero at the last step (arXiv:1608.03983, without restarts)."""

    type: Literal["cosine"] = "cosine"
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """As for `linear`."""


Schedule = Annotated[Linear | Cosine, Field(discriminator="type"), short_form(by_type)]

# --- what is handed back ---------------------------------------------------------------------------


class Merged(SpecModel):
    """The whole model with the adapter added to its weights: loads without PEFT. What was written is loaded again with
    plain transformers, and its logits are compared with those of base and adapter; a model that differs is not handed
    back, and the job says so."""

    type: Literal["merged"] = "merged"
    merge_onto: Literal["trained", "original"] = "trained"
    """`trained`: the weights that the adapter was trained over (dequantised, where they are packed), so that the merged
    model is the one that was evaluated. `original`: the weights of the model's files before they were packed."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of the weights; `auto`: fp16 if the base model's files are in it, else bf16."""


Export = Annotated[Merged, short_form(by_type)]


def _once(exports: list[Export]) -> list[Export]:
    if len({item.type for item in exports}) < len(exports):
        raise ValueError("each format may stand here once")
    return exports


Exports = Annotated[list[Export], AfterValidator(_once), short_form(lambda value: [value], "merged")]

# --- batches ---------------------------------------------------------------------------------------

TokensPerBatch = Annotated[int, Field(ge=8, le=16_777_216)]


class Rows(SpecModel):
    """`training.per_device_train_batch_size` rows a forward pass, padded to the longest of them."""

    type: Literal["rows"] = "rows"
    group_by_length: bool = False
    """Rows of like length in one optimizer step: less padding. The steps themselves come in random order."""


class Tokens(SpecModel):
    """As many rows of like length as fit into a budget of tokens, padding counted. `per_device_train_batch_size` has no
    part in it."""

    type: Literal["tokens"] = "tokens"
    tokens_per_batch: TokensPerBatch = 8192
    """Of one forward pass: rows times the longest of them. An optimizer step has gradient_accumulation_steps times as
    many at most. A longer row is a batch by itself. Where a submitted job leaves it out and its files are small, it is
    less: so much that the run has about 100 optimizer steps."""


class Packed(SpecModel):
    """Rows end to end in one line without padding; positions start anew with each row, and no token sees another row
    (Krell et al. 2021, arXiv:2107.02027). The same logits and gradients as unpacked rows; the model is tried at the
    start, and one that cannot keep rows apart is refused. `per_device_train_batch_size` has no part in it."""

    type: Literal["packed"] = "packed"
    tokens_per_batch: TokensPerBatch = 8192
    """Of one forward pass. An optimizer step has gradient_accumulation_steps times as many at most. A longer row is a
    batch by itself. Where a submitted job leaves it out and its files are small, it is less: so much that the run has
    about 100 optimizer steps."""


Batching = Annotated[Rows | Tokens | Packed, Field(discriminator="type"), short_form(by_type)]

# --- the loop --------------------------------------------------------------------------------------


class Training(SpecModel):
    """The loop: how long, how much at once, from which seed."""

    num_train_epochs: Annotated[float, Field(gt=0, le=10_000)] = 3.0
    """Passes over the training rows; a fraction ends inside an epoch."""
    max_steps: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Optimizer steps; ends the run earlier or later than num_train_epochs would."""
    per_device_train_batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rows of one forward pass, with `batching: rows`."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=4096)] = 1
    """Forward passes of one optimizer step; the loss is normalised by the tokens of all of them."""
    max_length: Annotated[int, Field(ge=8, le=1_048_576)] = 1024
    """Tokens of a row. The run record counts the longer ones."""
    truncation: Literal["refuse", "cut_left", "cut_right", "split"] = "cut_right"
    """What becomes of a row longer than max_length: the job is refused, the row loses its beginning or its end, or it
    is split into rows of max_length (each begins with the last token of the one before, so that no token goes
    unlearned)."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """Clip the gradient's global norm; null for no clipping."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = "auto"
    """Of matrix products; what is trained is kept in fp32. `auto`: bf16 where the hardware has it, else fp16 on a GPU,
    else fp32. `fp16` runs under a loss scale that begins at 1024: a step that overflows changes nothing and halves it.
    `fp8`: as bf16, but dense linear layers multiply in 8-bit floats, where the card has them and its node has torchao
    (`pip install torchao`); on a CPU emulated, to see what it does to a model. A fallback, or what the self-test of a
    card rules out, is told in the job's events and its run record."""
    attention: Literal["auto", "flash", "efficient", "math", "eager"] = "auto"
    """Which of PyTorch's attention kernels: `auto` takes the fastest that passed the self-test of the card. `flash` and
    `efficient` are taken first, and `math` for what they cannot do (flash: a mask of padding); `eager` is
    transformers' own, in plain operations."""
    tf32: bool = False
    """Compute products of fp32 numbers with 10 bits of mantissa, on hardware that has it (NVIDIA from Ampere on,
    gfx942): several times faster, at the accuracy of fp16 products."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seeds adapter weights, dropout and the order of rows."""
