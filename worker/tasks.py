"""The one task: a ring at the door. What there is to do, the database says."""

from __future__ import annotations

from worker.app import agent, app


@app.task(name="eft.wake")  # type: ignore[untyped-decorator]
def wake(job_id: str | None = None) -> None:
    """`job_id` is a hint for people who watch the queue; the job that runs is whichever is next."""
    agent().serve()
