"""What a job would take, before it is submitted: bytes, batches, method, disk and time, for each kind of slot here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, assert_never

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import Attempt, File, Job
from core.errors import EftError, ModelError, SpecError
from core.jobs.admission import auto_method, fit, lengths, oom_backoff, ready, shapes
from core.jobs.admission.lengths import RowLengths
from core.jobs.base.slots import Needs, PlanNeeds, Slot
from core.jobs.base.states import Status
from core.jobs.kinds import Kind
from core.jobs.scheduling.cluster import SlotState
from core.plan.memory.plan import plan
from core.plan.memory.result import Item, Plan
from core.plan.models.shape import Shape
from core.plan.steps import micro_batch, run_steps, step_size, steps_for
from core.spec.axes.batching import Rows
from core.spec.axes.data import FileSource, Generated, singles
from core.spec.axes.model import GGUFModel, HubModel, JobModel, LocalModel, RegistryModel
from core.spec.axes.rollout.models import model_rewards
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.job import JobSpec

RECENT = 200
"""Jobs of the project that are looked through for the pace of one like it."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model as far as it is known before a job of it has been prepared."""

    shape: Shape | None
    source: str
    """Where the shape is from; without one, why there is none."""
    fault: ModelError | None = None
    """Reason why its folder cannot be read; None: no reason is known."""


def known(session: Session, spec: JobSpec) -> Known:
    """Nothing is downloaded for it: a folder that the API can see is read, any other model must have been prepared."""
    match spec.model:
        case LocalModel(path=path) if _is_seen(Path(path)):
            try:
                return Known(Shape.of_folder(Path(path), field="model.path"), "the model's folder")
            except ModelError as error:
                fault = error if error.code == "model_unreadable" else None
                return Known(None, f"the model cannot be planned: {error.message}", fault)
            except (EftError, OSError, ValueError, KeyError, TypeError) as error:
                words = error.message if isinstance(error, EftError) else str(error)
                return Known(None, f"the model cannot be planned: {words}")
        case LocalModel() | HubModel() | GGUFModel() | JobModel() | RegistryModel():
            shape = shapes.known(session, spec.model)
            if shape is not None:
                return Known(shape, "the model as it was prepared here last")
            return Known(
                None,
                "its model has not been prepared here yet, and nothing is downloaded to answer this; a job of it, or a "
                "preview of a file with it, makes it known",
            )
        case _ as never:
            assert_never(never)


def _is_seen(folder: Path) -> bool:
    """A model's folder that this process may look into; others may be there on the workers' boxes."""
    try:
        return (folder / "config.json").exists()
    except OSError:
        return False


def refusal(session: Session, project_id: str, spec: JobSpec) -> EftError | None:
    """Why no node here can take the job, where that is known."""
    model = known(session, spec)
    if model.fault is not None:
        return model.fault
    try:
        return ready.check(session, project_id, spec, model.shape)
    except SpecError as error:
        return error


def view(session: Session, project_id: str, spec: JobSpec, *, free: int | None) -> tuple[dict[str, Any] | None, str]:
    """The plan, and where it is from; or None and why. `free`: bytes of the data root; None: nobody can tell. SpecError
    where the job names modules that its model does not have."""
    model = known(session, spec)
    if model.shape is None:
        return None, model.source
    shape = shapes.with_scorers(session, spec, model.shape)
    rows, seats = lengths.rows(session, project_id, spec), ready.seats(session)
    takes = fit.sought(spec, shape, rows.longest, ready.training(seats))
    places = [_place(session, project_id, spec, shape, rows, takes, group) for group in _groups(spec, seats)] or [
        _unplaced(spec, shape, rows)
    ]
    refused = fit.refusal(spec, shape, rows.longest, seats)
    first = next((place for place in places if place["fits"]), places[0])
    return {
        "parameters": shape.parameters,
        "model_from": model.source + _uncounted(spec, shape),
        "longest_row": rows.longest,
        "longest_row_from": rows.source,
        "batch": _batch(session, project_id, spec, rows),
        "places": places,
        "fits": refused is None,
        "reason": None if refused is None else refused.message,
        "disk": first["disk"] | {"free": free},
        "notices": _of_data(session, project_id, spec),
    }, model.source


def _uncounted(spec: JobSpec, shape: Shape) -> str:
    """Words of the reward models whose shapes are not known yet."""
    counted = {one.reward for one in shape.scorers}
    missing = [f"`{name}`" for _, name, _ in model_rewards(spec.stage) if name not in counted]
    if not missing:
        return ""
    return f"; without the memory of the reward models that were never prepared here: {', '.join(missing)}"


_TOLD = ("columns_ignored", "label_ignored", "template_fields")


def _of_data(session: Session, project_id: str, spec: JobSpec) -> list[dict[str, Any]]:
    """What was told of the uploaded files and is of weight for training, as long as the job reads them so."""
    found: list[dict[str, Any]] = []
    sources = [*singles(spec.data.train, "data.train")]
    sources += singles(spec.data.eval, "data.eval") if spec.data.eval is not None else []
    for field, source in sources:
        if not isinstance(source, FileSource):
            continue
        file = session.get(File, source.id)
        if file is None or file.project_id != project_id or file.report is None:
            continue
        if source.columns in ({}, file.report.get("columns", {})):
            said = file.report.get("notices", [])
            found += [one | {"field": field} for one in said if one["code"] in _TOLD]
    return found


# --- places ----------------------------------------------------------------------------------------------


def _groups(spec: JobSpec, seats: Sequence[SlotState]) -> list[list[SlotState]]:
    """Slots that are alike to the job, those first that may take it."""
    groups: dict[tuple[Any, ...], list[SlotState]] = {}
    asks = Needs.of(spec.resources)
    for seat in seats:
        slot = seat.slot
        if slot.phase == Kind.TRAIN:
            like = (slot.family, slot.device_bytes, slot.host_bytes, tuple(asks.missing(slot)))
            groups.setdefault(like, []).append(seat)
    return sorted(groups.values(), key=lambda group: bool(asks.missing(group[0].slot)))


def _place(
    session: Session,
    project_id: str,
    spec: JobSpec,
    shape: Shape,
    rows: RowLengths,
    takes: PlanNeeds | None,
    seats: Sequence[SlotState],
) -> dict[str, Any]:
    slot = seats[0].slot
    settled = auto_method.settle(spec, shape, rows.longest, slot, rows.training)
    lacks = Needs.of(spec.resources).missing(slot)
    short = [] if takes is None else takes.missing(slot)
    fits = takes is not None and not (lacks or short)
    planned = settled.plan or plan(settled.spec, shape, longest=rows.longest, device=fit.device_of(slot))
    proposals = (
        [] if not short else [*fit.proposals(spec, shape, rows.longest, seats), f"a slot with {' and '.join(short)}"]
    )
    return (
        {
            "slots": [seat.label for seat in seats],
            "kind": slot.kind,
            "vendor": slot.vendor or None,
            "arch": slot.arch or None,
            "memory_bytes": slot.device_bytes or None,
            "host_memory_bytes": slot.host_bytes or None,
            "fits": fits,
            "lacks": [*lacks, *short],
            "would_fit": proposals,
            "time": _time(session, project_id, settled.spec, rows, slot) if fits else _no_time("it does not run there"),
        }
        | _method(spec, settled)
        | _bytes(planned)
    )


def _unplaced(spec: JobSpec, shape: Shape, rows: RowLengths) -> dict[str, Any]:
    """Where no slot is registered: a GPU of which nothing is known."""
    settled = auto_method.settle(spec, shape, rows.longest, fit.GPU, rows.training)
    planned = plan(settled.spec, shape, longest=rows.longest, device=fit.device_of(fit.GPU))
    return (
        {
            "slots": [],
            "kind": "gpu",
            "vendor": None,
            "arch": None,
            "memory_bytes": None,
            "host_memory_bytes": None,
            "fits": True,
            "lacks": [],
            "would_fit": [],
            "time": _no_time("no slot is registered here"),
        }
        | _method(spec, settled)
        | _bytes(planned)
    )


def _method(spec: JobSpec, settled: auto_method.ResolvedMethod) -> dict[str, Any]:
    runs = settled.spec
    assert runs.quantization is not None  # resolved
    batch = oom_backoff.words(settled.adjusted)
    notice = f"its micro-batch does not fit, and it would run with {batch}"
    if not settled.fits:
        notice = f"the bytes are those with {batch}, the least that it can be cut to"
    return {
        "method": {
            "type": runs.method.type,
            "quantization": runs.quantization.type,
            "stream": runs.memory.stream.type,
            "gradient_checkpointing": runs.memory.gradient_checkpointing,
            "rung": settled.rung.name if auto_method.is_open(spec.model_dump(mode="json"), None) else None,
            "reason": settled.reason,
            "rejected": [{"rung": name, "reason": why} for name, why in settled.rejected],
        },
        "adjusted": dict(settled.adjusted) or None,
        "notice": notice if batch else None,
    }


def _bytes(planned: Plan) -> dict[str, Any]:
    return {
        "precision": planned.precision,
        "peak_bytes": planned.peak,
        "moment": planned.moment,
        "bytes": _items(planned.device),
        "host_bytes": planned.host_bytes,
        "host": _items(planned.host),
        "stream_from": planned.stream.where,
        "disk": {"bytes": _items(planned.disk), "total_bytes": planned.disk_bytes},
        "trained_parameters": planned.trained,
        "largest_pass": {"rows": planned.rows, "tokens": planned.tokens, "field": planned.field},
    }


def _items(items: Iterable[Item]) -> list[dict[str, Any]]:
    return [{"kind": item.kind, "bytes": item.bytes, "why": item.why} for item in items]


# --- batches and time ------------------------------------------------------------------------------------


def _batch(session: Session, project_id: str, spec: JobSpec, rows: RowLengths) -> dict[str, Any]:
    size, field, _ = micro_batch(spec)
    steps_known, why = steps(session, project_id, spec, rows)
    accumulation = spec.training.gradient_accumulation_steps
    return {
        "micro_batch": size,
        "field": field,
        "gradient_accumulation_steps": accumulation,
        "ranks": spec.resources.gpus,
        "per_step": step_size(spec),
        "steps": steps_known,
        "steps_from": why,
    }


def steps(session: Session, project_id: str, spec: JobSpec, rows: RowLengths) -> tuple[int | None, str]:
    """Optimizer steps, and where the figure is from or why there is none."""
    if spec.training.max_steps is not None:
        return spec.training.max_steps, "training.max_steps"
    if not isinstance(spec.batching, Rows):
        return None, f"batches of `{spec.batching.type}` depend on the lengths of all rows"
    count, source = rows.epoch_rows, "the rows that a preview has counted"
    if count is None:
        train = spec.data.train
        if not isinstance(train, FileSource | Generated) or spec.data.split is not None:
            return None, "its rows have not been counted"
        if spec.training.truncation == "split":
            return (
                None,
                "the rows that long ones are split into have not been counted; a preview of the file counts them",
            )
        if isinstance(train, Generated):
            count, source = train.size, "the problems or games of its data"
        else:
            count = session.execute(
                select(File.rows).where(File.id == train.id, File.project_id == project_id)
            ).scalar_one_or_none()
            if count is None:
                return None, "its file is not uploaded yet"
            source = "the rows of its file"
    each = steps_for(count, step_size(spec))
    return run_steps(spec, lambda epoch: each), source


def _time(session: Session, project_id: str, spec: JobSpec, rows: RowLengths, slot: Slot) -> dict[str, Any]:
    """From what jobs of this project have done with the same model and method on the same kind of device."""
    total, why = _tokens(spec, rows)
    if total is None:
        return _no_time(why)
    paces = _paces(session, project_id, spec, slot)
    if not paces:
        return _no_time("no job of this project has ended that trained this model so on such a slot")
    pace = median(paces)
    return {
        "seconds": total / pace,
        "tokens": total,
        "tokens_per_second": pace,
        "runs": len(paces),
        "reason": f"{why}, at the pace of {len(paces)} finished {'run' if len(paces) == 1 else 'runs'} like it; "
        "training alone, without loading and evaluations",
    }


def _no_time(why: str) -> dict[str, Any]:
    return {"seconds": None, "tokens": None, "tokens_per_second": None, "runs": 0, "reason": why}


def _tokens(spec: JobSpec, rows: RowLengths) -> tuple[int | None, str]:
    """That the run trains on, and where the figure is from or why there is none."""
    if isinstance(spec.stage, RolloutStage):
        return None, "it trains on answers, and how long they are is known once the model has given them"
    if rows.epoch_tokens is None or not rows.epoch_rows:
        return None, "the tokens of its rows have not been counted with this model; a preview of its file counts them"
    steps = spec.training.max_steps
    if steps is None:
        return round(rows.epoch_tokens * spec.training.num_train_epochs), "the tokens that a preview has counted"
    each = rows.epoch_tokens / rows.epoch_rows if isinstance(spec.batching, Rows) else 1.0
    return round(steps * step_size(spec) * each), f"{steps} steps of the mean row that a preview has counted"


def _paces(session: Session, project_id: str, spec: JobSpec, slot: Slot) -> list[float]:
    """Tokens a second of finished runs like this one, newest first."""
    found = session.execute(
        select(Job.spec, Job.settled, Job.adjusted, Job.result, Attempt.run_record)
        .join(Attempt, (Attempt.job_id == Job.id) & (Attempt.attempt == Job.attempt))
        .where(Job.project_id == project_id, Job.kind == "train", Job.status == Status.SUCCEEDED.value)
        .order_by(Job.id.desc())
        .limit(RECENT)
    )
    wanted, arch = _like(spec.model_dump(mode="json")), "cpu" if slot.kind == "cpu" else slot.arch
    paces = []
    for document, settled, _, result, record in found:
        ran = dict(document) | (settled["spec"] if settled else {})
        there = (record or {}).get("environment", {})
        pace = (result or {}).get("tokens_per_second")
        if pace and there.get("arch") == arch and _like(ran) == wanted:
            paces.append(float(pace))
    return paces


def _like(spec: dict[str, Any]) -> tuple[Any, ...]:
    """What the pace of a run depends on most."""
    return (
        spec["model"],
        spec["method"]["type"],
        (spec["quantization"] or {}).get("type"),
        spec["memory"].get("stream", {}).get("type", "none"),
        bool(spec["memory"].get("gradient_checkpointing")),
        spec["batching"]["type"],
        spec["training"]["precision"],
        spec["training"]["max_length"],
        spec["resources"].get("gpus", 1),
    )
