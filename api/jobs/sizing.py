"""The default of `batching.tokens_per_batch`: less than the spec's where the data are few.

8,192 tokens a batch are right for a large file. Of 320 short rows they make three optimizer steps, which learn nothing.
The size is settled when the job is submitted, from the size of its files, so that every attempt has the same steps.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import File
from core.plan.steps import micro_batches
from core.spec.axes.batching import Rows
from core.spec.axes.data import FileSource, singles
from core.spec.job import JobSpec

BYTES_A_TOKEN = 4
"""Bytes of a file for each token of its rows, JSON included; an estimate that errs towards more tokens."""
STEPS = 100
"""Optimizer steps that the default aims at; more where the estimate was too high."""
LEAST = 64
"""Tokens of a batch; a longer row is a batch by itself anyway."""


def estimated_tokens(session: Session, project_id: str, spec: JobSpec) -> int | None:
    """Tokens of one pass over the training rows, from the sizes of uploaded files; None where there are others."""
    total = 0
    for _, source in singles(spec.data.train, "data.train"):
        if not isinstance(source, FileSource):
            return None
        rows = select(File.bytes).where(File.id == source.id, File.project_id == project_id)
        size = session.execute(rows).scalar_one_or_none()
        if size is None:
            return None
        total += size // BYTES_A_TOKEN
    return total


def sized(session: Session, project_id: str, spec: JobSpec) -> JobSpec:
    """Answer the job with a token budget that gives it some hundred optimizer steps. It is unchanged where it names its
    own budget or number of steps, or where the size of its data is not known."""
    batching = spec.batching
    if isinstance(batching, Rows) or "tokens_per_batch" in batching.model_fields_set:
        return spec
    if spec.training.max_steps is not None or (tokens := estimated_tokens(session, project_id, spec)) is None:
        return spec
    wanted = int(tokens * spec.training.num_train_epochs / (micro_batches(spec) * STEPS)) // LEAST * LEAST
    budget = max(LEAST, min(wanted, batching.tokens_per_batch))
    return spec.model_copy(update={"batching": batching.model_copy(update={"tokens_per_batch": budget})})
