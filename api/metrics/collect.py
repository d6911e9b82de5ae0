"""What the database says about the installation, as metrics: the same from every API process.

Cardinality: series a job only for jobs that run, series a project for the rest, reasons by their codes.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import case, func, select, text
from sqlalchemy.orm import Session

from api.metrics.exposition import Family, Histogram
from core import __version__
from core.db.engine import read_now
from core.db.tables import QUEUED, DeletedJobs, Delivery, Job, Metric, Node, Project, Webhook
from core.jobs.base.states import Status
from core.jobs.kinds import Kind
from core.jobs.lifecycle.deletion import WAITS, wait_bucket
from core.jobs.policies import budget
from core.jobs.scheduling import cluster
from core.jobs.scheduling.cluster import SlotState
from core.jobs.views import explain
from core.jobs.views.explain import QueueSettings

EXPLAINED = 100
"""Waiting jobs of each phase whose reason is found out at a scrape; the others count under `not_looked_at`."""
STATES = ("free", "busy", "held", "drained", "maintenance", "quarantined", "outside", "silent")
OF_A_STEP = {
    "loss": ("eft_job_loss", "Training loss of the last reported step"),
    "tokens_per_second": ("eft_job_tokens_per_second", "Of the last reported step"),
    "memory_bytes": ("eft_job_memory_bytes", "Most device memory that its trainer has held"),
}


def collect(session: Session, settings: QueueSettings) -> list[Family]:
    names = {row.id: row.name for row in session.execute(select(Project.id, Project.name))}
    now = read_now(session)
    seats = [seat for seat in cluster.slot_states(session, now, settings.silent_after) if seat.slot.phase == Kind.TRAIN]
    build = Family("eft_build_info", "gauge", "1; its label says which version answers")
    build.add(1, version=__version__)
    return [
        build,
        *_jobs(session, names),
        _queue(session, settings, names),
        *_gpus(seats),
        *_running(session, names, seats),
        _nodes(session, now),
        *_notices(session, names),
        *_disk(session, settings),
    ]


def _jobs(session: Session, names: dict[str, str]) -> list[Family]:
    """In one pass over all jobs. Jobs that were deleted since are counted too, so that no counter goes down."""
    jobs = Family("eft_jobs", "gauge", "Jobs by project and status, with those that were deleted since")
    waits = Family("eft_job_wait_seconds", "histogram", "From submit to the first start of training, by project")
    wait, bucket = Job.started_at - Job.created_at, wait_bucket()
    counts: dict[tuple[str, str], int] = {}
    waited: dict[str, Histogram] = {}
    there = session.execute(
        select(Job.project_id, Job.status, bucket, func.count(), func.sum(wait))
        .where(Job.kind == "train")
        .group_by(Job.project_id, Job.status, bucket)
    ).all()
    columns = (DeletedJobs.status, DeletedJobs.bucket, DeletedJobs.jobs, DeletedJobs.waited)
    gone = session.execute(select(DeletedJobs.project_id, *columns)).all()
    for project_id, status, place, count, total in [*there, *gone]:
        project = names[project_id]
        counts[project, status] = counts.get((project, status), 0) + count
        if place is not None and place >= 0:
            histogram = waited.setdefault(project, Histogram(WAITS))
            histogram.counts[place] += count
            histogram.total += float(total)
    for (project, status), count in sorted(counts.items()):
        jobs.add(count, project=project, status=status)
    for project, histogram in sorted(waited.items()):
        waits.add_histogram(histogram, project=project)
    return [jobs, waits]


def _queue(session: Session, settings: QueueSettings, names: dict[str, str]) -> Family:
    """By what keeps them: the codes of `GET /queue`."""
    family = Family("eft_queue_jobs", "gauge", "Waiting jobs by project, what they wait to do, and why")
    phase = case((Job.prepared.is_(None), "prepare"), else_="train")
    left = {
        (row[0], row[1]): int(row[2])
        for row in session.execute(
            select(Job.project_id, phase, func.count())
            .where(text(QUEUED), Job.kind == "train")  # in words: SQLite has an index for these
            .group_by(Job.project_id, phase)
        )
    }
    counts: dict[tuple[str, str, str], int] = {}
    for one in explain.queue(session, settings, EXPLAINED) if left else ():
        key = (one.job.project_id, one.phase, one.code)
        counts[key] = counts.get(key, 0) + 1
        left[key[:2]] = left.get(key[:2], 0) - 1
    for (project_id, what), count in left.items():
        if count > 0:
            counts[project_id, what, "not_looked_at"] = count
    for (project_id, what, code), count in sorted(counts.items()):
        family.add(count, project=names[project_id], phase=what, reason=code)
    return family


def _gpus(seats: Sequence[SlotState]) -> list[Family]:
    """`gpu` is the name that `eft gpu` takes. CPU slots are there too: a box without GPUs trains on them."""
    memory = Family("eft_gpu_memory_bytes", "gauge", "Memory of a GPU; 0 for a CPU slot")
    in_use = Family("eft_gpu_in_use", "gauge", "1 while a job of eft has the slot")
    state = Family("eft_gpu_state", "gauge", "1 for the state that a slot is in")
    outside = Family("eft_gpu_outside_memory_bytes", "gauge", "Memory of processes that are not eft's")
    busy = Family("eft_gpu_utilization_ratio", "gauge", "Time in which something ran on a GPU, 0 to 1, by its driver")
    used = Family("eft_gpu_memory_used_bytes", "gauge", "Memory of a GPU in use by anybody, by its driver")
    heat = Family("eft_gpu_temperature_celsius", "gauge", "Temperature of a GPU, of its hottest spot where known")
    power = Family("eft_gpu_power_watts", "gauge", "Power that a GPU draws, by its driver")
    for seat in seats:
        of = {"node": seat.node, "gpu": seat.label}
        if (percent := seat.live.get("busy_percent")) is not None:
            busy.add(percent / 100, **of)
        if (taken := seat.live.get("used_bytes")) is not None:
            used.add(taken, **of)
        for family, figure in ((heat, "celsius"), (power, "watts")):
            if (value := seat.live.get(figure)) is not None:
                family.add(value, **of)
        memory.add(seat.slot.memory_bytes, **of, vendor=seat.slot.vendor, arch=seat.slot.arch)
        in_use.add(seat.busy is not None, **of)
        for one in STATES:
            state.add(seat.state == one, **of, state=one)
        outside.add(sum(int(process.get("bytes") or 0) for process in seat.processes), **of)
    return [memory, in_use, state, outside, busy, used, heat, power]


def _running(session: Session, names: dict[str, str], seats: Sequence[SlotState]) -> list[Family]:
    """Figures of jobs whose trainer is at work; their series end with it. `gpu` is the slot of rank 0."""
    of_job: dict[str, list[SlotState]] = {}
    for seat in seats:
        if seat.busy is not None:
            of_job.setdefault(seat.busy, []).append(seat)
    slots = Family("eft_job_slot", "gauge", "1 for every GPU or CPU slot of a running job")
    step = Family("eft_job_step", "gauge", "Optimizer steps done")
    total = Family("eft_job_planned_steps", "gauge", "Optimizer steps planned")
    figures = {name: Family(metric, "gauge", words) for name, (metric, words) in OF_A_STEP.items()}
    running = session.execute(
        select(Job.id, Job.name, Job.project_id, Job.progress)
        .where(Job.id.in_(of_job), Job.status == Status.RUNNING.value, Job.kind == "train")
        .order_by(Job.id)
    ).all()
    for job in running:
        of = {"job": job.id, "name": job.name or "", "project": names[job.project_id], "gpu": of_job[job.id][0].label}
        for seat in of_job[job.id]:
            slots.add(1, **(of | {"gpu": seat.label}))
        progress = job.progress or {}
        for family, key in ((step, "step"), (total, "total_steps")):
            if progress.get(key) is not None:
                family.add(float(progress[key]), **of)
        for name, family in figures.items():
            last = session.execute(
                select(Metric.value)
                .where(Metric.job_id == job.id, Metric.name == name)
                .order_by(Metric.step.desc(), Metric.attempt.desc())
                .limit(1)
            ).scalar_one_or_none()
            if last is not None:
                family.add(last, **of)
    return [slots, step, total, *figures.values()]


def _nodes(session: Session, now: float) -> Family:
    family = Family("eft_node_heartbeat_age_seconds", "gauge", "Since a node was heard of last")
    for name, heartbeat in session.execute(select(Node.name, Node.heartbeat_at).order_by(Node.name)):
        family.add(max(0.0, now - heartbeat), node=name)
    return family


def _disk(session: Session, settings: QueueSettings) -> list[Family]:
    """Measured by the leading worker every ten minutes, where there are budgets about every half."""
    used = Family("eft_disk_bytes", "gauge", "What the data root holds, by kind")
    limits = Family("eft_disk_budget_bytes", "gauge", "Budgets of the data root (EFT_DISK_BUDGET_…)")
    for kind, size in budget.measured(session).items():
        used.add(size, kind=kind)
    for what, limit in settings.budget.limits.items():
        limits.add(limit, kind=what)
    over = Family("eft_disk_over_budget", "gauge", "1 while a budget is used up, so that nothing is started")
    over.add(bool(settings.over))
    return [used, limits, over]


def _notices(session: Session, names: dict[str, str]) -> list[Family]:
    waiting = Family("eft_webhook_deliveries", "gauge", "Notices that wait for an attempt, and dead letters kept")
    counted = session.execute(
        select(Delivery.project_id, Delivery.state, func.count())
        .where(Delivery.state != "delivered")
        .group_by(Delivery.project_id, Delivery.state)
        .order_by(Delivery.project_id, Delivery.state)
    )
    for project_id, state, count in counted:
        waiting.add(count, project=names[project_id], state=state)
    disabled = Family("eft_webhooks_disabled", "gauge", "Webhooks that are disabled")
    for project_id, count in session.execute(
        select(Webhook.project_id, func.count())
        .where(Webhook.disabled_at.is_not(None))
        .group_by(Webhook.project_id)
        .order_by(Webhook.project_id)
    ):
        disabled.add(count, project=names[project_id])
    return [waiting, disabled]
