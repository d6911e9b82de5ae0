"""The axes that do not change the result: memory, checkpoints, resources; and the evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from core.spec.base import SpecModel, by_type, short_form, yes_or_no


class NoStream(SpecModel):
    """All weights stay on the device."""

    type: Literal["none"] = "none"


class Slots(SpecModel):
    """What the arms that stream share; no arm by itself."""

    type: str
    slots: Annotated[int, Field(ge=1, le=64)] = 2
    """Blocks that are on the device at once. One waits for every copy; two copy the next block while one computes;
    more only help where copies come unevenly."""
    pinned: bool = True
    """Lock host memory that a GPU copies from, so that it copies while it computes. `false` where the system refuses
    it: slower. Makes no difference on a CPU."""


class HostStream(Slots):
    """Frozen weights of the model's blocks lie in host memory, and each block is copied to the device just before it is
    computed, forwards and backwards: the device holds `slots` blocks at a time. Every block keeps its input alone, as
    with `gradient_checkpointing`. What is trained stays on the device, and the result is the same to the bit."""

    type: Literal["host"] = "host"


class DiskStream(Slots):
    """The same from files below the data root, for models larger than the box's memory, too."""

    type: Literal["disk"] = "disk"


class AutoStream(Slots):
    """Settled when the run starts, by what is free then: `none` if all fits on the device, else `host`, else `disk`.
    The run record says which, and why."""

    type: Literal["auto"] = "auto"


Stream = Annotated[NoStream | HostStream | DiskStream | AutoStream, Field(discriminator="type"), short_form(by_type)]


class NoOffload(SpecModel):
    """They stay on the device."""

    type: Literal["none"] = "none"


class HostOffload(SpecModel):
    """The optimizer's state, float32 weights and gradients of all that is trained are in host memory, and the update is
    computed there (docs/memory.md). With `method: full` the device holds 2 bytes of a block's weight in place of 16;
    with adapters little is saved. Equal to the bit to the update on a CPU; on a GPU to the last bits."""

    type: Literal["host"] = "host"
    pinned: bool = True
    """Copy through host memory that is locked (64 MiB), so that a GPU copies while it computes. `false` where the
    system refuses it: slower. Makes no difference on a CPU."""


OffloadOptimizer = Annotated[NoOffload | HostOffload, Field(discriminator="type"), short_form(by_type)]


class ActivationsOnDevice(SpecModel):
    """What the backward needs of the forward stays on the device."""

    type: Literal["none"] = "none"


class ActivationsOnHost(SpecModel):
    """The input that each checkpointed block keeps lies in host memory between its forward and its backward: copied out
    while blocks compute, and brought back before it is asked for. The result is the same to the bit."""

    type: Literal["host"] = "host"
    pinned: bool = True
    """Lock the host memory that a GPU copies to and from, so that it copies while it computes. `false` where the
    system refuses it: slower. Makes no difference on a CPU."""


ActivationOffloading = Annotated[
    ActivationsOnDevice | ActivationsOnHost, Field(discriminator="type"), short_form(by_type), yes_or_no("host", "none")
]


class Resident(SpecModel):
    """Gradients, optimizer state and all that is trained stay on the device, unless they are offloaded; frozen weights,
    too, unless they are streamed."""

    type: Literal["resident"] = "resident"
    gradient_checkpointing: bool | Literal["selective"] | None = None
    """Keep only each block's input and compute the block again in the backward pass: less memory, more time.
    `selective`: keep the results of its large matrix products and of attention too, and compute only the rest again.
    Default: `true` with `activation_offloading`, else `false`."""
    activation_offloading: ActivationOffloading = ActivationsOnDevice()
    """Where the inputs that checkpointed blocks keep are meanwhile: `true` for host memory."""
    stream: Stream = NoStream()
    """Where the frozen weights of the model's blocks are while others compute (docs/memory.md)."""
    offload_optimizer: OffloadOptimizer = NoOffload()
    """Where the optimizer's state is, and what it updates."""


Memory = Annotated[Resident, short_form(by_type)]


class DiskCheckpoints(SpecModel):
    """Complete states on disk: trained weights, optimizer, schedule, RNG, data cursor. Resuming is exact to the bit."""

    type: Literal["disk"] = "disk"
    save_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Optimizer steps between checkpoints; one more is written whenever the job is asked to stop."""
    keep_last: Annotated[int, Field(ge=1, le=100)] = 2
    """Complete checkpoints kept while the job runs."""


Checkpoint = Annotated[DiskCheckpoints, short_form(by_type)]


Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,62}$")]
ArchName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,16}$")]


class Requirements(SpecModel):
    """What the slot must have. A job that asks for what no slot here has waits, and says so."""

    min_memory_gb: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Memory of the GPU in GB (10^9 bytes, so that a card sold as 80 GB has 80)."""
    bf16: bool = False
    """Instructions for bfloat16 (docs/hardware.md says which architectures have them)."""
    vendor: Literal["any", "amd", "nvidia"] = "any"
    """Who made the GPU."""
    arch: Annotated[list[ArchName], Field(max_length=16)] = Field(default=[])
    """One of these architectures, e.g. `gfx942`, `sm_90`. Empty: any."""
    labels: Annotated[list[Label], Field(max_length=8)] = Field(default=[])
    """Labels that the node must have, all of them (EFT_NODE_LABELS on the node)."""


class SingleDevice(SpecModel):
    """Slots of one node: GPUs, or the CPU of a node that has none."""

    type: Literal["single"] = "single"
    accelerator: Literal["any", "gpu", "cpu"] = "any"
    """Which kind of slot may run it."""
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one node, alike in vendor and architecture, each with a rank of the training (on a node without GPUs: CPU
    slots). The job starts when all of them are free."""
    requirements: Requirements = Requirements()
    """What each of those slots must have."""
    max_runtime_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Seconds of training in all, over every attempt; waiting and preparing the model do not count. Shortly before they
    are over (a tenth of them, at most EFT_STOP_GRACE_SECONDS) the trainer writes a checkpoint and leaves, and the job
    ends as failed with code `max_runtime`; a retry goes on from that checkpoint, with as much time again."""

    @model_validator(mode="after")
    def _one_slot(self) -> SingleDevice:
        asks = self.requirements
        gpu_only = asks.min_memory_gb is not None or asks.vendor != "any" or bool(asks.arch)
        if self.accelerator == "cpu" and gpu_only:
            raise ValueError(
                "`requirements` ask for a GPU and `accelerator` for the CPU: leave `min_memory_gb`, `vendor` and "
                "`arch` out, or set `accelerator: gpu`"
            )
        return self


Resources = Annotated[SingleDevice, short_form(by_type)]


class NoEvaluation(SpecModel):
    """Nothing is held out."""

    type: Literal["none"] = "none"


class NoSamples(SpecModel):
    """Nothing is generated."""

    type: Literal["none"] = "none"


class Generated(SpecModel):
    """What both kinds of samples share; no arm by itself."""

    type: str
    rows: Annotated[int, Field(ge=0, le=64)] = 4
    """Held-out rows whose prompts are answered, spread evenly over the file. Of a row that has no prompt (raw text) the
    beginning is gone on with."""
    prompts: Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=8000)]], Field(max_length=32)] = (
        Field(default=[])
    )
    """More prompts, each a user's message (plain text, if the model has no chat template)."""
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    """Tokens of an answer that does not end by itself before."""


class Greedy(Generated):
    """At every evaluation the model answers a few prompts with its most likely tokens, so that its answers can be read
    beside those of the untrained model: in the job's samples, its model card and `samples.jsonl`."""

    type: Literal["greedy"] = "greedy"


class Sampling(Generated):
    """The same with tokens drawn at random. Training does not notice: its random numbers stay as they were."""

    type: Literal["sampling"] = "sampling"
    temperature: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Divides the logits."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Only the most likely tokens that together are so probable (Holtzman et al. 2019, arXiv:1904.09751)."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """The same at every evaluation."""


Samples = Annotated[NoSamples | Greedy | Sampling, Field(discriminator="type"), short_form(by_type)]


class NoEarlyStopping(SpecModel):
    """Training goes on to its last step."""

    type: Literal["none"] = "none"


class Patience(SpecModel):
    """Training ends when so many evaluations in a row were no better."""

    type: Literal["patience"] = "patience"
    patience: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Evaluations in a row without an improvement of `metric_for_best_model`."""
    min_delta: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """What an improvement is more than."""


EarlyStopping = Annotated[NoEarlyStopping | Patience, Field(discriminator="type"), short_form(by_type)]
BestMetric = Literal["eval_loss", "eval_perplexity", "eval_exact_match"]


class HeldOut(SpecModel):
    """Held-out loss, perplexity and exact match (the completion is what greedy decoding would write)."""

    type: Literal["held_out"] = "held_out"
    eval_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer steps between evaluations; null for the start and the end only."""
    at_start: bool = True
    """Evaluate the untrained model too, so that before and after can be compared."""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Most rows of one forward pass while evaluating, and prompts that are answered at once. A pass never has more
    tokens than one of training, unless a single row has."""
    samples: Samples = NoSamples()
    """Answers to read beside the figures."""
    metric_for_best_model: BestMetric = "eval_loss"
    """What makes one evaluation better than another, for the next two."""
    early_stopping: EarlyStopping = NoEarlyStopping()
    """When to end before the last step."""
    load_best_model_at_end: bool = False
    """Hand back the weights of the best evaluation instead of those of the last step. They are kept on disk beside the
    checkpoints while the job runs."""

    @model_validator(mode="after")
    def _compares(self) -> HeldOut:
        if self.eval_steps is None:
            for name in ("early_stopping", "load_best_model_at_end"):
                if getattr(self, name) not in (False, NoEarlyStopping()):
                    raise ValueError(f"`{name}` compares evaluations while training: set `eval_steps`")
        return self


Evaluation = Annotated[NoEvaluation | HeldOut, Field(discriminator="type"), short_form(by_type, otherwise="held_out")]
