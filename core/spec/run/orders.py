"""Orders that a worker writes into a run folder for its child: train, prepare a model, preview a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from core.spec.axes.data import Columns, Format, GameRows, HashSplit, HubDataset, TaskRows
from core.spec.axes.export import Export
from core.spec.axes.model import Model
from core.spec.axes.rollout.reward import RewardModelSource
from core.spec.base import SpecModel
from core.spec.job import JobSpec
from core.spec.run.chain import ModelChain
from core.tools import ToolSet


class DataFiles(SpecModel):
    """One source with every path settled: its files are read one after another, as if they were one."""

    field: str = "data.train"
    """Where the job names it."""
    paths: list[str]
    format: Format = "auto"
    columns: Columns = Field(default={})
    weight: float | None = None
    origin: dict[str, Any] = Field(default_factory=dict)
    """Where the files came from, for the run record: a hub data set's id and commit."""


class DataOrder(SpecModel):
    """The rows of one side of a run (core/data/stream.py reads them)."""

    sources: list[DataFiles]
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """With weights only, as is `seed`."""
    seed: int = 0
    part: Literal["all", "train", "eval"] = "all"
    """Which side of `split` to read; `all` without one."""
    split: HashSplit | None = None

    @classmethod
    def of(cls, path: Path, format: Format = "auto") -> DataOrder:
        """One whole file."""
        return cls(sources=[DataFiles(paths=[str(path)], format=format)])


class MemoryLimit(SpecModel):
    """What a process may take of the box's memory, beyond what it has when it begins its work."""

    bytes: int
    setting: str
    """Name of the setting to raise, such as `EFT_PREPARE_BYTES`, for the error message."""


class ResumePoint(SpecModel):
    """The checkpoint of another job from which a run begins (`checkpoint.resume_from`)."""

    job: str
    """Id of that job."""
    folder: str
    """Folder of the checkpoint."""
    sha256: str
    """Hash of its manifest."""
    changed: list[str] = Field(default=[])
    """Dotted paths of the fields in which this job differs from that one."""

    @property
    def same_rows(self) -> bool:
        """Whether the steps of both jobs have the same rows in the same batches."""
        return not any(name.startswith(OF_ROWS) and name not in OF_LENGTH for name in self.changed)

    @property
    def same_evaluations(self) -> bool:
        """Whether figures of that job's evaluations can be compared with those of this one."""
        return not any(name.startswith(("data.eval", "data.split", "evaluation", "stage.")) for name in self.changed)


OF_ROWS = ("data", "batching", "training", "stage.", "resources.gpus")
"""Fields that decide which rows a step has, or what is learnt from them."""
OF_LENGTH = ("training.max_steps", "training.num_train_epochs", "training.max_grad_norm", "training.attention")


class RewardModelFolder(SpecModel):
    """A reward model, as it was prepared."""

    reward: str
    """Name of the reward."""
    model_dir: str
    """Folder of the model in Hugging Face format: with the head, or the base of the adapter."""
    adapter_dir: str | None = None
    """Folder of the adapter that has the head; null: `model_dir` has it."""
    tokenizer_dir: str | None = None
    """Folder of the tokenizer; null: `model_dir`."""
    source: dict[str, Any] = Field(default_factory=dict)
    """Where it came from, for the run record."""
    job: str | None = None
    """Id of the job that trained it; null: no job of eft did."""
    sha256: str | None = None
    """Hash of what that job handed back."""
    spec: JobSpec | None = None
    """The spec of that job: rendering of its rows, format of its weights."""


class RunOrder(SpecModel):
    """What a batch child is to do: `python -m core.train RUN_DIR`."""

    job_id: str
    attempt: int
    spec: JobSpec
    """Resolved: every default is written out."""
    model_dir: str
    """Local folder in Hugging Face format, prepared before."""
    model_source: dict[str, Any] = Field(default_factory=dict)
    """Where that folder came from (hub id, pinned commit, file hash): goes into the run record and the model card."""
    adapter_dir: str | None = None
    """Folder of the adapter that is trained further (`model.adapter: continue`); null: a new one is trained."""
    tokenizer_dir: str | None = None
    """Folder of the tokenizer; null: `model_dir`."""
    lineage: list[dict[str, Any]] = Field(default_factory=list)
    """What the model was made of, nearest job first, for the run record and the model card."""
    train: DataOrder
    eval: DataOrder | None = None
    resume_from: list[str] = Field(default_factory=list)
    """Folders of earlier attempts whose checkpoints may be gone on from, newest first."""
    memory_dir: str | None = None
    """Folder in the box's memory for snapshots and for checkpoints on their way to the disk; null: a step waits until
    its checkpoint is on the disk."""
    resume_point: ResumePoint | None = None
    """Where the run begins as long as none of them has a checkpoint; null: at step 0."""
    cache_dir: str | None = None
    """Folder for what can be made again (packed weights, tokenised rows), shared by all runs of this data root; null:
    nothing is kept."""
    fence_seconds: float | None = None
    """End when stdin is silent this long; null when run by hand, without a worker."""
    selftest: dict[str, Any] | None = None
    """What the device's self-test found (core/hardware/selftest.py); null: it was not tried."""
    settled: dict[str, Any] | None = None
    """What `method: auto` came to, and why, with `words` for the job's events (core/jobs/admission/auto_method.py);
    `spec` has it."""
    memory_bytes: int | None = None
    """What the run may count on where device and host are one memory; null: what is free."""
    memory_limit: MemoryLimit | None = None
    """Beyond which allocations fail; null: no limit."""
    helper_limit: MemoryLimit | None = None
    """The same of each process beside it that makes tokens of rows."""
    lm_eval_tasks: str | None = None
    """Folder of tasks for lm-eval, beside those of its package."""
    reward_allow: list[str] = Field(default=[])
    """Hosts and networks that the reward `http` may ask although they are not public."""
    reward_tokens: str | None = None
    """File of tokens for endpoints of the reward `http`."""
    reward_models: list[RewardModelFolder] = Field(default=[])
    """Reward models that score answers, one for each reward of `type: model`."""
    trial_prompts: int | None = None
    """Prompts that the untrained model answers to try the rewards, in place of a training; null: it trains."""
    world_size: int = Field(default=1, ge=1)
    """Ranks, one a GPU (or CPU slot) of the claim. With several the child only starts them (core/train/ranks)."""
    held_at: float | None = None
    """When the worker last knew that it holds the lease, in seconds of this node's CLOCK_BOOTTIME: the silence that
    `fence_seconds` bounds is counted from there, since a worker may sleep between its claim and the child's start."""


class SessionOrder(RunOrder):
    """What the child of a session is to do: `python -m core.train.session RUN_DIR FD`. FD is its end of a socket pair
    (core/spec/run/frames.py). A session brings no rows: `train` is empty."""

    train: DataOrder = DataOrder(sources=[])
    session_dir: str
    """Folder of the session, the same for all attempts: snapshots, and what `save` writes."""
    pass_tokens: int = Field(default=16_384, ge=1)
    """Tokens that go through the model at once, padding counted; a longer row goes alone."""
    slots: int = Field(default=64, ge=1)
    """Answers that are generated at once."""


class ServingOrder(RunOrder):
    """What the serving child is to do: `python -m core.train.serving RUN_DIR FD`. Requests come over FD, its end of a
    socket pair (core/spec/run/frames.py). It brings no rows: `train` is empty."""

    train: DataOrder = DataOrder(sources=[])
    slots: int = Field(default=16, ge=1)
    """Answers that are computed at once."""
    adapters: int = Field(default=16, ge=1)
    """Adapters that are kept on the base at once."""


class DatasetOrder(SpecModel):
    """A data set of a hub, or rows that a library makes, and where the job names it."""

    field: str
    source: Annotated[HubDataset | TaskRows | GameRows, Field(discriminator="type")]


class RewardModelOrder(SpecModel):
    """A reward model to be brought, and where the job names it."""

    reward: str
    field: str
    model: RewardModelSource
    chain: ModelChain | None = None
    """What the model of a job is made of."""


class PrepareOrder(SpecModel):
    """Bring a model onto this data root: `python -m core.train.entry.prepare RUN_DIR`. Needs no GPU."""

    job_id: str
    attempt: int
    model: Model
    chain: ModelChain | None = None
    """What a model of `type: job` is made of."""
    runs_dir: str | None = None
    """Folder of the runs that the chain names."""
    models_dir: str
    """The shared cache; a model is complete there or not there at all."""
    model_roots: list[str] = Field(default_factory=list)
    """Roots below which `local` folders and `gguf` files may lie."""
    offline: bool = False
    datasets: list[DatasetOrder] = Field(default_factory=list)
    reward_models: list[RewardModelOrder] = Field(default_factory=list)
    weights: bool = True
    """False: tokenizer and configuration are enough, for a preview."""
    exports: list[Export] = Field(default=[])
    """Formats of the job: the libraries that write them are installed below `cache_dir`."""
    tools: list[ToolSet] = Field(default=[])
    """Libraries beside those of the formats that are installed below `cache_dir`: of trackers and rewards."""
    cache_dir: str | None = None
    lm_eval_tasks: str | None = None
    """See RunOrder."""
    memory_limit: MemoryLimit | None = None
    """Beyond which allocations fail; null: no limit."""
    fence_seconds: float | None = None
    held_at: float | None = None
