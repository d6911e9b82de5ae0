"""What the API says of a plan."""

from __future__ import annotations

from typing import Any

from core.base.attribute_docs import AttributeDocsModel

EXAMPLE: dict[str, Any] = {
    "parameters": 134515008,
    "model_from": "the model as it was prepared here last",
    "longest_row": 512,
    "longest_row_from": "preview",
    "batch": {
        "micro_batch": 8,
        "field": "training.per_device_train_batch_size",
        "gradient_accumulation_steps": 1,
        "ranks": 1,
        "per_step": 8,
        "steps": 33,
        "steps_from": "the rows that a preview has counted",
    },
    "places": [
        {
            "slots": ["box-1/0", "box-1/1"],
            "kind": "gpu",
            "vendor": "amd",
            "arch": "gfx1100",
            "memory_bytes": 25753026560,
            "host_memory_bytes": 134991806464,
            "fits": True,
            "lacks": [],
            "would_fit": [],
            "method": {
                "type": "lora",
                "quantization": "none",
                "stream": "none",
                "gradient_checkpointing": False,
                "rung": None,
                "reason": "takes 2.61 GB of 25.2 GB",
                "rejected": [],
            },
            "adjusted": None,
            "notice": None,
            "precision": "bf16",
            "peak_bytes": 2612424704,
            "moment": "backward begins",
            "bytes": [{"kind": "weights", "bytes": 269030016, "why": "of the base model; quantization none"}],
            "host_bytes": 1879643136,
            "host": [{"kind": "process", "bytes": 1610612736, "why": "Python, torch, transformers"}],
            "stream_from": "none",
            "disk": {
                "bytes": [{"kind": "checkpoints", "bytes": 468713472, "why": "2 are kept while the next is written"}],
                "total_bytes": 507772928,
            },
            "trained_parameters": 9764864,
            "largest_pass": {"rows": 8, "tokens": 4096, "field": "training.per_device_train_batch_size"},
            "time": {
                "seconds": 11.4,
                "tokens": 244020,
                "tokens_per_second": 21405.3,
                "runs": 1,
                "reason": "the tokens that a preview has counted, at the pace of 1 finished run like it; "
                "training alone, without loading and evaluations",
            },
        }
    ],
    "fits": True,
    "reason": None,
    "disk": {
        "bytes": [{"kind": "checkpoints", "bytes": 468713472, "why": "2 are kept while the next is written"}],
        "total_bytes": 507772928,
        "free": 812345678901,
    },
    "notices": [],
}


class PlanItem(AttributeDocsModel):
    """A kind of bytes."""

    kind: str
    """weights, adapter, gradients, optimizer, activations, logits, slots, scratch, slack, …"""
    bytes: int
    why: str


class PlanDisk(AttributeDocsModel):
    """Below the data root."""

    bytes: list[PlanItem]
    """Checkpoints, caches, what the job hands back, exports."""
    total_bytes: int
    free: int | None = None
    """Free bytes of the data root; null: it is an object store."""


class PlanMethod(AttributeDocsModel):
    """What the job is on such a slot."""

    type: str
    quantization: str
    stream: str
    gradient_checkpointing: bool | str | None
    rung: str | None
    """What `method: auto` comes to; null where the method is named."""
    reason: str
    rejected: list[dict[str, str]]
    """The candidates of `method: auto` before this one (`rung`), each with why it was not taken (`reason`)."""


class PlanTime(AttributeDocsModel):
    """Time of training alone."""

    seconds: float | None
    """null: there is nothing to derive it from; `reason` says what is missing."""
    tokens: int | None
    tokens_per_second: float | None
    runs: int
    """Finished jobs of the project that this pace is the median of."""
    reason: str


class PlanPass(AttributeDocsModel):
    """The largest forward pass."""

    rows: int
    tokens: int
    """Padding counted."""
    field: str
    """Where the job says how large it is."""


class PlanPlace(AttributeDocsModel):
    """Slots that are alike."""

    slots: list[str]
    """Empty: no slot is registered here, and this is a GPU of which nothing is known."""
    kind: str
    vendor: str | None
    arch: str | None
    memory_bytes: int | None
    """Memory of the GPU, or what a job on such a CPU slot may count on; null: unknown."""
    host_memory_bytes: int | None
    fits: bool
    """It would be claimed there: all that it asks for is there, and by the plan its smallest form fits."""
    lacks: list[str]
    """What the slot does not have of what the job needs."""
    would_fit: list[str]
    """Where it is memory that it lacks: changes of the job with which it would fit, each by itself."""
    method: PlanMethod
    adjusted: dict[str, int] | None
    """A smaller micro-batch with more accumulation, where the one asked for does not fit."""
    notice: str | None
    precision: str
    peak_bytes: int
    """On the device, at its most; on a CPU with all that is kept aside in the same memory."""
    moment: str
    """When that is: `reference`, `loss`, `backward begins`, `backward ends`, `step`, `evaluation`, `rollout` or
    `rewards`."""
    bytes: list[PlanItem]
    """On the device at that moment."""
    host_bytes: int
    host: list[PlanItem]
    """In the host's memory beside it."""
    stream_from: str
    """Where the blocks lie: `none` (on the device), `host` or `disk`."""
    disk: PlanDisk
    trained_parameters: int
    largest_pass: PlanPass
    time: PlanTime


class PlanBatch(AttributeDocsModel):
    """What goes through the model at once, as the job asks for it."""

    micro_batch: int
    """Rows or tokens of a forward pass, as `field` counts them."""
    field: str
    gradient_accumulation_steps: int
    ranks: int
    per_step: int
    """Rows or tokens of an optimizer step."""
    steps: int | None
    steps_from: str
    """Where that is from, or why it is null."""


class PlanView(AttributeDocsModel):
    """The memory plan of a job (docs/plans.md): an estimate."""

    parameters: int
    model_from: str
    """Where the model's shape is from."""
    longest_row: int
    """Tokens."""
    longest_row_from: str
    """`preview`: a preview of the file has counted them; `max_length`: the bound that the job sets."""
    batch: PlanBatch
    places: list[PlanPlace]
    """For each kind of slot of this installation, silent nodes too."""
    fits: bool
    """False: submitting it would be refused (`fits_nowhere`)."""
    reason: str | None
    """Why it fits nowhere, and what would fit."""
    disk: PlanDisk
    notices: list[dict[str, Any]]
    """Notices about its uploaded files: columns that are not trained on, fields that need a place in the chat template.
    Each has code, message and field."""
