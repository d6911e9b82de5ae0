"""The axes that do not change the result: memory, checkpoints, resources; and the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from core.spec.axes.evaluation.generation import (
    GeneratedMetricName,
    Generation,
    GreedyGeneration,
    NoGeneration,
    metric_names,
)
from core.spec.axes.stage import Better
from core.spec.base import SpecModel, by_type, short_form, yes_or_no


class NoStream(SpecModel):
    """All weights stay on the device."""

    type: Literal["none"] = "none"


class Slots(SpecModel):
    """Common fields of the streaming arms; not an arm."""

    type: str
    slots: Annotated[int, Field(ge=1, le=64)] = 2
    """Blocks on the device at once. With one, computation waits for every copy; with two, the next block is copied
    during computation; more help only if copy times vary."""
    pinned: bool = True
    """Page-lock the host memory from which a GPU copies, so that copies overlap with computation. Use `false` if the
    system refuses: slower. No effect on a CPU."""


class HostStream(Slots):
    """Frozen weights of the model's blocks stay in host memory, and each block is copied to the device just before it
    is computed, forward and backward: the device holds `slots` blocks at a time. Every block keeps only its input, as
    with `gradient_checkpointing`. Trained parameters stay on the device, and the result is bitwise the same."""

    type: Literal["host"] = "host"


class DiskStream(Slots):
    """The same from files below the data root, also for models larger than the box's memory."""

    type: Literal["disk"] = "disk"


class AutoStream(Slots):
    """The first that fits the free memory when the run starts: `none` if everything fits on the device, otherwise
    `host`, otherwise `disk`. The run record has the choice and its reason."""

    type: Literal["auto"] = "auto"


Stream = Annotated[NoStream | HostStream | DiskStream | AutoStream, Field(discriminator="type"), short_form(by_type)]


class NoOffload(SpecModel):
    """Optimizer state, weights and gradients stay on the device."""

    type: Literal["none"] = "none"


class HostOffload(SpecModel):
    """Optimizer state, float32 weights and gradients of all trained parameters are in host memory, and the update is
    computed there (docs/memory.md). With `method: full` the device holds 2 bytes of a block's weight instead of 16;
    with adapters little is saved. On a CPU the update is bitwise the same; on a GPU it differs by rounding."""

    type: Literal["host"] = "host"
    pinned: bool = True
    """Copy through page-locked host memory (64 MiB), so that copies overlap with computation. Use `false` if the system
    refuses: slower. No effect on a CPU."""


OffloadOptimizer = Annotated[NoOffload | HostOffload, Field(discriminator="type"), short_form(by_type)]


class ActivationsOnDevice(SpecModel):
    """Activations stay on the device."""

    type: Literal["none"] = "none"


class ActivationsOnHost(SpecModel):
    """The input that each checkpointed block keeps is in host memory between its forward and backward pass. It is
    copied out while blocks compute, and back before it is needed. The result is bitwise the same."""

    type: Literal["host"] = "host"
    pinned: bool = True
    """Page-lock the host memory used for copies, so that copies overlap with computation. Use `false` if the system
    refuses: slower. No effect on a CPU."""


ActivationOffloading = Annotated[
    ActivationsOnDevice | ActivationsOnHost, Field(discriminator="type"), short_form(by_type), yes_or_no("host", "none")
]


class Resident(SpecModel):
    """Gradients, optimizer state and trained parameters stay on the device unless offloaded, and frozen weights unless
    streamed."""

    type: Literal["resident"] = "resident"
    gradient_checkpointing: bool | Literal["selective"] | None = None
    """Keep only each block's input and recompute the block in the backward pass: less memory, more time. `selective`:
    also keep the results of large matrix products and of attention, and recompute only the rest. Default: `true` with
    `activation_offloading`, otherwise `false`."""
    activation_offloading: ActivationOffloading = ActivationsOnDevice()
    """Placement of the inputs that checkpointed blocks keep: `true` for host memory."""
    stream: Stream = NoStream()
    """Placement of frozen blocks that are not being computed (docs/memory.md)."""
    offload_optimizer: OffloadOptimizer = NoOffload()
    """Placement of the optimizer's state and the float32 weights."""


Memory = Annotated[Resident, short_form(by_type)]


CHECKPOINT = r"^(?:last|\d{1,9}|step-\d{8,}(?:-micro-\d{4,})?(?:-v\d+)?(?:@\d{1,6})?)$"


class ResumeFrom(SpecModel):
    """A checkpoint of another job, from which this one continues instead of from step 0 (docs/checkpoints.md)."""

    job: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]{1,100}$")]
    """A job of the project that has ended: its id, the beginning of its id, its name, or `last`; the resolved spec has
    the id."""
    checkpoint: Annotated[str, StringConstraints(pattern=CHECKPOINT)] | Annotated[int, Field(ge=0)] = "last"
    """Id as `eft checkpoints list` shows it, a number of steps, or `last`, the furthest; the resolved spec has the
    id."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Hash of the checkpoint's manifest. The resolved spec has it; another manifest is refused."""


class DiskCheckpoints(SpecModel):
    """Complete states on disk: trained weights, optimizer, schedule, RNG, data cursor. Resuming is bitwise exact."""

    type: Literal["disk"] = "disk"
    save_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Optimizer steps between checkpoints; one more is written at every stop request."""
    memory_steps: Annotated[int, Field(ge=1, le=1_000_000)] | Literal["auto"] | None = "auto"
    """Optimizer steps between snapshots in the box's memory, which outlive the trainer. `auto`: as many as cost at most
    2 % of the training time. Null: none."""
    keep_last: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of complete checkpoints kept while the job runs."""
    keep_best: Annotated[int, Field(ge=0, le=100)] = 0
    """Number of checkpoints kept beside them because their evaluation was best by `metric_for_best_model`. Needs
    evaluations at the steps of checkpoints."""
    keep_hourly: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of hours of which one checkpoint each, the newest, is kept beside them."""
    metric_bound: float | None = None
    """Worst value of `metric_for_best_model` with which a checkpoint counts: while the last evaluation is worse, none
    is written, except at a stop request. Default: none."""
    resume_from: ResumeFrom | None = None
    """A checkpoint of another job to continue from, also with other data or another learning rate. Default: none; the
    job begins at step 0."""

    @property
    def most_kept(self) -> int:
        """Checkpoints that are there at most, without the one that is being written."""
        return self.keep_last + self.keep_best + self.keep_hourly


Checkpoint = Annotated[DiskCheckpoints, short_form(by_type)]


Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=-]{0,62}$")]
ArchName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,16}$")]


class Requirements(SpecModel):
    """Properties that a slot must have. A job whose requirements no slot meets waits, and says so."""

    min_memory_gb: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """Memory of the GPU in GB (10^9 bytes; a card sold as 80 GB has 80)."""
    bf16: bool = False
    """Require bfloat16 instructions (docs/hardware.md lists the architectures)."""
    vendor: Literal["any", "amd", "nvidia"] = "any"
    """Vendor of the GPU."""
    arch: Annotated[list[ArchName], Field(max_length=16)] = Field(default=[])
    """Allowed architectures, e.g. `gfx942`, `sm_90`. Empty: any."""
    labels: Annotated[list[Label], Field(max_length=8)] = Field(default=[])
    """Labels that the node must have, all of them (EFT_NODE_LABELS on the node)."""


class SingleDevice(SpecModel):
    """Slots of one node: GPUs, or the CPU of a node without GPUs."""

    type: Literal["single"] = "single"
    accelerator: Literal["any", "gpu", "cpu"] = "any"
    """Kind of slot."""
    gpus: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one node, of the same vendor and architecture, each with one rank (on a node without GPUs: CPU slots).
    The job starts when all of them are free."""
    requirements: Requirements = Requirements()
    """Properties that each of the slots must have."""
    max_runtime_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Time limit of training over all attempts, in seconds; waiting and preparing the model do not count. Shortly
    before the limit (a tenth of it, at most EFT_STOP_GRACE_SECONDS) the trainer writes a checkpoint and exits, and the
    job fails with code `max_runtime`; a retry continues from that checkpoint with the same limit."""

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
    """No evaluation."""

    type: Literal["none"] = "none"


class NoSamples(SpecModel):
    """No generated samples."""

    type: Literal["none"] = "none"


class Generated(SpecModel):
    """Common fields of both kinds of samples; not an arm."""

    type: str
    rows: Annotated[int, Field(ge=0, le=64)] = 4
    """Held-out rows whose prompts are answered, spread evenly over the file. For a row without a prompt (raw text), its
    beginning is continued."""
    prompts: Annotated[list[Annotated[str, StringConstraints(min_length=1, max_length=8000)]], Field(max_length=32)] = (
        Field(default=[])
    )
    """Additional prompts, each a user message (plain text if the model has no chat template)."""
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum tokens of an answer."""


class Greedy(Generated):
    """At every evaluation the model answers a few prompts with its most likely tokens. The answers appear beside those
    of the untrained model in the job's samples, its model card and `samples.jsonl`."""

    type: Literal["greedy"] = "greedy"


class Sampling(Generated):
    """The same with randomly drawn tokens. Training is not affected: its random state is unchanged."""

    type: Literal["sampling"] = "sampling"
    temperature: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Divisor of the logits."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Probability mass of the tokens to draw from (Holtzman et al. 2019, arXiv:1904.09751)."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of the draws, the same at every evaluation."""


Samples = Annotated[NoSamples | Greedy | Sampling, Field(discriminator="type"), short_form(by_type)]


class NoEarlyStopping(SpecModel):
    """Training continues to its last step."""

    type: Literal["none"] = "none"


class Patience(SpecModel):
    """Training ends after a number of evaluations without improvement."""

    type: Literal["patience"] = "patience"
    patience: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Consecutive evaluations without an improvement of `metric_for_best_model`."""
    min_delta: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Minimum change that counts as an improvement."""


EarlyStopping = Annotated[NoEarlyStopping | Patience, Field(discriminator="type"), short_form(by_type)]
BestMetric = Literal[
    "eval_loss",
    "eval_perplexity",
    "eval_exact_match",
    "eval_rewards/accuracies",
    "eval_rewards/margins",
    "eval_accuracy",
    "eval_margin",
    "eval_f1",
    "eval_reward",
]


class HeldOut(SpecModel):
    """Held-out metrics of the stage. For `sft`: loss, perplexity and exact match (the share of completions that greedy
    decoding would write)."""

    type: Literal["held_out"] = "held_out"
    eval_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer steps between evaluations; null: only at the start and the end."""
    at_start: bool = True
    """Evaluate the untrained model too, for comparison."""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Maximum rows per forward pass while evaluating, and prompts answered at once. A pass never has more tokens than
    one of training, unless a single row has."""
    samples: Samples = NoSamples()
    """Answers generated at evaluations."""
    generation: Generation = NoGeneration()
    """Metrics of answers that the model generates for held-out rows."""
    metric_for_best_model: BestMetric | GeneratedMetricName = "eval_loss"
    """Metric that decides which evaluation is better, for the next two fields. Each stage has its own (docs/stages.md).
    Stages that learn from sampled answers measure `eval_reward`, which is their default; all others have `eval_loss`.
    Those of `generation` are `eval_generated/…`."""
    early_stopping: EarlyStopping = NoEarlyStopping()
    """Condition for ending before the last step."""
    load_best_model_at_end: bool = False
    """Export the weights of the best evaluation instead of those of the last step. They are kept beside the checkpoints
    while the job runs."""

    @model_validator(mode="after")
    def _compares(self) -> HeldOut:
        if self.eval_steps is None:
            for name in ("early_stopping", "load_best_model_at_end"):
                if getattr(self, name) not in (False, NoEarlyStopping()):
                    raise ValueError(f"`{name}` compares evaluations while training: set `eval_steps`")
        return self

    def metric_of(self, stage_metrics: Mapping[str, Better]) -> str:
        """`metric_for_best_model`, or the first metric of a stage that has no `eval_loss` where the job names none."""
        if "metric_for_best_model" in self.model_fields_set or self.metric_for_best_model in stage_metrics:
            return self.metric_for_best_model
        return next(iter(stage_metrics))

    def measured(self, stage_metrics: Mapping[str, Better]) -> dict[str, Better]:
        """Metrics of an evaluation, and which way is better. `stage_metrics`: those of the stage."""
        generation = self.generation
        generated = metric_names(generation.metrics) if isinstance(generation, GreedyGeneration) else []
        return {**stage_metrics, **dict.fromkeys(generated, "higher")}


Evaluation = Annotated[NoEvaluation | HeldOut, Field(discriminator="type"), short_form(by_type, otherwise="held_out")]
