"""What becomes of a sweep while its runs train: comparisons, and its end.

A sweep moves under the lock of its row. What a comparison stops, what it lets go on and that it was made are one
transaction, so a process that is killed leaves all of it or nothing.
"""

from __future__ import annotations

import logging

from sqlalchemy import select, update
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from core.db.engine import Database
from core.db.tables import Job, SweepRow
from core.errors import Conflict
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import submit
from core.jobs.lifecycle.sweeps import records, rungs
from core.jobs.lifecycle.sweeps.records import SweepStatus
from core.jobs.lifecycle.sweeps.rungs import RungComparison, SweepRun
from core.spec.sweep import Halving

log = logging.getLogger("eft.sweeps")

_ENDED = [status.value for status in FINAL]


def due(session: Session) -> list[str]:
    """List running sweeps that compare runs, and those whose runs have all ended; oldest first."""
    under_way = select(Job.id).where(Job.sweep_id == SweepRow.id, Job.status.not_in(_ENDED))
    query = select(SweepRow.id, SweepRow.spec, under_way.exists()).where(SweepRow.status == SweepStatus.RUNNING.value)
    rows = session.execute(query.order_by(SweepRow.id)).all()
    return [sweep_id for sweep_id, spec, goes_on in rows if not goes_on or spec.get("halving") is not None]


def advance(database: Database, sweep_id: str) -> bool:
    """Make the comparison that is due, or end the sweep. False: neither."""
    try:
        with database.write() as session:
            running = (SweepRow.id == sweep_id, SweepRow.status == SweepStatus.RUNNING.value)
            sweep = session.execute(select(SweepRow).where(*running).with_for_update()).scalar_one_or_none()
            return sweep is not None and _advance(session, sweep)
    except (OperationalError, InterfaceError):
        raise
    except Exception:
        log.exception("sweep %s", sweep_id)
        return False


def _advance(session: Session, sweep: SweepRow) -> bool:
    jobs = list(records.runs_of(session, sweep.id))
    if all(Status(job.status) in FINAL for job in jobs):
        _end(session, sweep, jobs)
        return True
    if sweep.spec.get("halving") is None:
        return False
    halving = Halving.model_validate(sweep.spec["halving"])
    values = records.measured(session, [job.id for job in jobs], sweep.spec["metric"], halving.steps)
    runs = [SweepRun(job.id, Status(job.status), values[job.id]) for job in jobs]
    stopped = {job_id for made in sweep.rungs for job_id in made["stopped"]}
    move = rungs.next_move(halving, sweep.spec["goal"], runs, len(sweep.rungs), stopped)
    states = {run.job_id: run.status for run in runs}
    actor = Actor(sweep.owner_id, sweep.project_id, sweep.request_id)
    if move.comparison is None:
        new = [one for one in move.arrived if states[one] not in FINAL and one not in sweep.waiting]
        for job_id in new:
            why = f"paused by its sweep at a comparison; {len(move.missing)} other runs are on the way to it"
            _try(submit.pause, session, actor, job_id, why)
        if new:
            _write(session, sweep, waiting=[*sweep.waiting, *new])
        return bool(new)
    _apply(session, sweep, actor, move.comparison, states)
    return True


def _apply(
    session: Session, sweep: SweepRow, actor: Actor, comparison: RungComparison, states: dict[str, Status]
) -> None:
    ranked = [*comparison.kept, *comparison.stopped]
    for job_id in comparison.stopped:
        if states[job_id] not in FINAL:
            value, place = comparison.values[job_id], ranked.index(job_id) + 1
            why = (
                f"stopped early by its sweep: {sweep.spec['metric']} {value:.4g} at step {comparison.step} was number "
                f"{place} of {len(ranked)}, and the best {len(comparison.kept)} continue"
            )
            _try(submit.cancel, session, actor, job_id, why)
    still = []
    for job_id in sweep.waiting:
        if job_id in comparison.kept and states[job_id] is Status.PAUSING:
            still.append(job_id)  # it is writing its checkpoint; looked at again
        elif job_id in comparison.kept and states[job_id] is Status.PAUSED:
            _try(submit.resume, session, actor, job_id, f"continues: among the best at step {comparison.step}")
    if still:
        return  # the comparison is made once all of them can go on
    made = {"step": comparison.step, "values": comparison.values, "stopped": list(comparison.stopped)}
    words = f"compared {len(ranked)} runs at step {comparison.step}: {len(comparison.kept)} continue"
    _write(session, sweep, rungs=[*sweep.rungs, made], waiting=[], reason=words)


def _try(verb: object, session: Session, actor: Actor, job_id: str, why: str) -> None:
    try:
        verb(session, actor, job_id, why=why)  # type: ignore[operator]
    except Conflict:  # it has come to its end meanwhile
        return


def _write(session: Session, sweep: SweepRow, **values: object) -> None:
    session.execute(
        update(SweepRow).where(SweepRow.id == sweep.id).values(**values).execution_options(synchronize_session=False)
    )
    session.expire(sweep)


def _end(session: Session, sweep: SweepRow, jobs: list[Job]) -> None:
    counts = {status: sum(job.status == status.value for job in jobs) for status in FINAL}
    early = len({job_id for made in sweep.rungs for job_id in made["stopped"]})
    best = records.best_of(sweep, jobs)
    if counts[Status.SUCCEEDED]:
        status = SweepStatus.SUCCEEDED
    else:
        status = SweepStatus.FAILED if counts[Status.FAILED] else SweepStatus.CANCELLED
    parts = [f"{counts[Status.SUCCEEDED]} of {len(jobs)} runs succeeded"]
    parts += [f"{counts[Status.FAILED]} failed"] if counts[Status.FAILED] else []
    parts += [f"{early} stopped early"] if early else []
    words = ", ".join(parts)
    if best is not None:
        value = next(records.value_of(sweep, job) for job in jobs if job.id == best)
        words += f"; best: `{best}` with {sweep.spec['metric']} {value:.4g}"
    records.end(session, sweep, status, words, jobs)
