"""The training loop: how long, how much at once, at which precision, from which seed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.base import SpecModel


class Training(SpecModel):
    """The training loop: duration, batch sizes, precision and seed."""

    num_train_epochs: Annotated[float, Field(gt=0, le=10_000)] = 3.0
    """Passes over the training rows; a fraction ends within an epoch. `cpt`, `reward` and `process_reward` have a
    default of 1."""
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
    into rows of max_length (each begins with the last token of the previous one, so that every token is trained on).
    `stage: cpt` has a default of `split`."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | None = 1.0
    """Maximum global gradient norm; null disables clipping."""
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = "auto"
    """Precision of matrix products; trained parameters stay in fp32. `auto`: bf16 if the hardware supports it,
    otherwise fp16 on a GPU and fp32 on a CPU. `fp16` uses a loss scale that starts at 1024: a step that overflows is
    skipped and halves it. `fp8`: like bf16, but dense linear layers multiply in 8-bit floats, if the GPU supports them
    and its node has torchao (`pip install torchao`); emulated on a CPU. The job's events and run record report a
    fallback and the results of the self-test."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "eager"] = "auto"
    """PyTorch's attention kernel. `auto` uses the fastest that passed the GPU's self-test. `flash` and `efficient` are
    preferred, with `math` for inputs that they do not support (flash: a padding mask). `cudnn` adds cuDNN's kernels on
    NVIDIA GPUs; two runs with them may differ in the last bits. `eager` is transformers' own implementation. With
    `auto` and `flash`, packed rows are computed by an attention library of the node, if its self-test passed."""
    tf32: bool = False
    """Compute fp32 products with 10 bits of mantissa if the hardware supports it (NVIDIA from Ampere on, gfx942):
    several times faster, with the accuracy of fp16 products."""
    compile: bool = False
    """Compile the model's blocks with torch.compile before the first step (docs/performance.md): fewer and larger
    kernels, for a longer start. A block that cannot be compiled is computed as it is, and a notice says so."""
    neftune_noise_alpha: Annotated[float, Field(gt=0, le=1000)] | None = None
    """NEFTune: uniform noise on the embeddings while training, of the size alpha / sqrt(tokens x width) of the padded
    batch (arXiv:2310.05914 uses 5 to 15). Default: none."""
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=100)] | None = None
    """Weight of the load-balancing loss of a mixture-of-experts model, in every stage. Default: the coefficient in the
    model's configuration; 0: none."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of adapter weights, dropout and the order of rows."""
