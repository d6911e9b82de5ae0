"""What goes together: one table of rules over the axes of a job, with a reason for every refusal and a way out.

Pure data and pure functions. The API checks a job with it at submit (422), the worker again before a start; docs and
tests are generated from it. An axis takes its values from the spec's arms, so a new arm appears here by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from core.errors import Fault
from core.plan.rules.axes import AXES, values_of
from core.plan.rules.faults import faults_of_exports, faults_of_method, faults_of_stage
from core.plan.rules.table import RULES, Rule
from core.spec.job import JobSpec


def check(spec: JobSpec, *, preview: bool = False) -> tuple[Fault, ...]:
    """One fault for every rule that refuses the job (or a preview of its rows), and those of its stage; none: it can
    run."""
    values = values_of(spec)
    of_table = (
        Fault(rule.code, rule.message, rule.field)
        for rule in RULES
        if rule.refuses(values) and not (preview and rule.training_only)
    )
    return (*of_table, *faults_of_stage(spec, preview=preview), *faults_of_method(spec), *faults_of_exports(spec))


def cells(*axes: str) -> Iterator[tuple[dict[str, str], tuple[Rule, ...]]]:
    """Every combination of values of some axes with the rules that refuse it whatever the other axes say."""
    for combination in product(*(AXES[axis] for axis in axes)):
        values = dict(zip(axes, combination, strict=True))
        yield values, tuple(rule for rule in RULES if rule.when.keys() <= values.keys() and rule.refuses(values))
