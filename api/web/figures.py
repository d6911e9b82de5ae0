"""Metrics as columns of the list of jobs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from api.deps import AppState
from api.web.words import Figures
from core.jobs.base.states import FINAL, Status
from core.jobs.views import queries

METRICS = (
    "loss", "eval_loss", "eval_exact_match", "eval_perplexity", "grad_norm", "tokens_per_second", "memory_bytes",
    "gpu_busy_percent", "reward", "kl", "entropy", "rewards/accuracies", "rewards/margins",
)  # fmt: skip
"""Names that the list offers; any other may be given."""
KEPT = 50_000

_kept: OrderedDict[tuple[str, str | None, str], Figures | None] = OrderedDict()
"""Figures of jobs that are over, by job, its end and the metric: their curves do not change any more."""
_lock = threading.Lock()


def curve_figures(app: AppState, jobs: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Figures]:
    """Figures by job, for those of these jobs that have the metric."""
    keys = {job["id"]: (job["id"], job["finished_at"], metric) for job in jobs if Status(job["status"]) in FINAL}
    found: dict[str, Figures | None] = {}
    with _lock:
        for job_id, key in keys.items():
            if key in _kept:
                found[job_id] = _kept[key]
                _kept.move_to_end(key)
    unknown = [job["id"] for job in jobs if job["id"] not in found]
    if unknown:
        with app.database.read() as session:
            told = queries.metric_figures(session, unknown, metric)
        found |= {job_id: told.get(job_id) for job_id in unknown}
        with _lock:
            _kept.update({keys[job_id]: found[job_id] for job_id in unknown if job_id in keys})
            while len(_kept) > KEPT:
                _kept.popitem(last=False)
    return {job_id: figures for job_id, figures in found.items() if figures is not None}


def ended_rewards(app: AppState, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Figures]:
    """The mean rewards of steps by job, for those of these jobs that have succeeded with rewards: of others, each look
    would read a curve that may still grow."""
    return curve_figures(app, [job for job in jobs if Status(job["status"]) is Status.SUCCEEDED], "reward")
