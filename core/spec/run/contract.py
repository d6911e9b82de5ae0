"""The contract between a worker and its child: what lies in a run folder, what the child writes, how it ends.

    attempt-N/            0700, one folder an attempt
      run.json            in: a RunOrder (or a PrepareOrder for `python -m core.train.entry.prepare`)
      events.jsonl        out: one JSON object a line, appended and flushed at once: {"seq", "time", "type", …}
      log.txt             out: the child's stdout and stderr
      checkpoints/        out: step-00000050/ …, each complete or not there (core/spec/run/checkpoint_names.py)
      artifacts/          out: what the job hands back, listed in the result event

Heartbeat: the worker holds the child's stdin and writes a line with every renewed lease: when it began to renew it
(`heartbeat`). End of file, or a newest line older than `fence_seconds`, means that nobody owns this attempt any more:
the child ends itself at once (EXIT_FENCED). When the line is read does not matter: a process that was stopped finds
old ones in its pipe.
SIGTERM means: finish the micro-step, write a checkpoint, leave with EXIT_CHECKPOINTED.
SIGUSR1 means: write the stacks of all threads into log.txt; the worker asks for them before it ends a hung child.

Of a run over several ranks the child is their launcher (core/train/ranks/launch.py), and all of this holds for it: the
ranks are in its session, it passes heartbeats and signals on, and it ends as the first of them did that did not end
well. Each rank counts the silence by itself, so that none outlives the lease when its launcher stands still. Rank 0
alone writes into the run folder, but for its own part of a checkpoint that every rank has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from core.spec.axes.data import Columns, Format, HashSplit, HubDataset
from core.spec.axes.model import Model
from core.spec.base import SpecModel
from core.spec.job import JobSpec

EXIT_OK = 0
EXIT_FAILED = 1
"""After an error event."""
EXIT_DATA_ROOT_LOST = 73
"""The run's folder is gone with what held it, so that no event can say so. Tried again, perhaps on another box."""
EXIT_NO_SPACE = 74
"""A disk is full: there may be no error event, since that could not be written either. Goes on when there is room."""
EXIT_CHECKPOINTED = 75
"""Left on request; everything needed to go on is in the newest checkpoint (or nothing was done yet)."""
EXIT_FENCED = 76
"""The worker is gone or has lost the lease; nothing more was written."""

ORDER_FILE = "run.json"
EVENTS_FILE = "events.jsonl"
LOG_FILE = "log.txt"
CHECKPOINTS = "checkpoints"
UNFINISHED = "tmp-"
"""Begins the name of a checkpoint that is being written. Its writer being dead, it is rubbish."""
RANKS = "ranks-"
"""Begins the name of the private folder in which several ranks find each other (core/train/ranks). As above."""
ARTIFACTS = "artifacts"


def heartbeat(held_at: float) -> bytes:
    """The line that says: the lease was held at `held_at`, in seconds of this node's CLOCK_BOOTTIME."""
    return b"%d\n" % int(held_at * 1000)


SPARE_READY = b"ready\n"
SPARE_PADDING = 1024
"""Bytes, so the longest RUN_DIR a spare takes."""

EventType = Literal[
    # {"phase": "downloading" | "converting" | "waiting" | "loading" | "quantizing" | "evaluating" | "training" | …}
    "phase",
    "progress",  # {"step", "total_steps", "epoch", "seconds_left": float | null} or {"bytes", "total_bytes"}
    # or {"rows", "total_rows": int | null} while rows become tokens
    "metrics",  # {"step", "values": {"loss", "learning_rate", "grad_norm", "tokens_per_second", …: float}}
    "evaluation",  # {"step", "values": {"eval_loss", "eval_perplexity", "eval_exact_match": float}}
    "samples",  # {"step", "samples": [{"row": int | null, "prompt", "reference": str | null, "completion",
    # "new_tokens", "finished"}]}: what the model answered after that step (0: before training)
    "checkpoint",  # {"step", "path": "checkpoints/step-00000050"}
    "resumed",  # {"step", "path"}
    "notice",  # {"code", "message"}: a fallback or a limit the user should know of
    "run_record",  # {"record": {versions, device, dtype, threads, model revision, data hashes, …}}
    "alive",  # {}: a sign of life from work that has nothing else to tell; silence is taken for a hang
    "result",  # last on success: {"result": {…}, "artifacts": [{"path" below artifacts/, "bytes", "sha256", "kind"}]}
    "error",  # last on failure: {"failure": FailureClass, "code", "message", "field": str | null}; with code
    # no_space also {"needs_bytes"} where it is known: what must be free before trying again makes sense
]

FailureClass = Literal["user", "memory", "machine", "internal"]
"""Whose fault it was: bad data or spec; out of memory; the box (may be tried again); a defect of ours."""


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
    """Whose message it is to name, `EFT_PREPARE_BYTES`, say."""


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
    train: DataOrder
    eval: DataOrder | None = None
    resume_from: list[str] = Field(default_factory=list)
    """Folders of earlier attempts whose checkpoints may be gone on from, newest first."""
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
    world_size: int = Field(default=1, ge=1)
    """Ranks, one a GPU (or CPU slot) of the claim. With several the child only starts them (core/train/ranks)."""
    held_at: float | None = None
    """When the worker last knew that it holds the lease, in seconds of this node's CLOCK_BOOTTIME: the silence that
    `fence_seconds` bounds is counted from there, since a worker may sleep between its claim and the child's start."""


class DatasetOrder(SpecModel):
    """A hub data set, and where the job names it."""

    field: str
    source: HubDataset


class PrepareOrder(SpecModel):
    """Bring a model onto this data root: `python -m core.train.entry.prepare RUN_DIR`. Needs no GPU."""

    job_id: str
    attempt: int
    model: Model
    models_dir: str
    """The shared cache; a model is complete there or not there at all."""
    model_roots: list[str] = Field(default_factory=list)
    """Roots below which `local` folders and `gguf` files may lie."""
    offline: bool = False
    datasets: list[DatasetOrder] = Field(default_factory=list)
    weights: bool = True
    """False: tokenizer and configuration are enough, for a preview."""
    memory_limit: MemoryLimit | None = None
    """Beyond which allocations fail; null: no limit."""
    fence_seconds: float | None = None
    held_at: float | None = None


class SpareOrder(SpecModel):
    """What makes a spare the child of a run: one line on its stdin."""

    run_dir: str
    environment: dict[str, str | None] = Field(default_factory=dict)
    """Changes against the environment it was started with (null: remove): the variables that hide GPUs, no others."""
