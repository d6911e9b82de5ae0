"""Types of the events that a child writes, and classes of failures."""

from __future__ import annotations

from typing import Literal

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
    "resumed",  # {"step", "micro_step", "path", "drift": what differs from where it was, "result": what that means}
    "notice",  # {"code", "message"}: a fallback or a limit the user should know of
    "run_record",  # {"record": {versions, device, dtype, threads, model revision, data hashes, …}}
    "alive",  # {}: a sign of life from work that has nothing else to tell; silence is taken for a hang
    "result",  # last on success: {"result": {…}, "artifacts": [{"path" below artifacts/, "bytes", "sha256", "kind"}]}
    "error",  # last on failure: {"failure": FailureClass, "code", "message", "field": str | null}; with code
    # no_space also {"needs_bytes"} where it is known: what must be free before trying again makes sense
]

FailureClass = Literal["user", "memory", "machine", "internal"]
"""Cause of a failure: bad data or spec; out of memory; the box (may be retried); a defect of eft."""
