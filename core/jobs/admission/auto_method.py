"""`method: auto` becomes a method: once, when the job is claimed for the first time to train.

The first rung whose plan fits the slot is the job's for good, since its checkpoints are of it: a crash, a pause, a
retry and another box go on with it, and it is claimed no more where it does not fit. Every rung before it has its
reason in `jobs.settled`, in the run record and in the job's events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from core.db.tables import Job
from core.errors import SpecError
from core.jobs.admission import fit, lengths, oom_backoff, shapes
from core.jobs.base.slots import Slot
from core.plan.candidates import FULL, LORA, Candidate, candidates
from core.plan.device import Device
from core.plan.memory.plan import plan
from core.plan.memory.result import Plan, fits
from core.plan.models.shape import Shape
from core.plan.steps import BATCH
from core.plan.stream import MARGIN
from core.spec.axes.method import Auto
from core.spec.job import JobSpec

FEW_ROWS = 1_000
"""Training rows below which full fine-tuning is not chosen: it fits so few rows by heart, and needs more memory."""
AXES = ("method", "quantization", "optimizer", "memory")
"""What depends on the method."""


@dataclass(frozen=True, slots=True)
class ResolvedMethod:
    """What a job comes to on a slot."""

    rung: Candidate
    reason: str
    rejected: tuple[tuple[str, str], ...]
    """Those before it: name, and why not."""
    adjusted: Mapping[str, int]
    """Smaller batches, where none fits with those that were asked for (core/jobs/admission/oom_backoff.py)."""
    plan: Plan | None
    """None: the model's shape or the slot's memory is not known."""
    fits: bool
    """False: nothing fits by the plan, and this takes the least."""

    @property
    def spec(self) -> JobSpec:
        assert self.rung.spec is not None
        return oom_backoff.apply(self.rung.spec, self.adjusted)

    def as_dict(self) -> dict[str, Any]:
        """As `jobs.settled` keeps it."""
        assert self.rung.spec is not None
        values = self.rung.spec.model_dump(mode="json")
        return {
            "rung": self.rung.name,
            "reason": self.reason,
            "rejected": [{"rung": name, "reason": why} for name, why in self.rejected],
            "spec": {axis: values[axis] for axis in AXES},
        }


def settle(spec: JobSpec, shape: Shape | None, longest: int, slot: Slot, rows: int | None = None) -> ResolvedMethod:
    """What `spec` comes to on `slot`; a job that names its method comes to that. `rows`: training rows, if known."""
    if shape is None:
        return _unknown(spec, "the shape of its model is unknown, so its memory cannot be planned")
    if (usable := fit.device_of(slot).usable) is None:
        return _unknown(spec, "the memory of the slot is unknown")
    try:
        return _cascade(spec, shape, longest, fit.device_of(slot), usable, rows)
    except SpecError as error:  # of modules that the model does not have, say: its trainer says so again
        return _unknown(spec, f"the memory cannot be planned ({error.message})")


def _cascade(
    spec: JobSpec, shape: Shape, longest: int, device: Device, usable: int, rows: int | None
) -> ResolvedMethod:
    rejected: list[tuple[str, str]] = []
    possible: list[tuple[Candidate, Plan]] = []
    for rung in candidates(spec):
        why = rung.reason if rung.spec is None else fit.ruled_out(rung.spec, shape)
        if why is None and isinstance(spec.method, Auto) and rung.name.startswith(FULL):
            why = _too_few(rows)
        if rung.spec is None or why is not None:
            rejected.append((rung.name, why or rung.reason))
            continue
        planned = plan(rung.spec, shape, longest=longest, device=device)
        if fits(planned, usable):
            return ResolvedMethod(rung, _fits_words(planned, usable), tuple(rejected), {}, planned, True)
        rejected.append((rung.name, f"takes {fit.gb(planned.peak)}, more than {fit.gb(MARGIN * usable)}"))
        possible.append((rung, planned))
    least: list[tuple[Candidate, dict[str, int], Plan]] = []
    for rung, planned in possible:  # none with the batches asked for: the first with smaller ones
        assert rung.spec is not None
        cut: dict[str, int] = {}
        while (changes := _smaller(oom_backoff.apply(rung.spec, cut), planned)) is not None:
            cut |= changes
            planned = plan(oom_backoff.apply(rung.spec, cut), shape, longest=longest, device=device)
            if fits(planned, usable):
                words = f"{_fits_words(planned, usable)} with {oom_backoff.words(cut)}"
                return ResolvedMethod(rung, words, _others(rejected, rung), cut, planned, True)
        least.append((rung, cut, planned))
    if not least:
        return _unknown(spec, "; ".join(f"{name}: {why}" for name, why in rejected))
    rung, cut, planned = min(least, key=lambda one: one[2].peak)
    words = f"nothing fits by the plan; this candidate takes the least ({fit.gb(planned.peak)} of {fit.gb(usable)})"
    return ResolvedMethod(rung, words, _others(rejected, rung), cut, planned, False)


def _too_few(rows: int | None) -> str | None:
    if rows is None or rows >= FEW_ROWS:
        return None
    return f"{rows} training rows are few for all weights of a model (fewer than {FEW_ROWS:,})"


def _smaller(spec: JobSpec, planned: Plan) -> dict[str, int] | None:
    """What its trainer would have cut after running out of memory at the moment at which it takes most."""
    return oom_backoff.smaller(spec, oom_backoff.EVAL_BATCH if planned.moment == "evaluation" else BATCH)


def _others(rejected: list[tuple[str, str]], rung: Candidate) -> tuple[tuple[str, str], ...]:
    return tuple((name, why) for name, why in rejected if name != rung.name)


def _unknown(spec: JobSpec, why: str) -> ResolvedMethod:
    """LoRA, which is the default of every job, or the last candidate that is left."""
    left = [rung for rung in candidates(spec) if rung.spec is not None]
    assert left, "core.plan.compatibility.check refuses a job without"
    rung = next((rung for rung in left if rung.name == LORA), left[-1])
    return ResolvedMethod(rung, f"{why}: the default of all jobs, as far as this job allows it", (), {}, None, True)


def planned_bytes(session: Session, job: Job, slot: Slot) -> int | None:
    """The job's share of such a slot's memory, as `eft plan` shows it; None: it cannot be planned."""
    spec = effective(job.spec, job.settled, job.adjusted or {})
    shape = None if isinstance(spec.method, Auto) else shapes.known(session, spec.model)
    if shape is None:
        return None
    shape = shapes.with_scorers(session, spec, shape)
    try:
        longest = lengths.rows(session, job.project_id, spec).longest
        return plan(spec, shape, longest=longest, device=fit.device_of(slot)).peak
    except SpecError:
        return None


def effective(spec: Mapping[str, Any], settled: Mapping[str, Any] | None, adjusted: Mapping[str, int]) -> JobSpec:
    """A job as it runs: as submitted, with what its method came to and what was changed for want of memory."""
    whole = dict(spec) | (dict(settled["spec"]) if settled is not None else {})
    return oom_backoff.apply(JobSpec.model_validate(whole), adjusted)


def is_open(spec: Mapping[str, Any], settled: Mapping[str, Any] | None) -> bool:
    """The method is still to be settled."""
    return settled is None and spec["method"]["type"] == Auto.model_fields["type"].default


def words(settled: Mapping[str, Any]) -> str:
    """For the job's events."""
    told = "; ".join(f"{one['rung']}: {one['reason']}" for one in settled["rejected"])
    return f"`method: auto` is {settled['rung']} ({settled['reason']}){f'. Not {told}' if told else ''}"


def _fits_words(planned: Plan, usable: int) -> str:
    return f"takes {fit.gb(planned.peak)} of {fit.gb(usable)}"
