"""What a run has in the place of `method: auto`."""

from __future__ import annotations

from core.errors import SpecError
from core.spec.axes.method import Auto, SettledMethod
from core.spec.job import JobSpec


def method_of(spec: JobSpec) -> SettledMethod:
    """The method of a job that may be trained. SpecError for one whose method is still to be settled
    (core/jobs/admission/auto_method.py does that when the job is claimed)."""
    if isinstance(spec.method, Auto):
        raise SpecError(
            "the service resolves `method: auto` once it knows where the job runs; name the method here",
            field="method",
            code="unsettled",
        )
    return spec.method
