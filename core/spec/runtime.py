"""The axes that do not change the result: memory, checkpoints, resources; and the evaluation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.base import SpecModel, by_type, short_form


class Resident(SpecModel):
    """Weights, gradients and optimizer state stay on the device."""

    type: Literal["resident"] = "resident"
    gradient_checkpointing: bool = False
    """Keep only each block's input and compute the block again in the backward pass: less memory, more time."""


Memory = Annotated[Resident, short_form(by_type)]


class DiskCheckpoints(SpecModel):
    """Complete states on disk: trained weights, optimizer, schedule, RNG, data cursor. Resuming is exact to the bit."""

    type: Literal["disk"] = "disk"
    save_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 50
    """Optimizer steps between checkpoints; one more is written whenever the job is asked to stop."""
    keep_last: Annotated[int, Field(ge=1, le=100)] = 2
    """Complete checkpoints kept while the job runs."""


Checkpoint = Annotated[DiskCheckpoints, short_form(by_type)]


class SingleDevice(SpecModel):
    """One slot of one node: a GPU, or the CPU of a node that has none."""

    type: Literal["single"] = "single"
    accelerator: Literal["any", "gpu", "cpu"] = "any"
    """Which kind of slot may run it."""
    max_runtime_seconds: Annotated[int, Field(ge=1, le=31_536_000)] | None = None
    """Seconds of training in all, over every attempt; waiting and preparing the model do not count. Shortly before they
    are over (a tenth of them, at most EFT_STOP_GRACE_SECONDS) the trainer writes a checkpoint and leaves, and the job
    ends as failed with code `max_runtime`; a retry goes on from that checkpoint, with as much time again."""


Resources = Annotated[SingleDevice, short_form(by_type)]


class NoEvaluation(SpecModel):
    """Nothing is held out."""

    type: Literal["none"] = "none"


class HeldOut(SpecModel):
    """Held-out loss, perplexity and exact match (the completion is what greedy decoding would write)."""

    type: Literal["held_out"] = "held_out"
    eval_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Optimizer steps between evaluations; null for the start and the end only."""
    at_start: bool = True
    """Evaluate the untrained model too, so that before and after can be compared."""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    """Rows of one forward pass while evaluating."""


Evaluation = Annotated[NoEvaluation | HeldOut, Field(discriminator="type"), short_form(by_type)]
