"""A sweep: one job with other values in some of its fields, run by run (docs/sweeps.md)."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, TypeAdapter, ValidationError, model_validator

from core.errors import Fault, SpecError, plainly
from core.spec.base import SpecModel
from core.spec.pipeline import MetricName

MOST_RUNS = 200
FIXED = ("version", "name", "tags", "note", "after", "notify", "sweep")
"""Fields of a job that all runs share."""

FieldPath = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(\.[a-z0-9_]+){0,6}$")]
Values = Annotated[list[Any], Field(min_length=1, max_length=10_000)]


class Range(SpecModel):
    """Numbers between two bounds; whole numbers if both bounds are."""

    min: int | float
    max: int | float
    scale: Literal["linear", "log"] = "linear"
    """`log`: each order of magnitude is as likely as the next, as learning rates want it."""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.min >= self.max:
            raise ValueError("`min` must be below `max`")
        if self.scale == "log" and self.min <= 0:
            raise ValueError("a `log` scale needs bounds above 0")
        return self

    def draw(self, chance: float) -> int | float:
        """The value at `chance`, 0 to 1, with four significant digits."""
        if self.scale == "log":
            value = math.exp(math.log(self.min) + chance * (math.log(self.max) - math.log(self.min)))
        else:
            value = self.min + chance * (self.max - self.min)
        if isinstance(self.min, int) and isinstance(self.max, int):
            return min(self.max, max(self.min, round(value)))
        return min(self.max, max(self.min, float(f"{value:.4g}")))


class Halving(SpecModel):
    """Stop the worse runs early (successive halving)."""

    steps: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=6)]
    """Optimizer steps at which runs are compared, ascending; the job evaluates at each of them."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the compared runs that goes on, rounded up."""

    @model_validator(mode="after")
    def _ascending(self) -> Halving:
        if self.steps != sorted(set(self.steps)):
            raise ValueError("`steps` ascend, each once")
        return self

    def kept(self, runs: int) -> int:
        return max(1, math.ceil(round(runs * self.keep, 9)))


class GridSweep(SpecModel):
    """Every combination of the values."""

    type: Literal["grid"] = "grid"
    fields: Annotated[dict[FieldPath, Values], Field(min_length=1, max_length=10)]
    """Field of the job to its values: `{optimizer.learning_rate: [1.0e-4, 2.0e-4]}`."""
    metric: MetricName | None = None
    """Figure of the result by which runs are compared. Default: `eval_loss` with held-out rows, else `train_loss`."""
    goal: Literal["min", "max"] = "min"
    halving: Halving | None = None


class RandomSweep(SpecModel):
    """Values drawn at random; the same seed draws the same ones."""

    type: Literal["random"] = "random"
    fields: Annotated[dict[FieldPath, Values | Range], Field(min_length=1, max_length=10)]
    """Field of the job to its values, or to the range they are drawn from."""
    count: Annotated[int, Field(ge=1)]
    """Number of runs."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    metric: MetricName | None = None
    """As of a grid."""
    goal: Literal["min", "max"] = "min"
    halving: Halving | None = None


Sweep = GridSweep | RandomSweep
OWN = {*GridSweep.model_fields, *RandomSweep.model_fields}
"""Names of a sweep itself."""
_ARMS: TypeAdapter[Sweep] = TypeAdapter(Annotated[Sweep, Field(discriminator="type")])


def parse_sweep(document: Any) -> tuple[Sweep, dict[str, Any]]:
    """The sweep of a document, and the job without it. Raises SpecError with fields such as `sweep.count`."""
    if not isinstance(document, dict) or not isinstance(document.get("sweep"), dict):
        raise _refused(
            Fault("invalid_value", "a sweep is a job with `sweep`: fields of the job with their values", "sweep")
        )
    job = {name: value for name, value in document.items() if name != "sweep"}
    try:
        raw = json.loads(json.dumps(document["sweep"]))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(
            Fault("invalid_value", f"the sweep has a value that JSON cannot express: {error}", "sweep")
        ) from error
    raw = _in_full(raw)
    try:
        sweep = _ARMS.validate_python(raw)
    except ValidationError as error:
        item = error.errors(include_url=False, include_input=False)[0]
        place = [str(part) for part in item["loc"] if part not in ("grid", "random", "list[any]", "Range")]
        raise _refused(Fault("invalid_value", plainly(item["msg"]), ".".join(["sweep", *place]))) from error
    for name in sweep.fields:
        if name.partition(".")[0] in FIXED:
            words = f"all runs share `{name}`; give fields of the training"
            raise _refused(Fault("invalid_value", words, f"sweep.fields.{name}"))
    return sweep, job


def _in_full(raw: dict[str, Any]) -> dict[str, Any]:
    """A sweep with its `type` and `fields`. In the short form, fields of the job stand beside the sweep's own names; a
    list of values is always a field of the job, as in `seed: [1, 2, 3]`."""
    if "fields" not in raw:
        own = {name: value for name, value in raw.items() if name in OWN and not isinstance(value, list)}
        raw = {**own, "fields": {name: value for name, value in raw.items() if name not in own}}
    return {"type": "random" if "count" in raw else "grid", **raw}


def points(sweep: Sweep) -> list[dict[str, Any]]:
    """Field and value of each run, in order. Raises SpecError for more than MOST_RUNS, and for fewer different ones
    than asked for."""
    if isinstance(sweep, GridSweep):
        count = math.prod(len(values) for values in sweep.fields.values())
        if count > MOST_RUNS:
            words = f"this grid has {count:,} runs, and a sweep has at most {MOST_RUNS}: give fewer values, or draw "
            raise _refused(Fault("sweep_too_large", words + "some with `type: random` and a `count`", "sweep.fields"))
        return [dict(zip(sweep.fields, one, strict=True)) for one in itertools.product(*sweep.fields.values())]
    if sweep.count > MOST_RUNS:
        words = f"{sweep.count:,} runs are asked for, and a sweep has at most {MOST_RUNS}"
        raise _refused(Fault("sweep_too_large", words, "sweep.count"))
    chance = random.Random(sweep.seed)  # noqa: S311 -- no secret
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    for _ in range(100 * sweep.count):
        point = {name: _draw(values, chance.random()) for name, values in sweep.fields.items()}
        if (key := json.dumps(point)) not in seen:
            seen.add(key)
            found.append(point)
        if len(found) == sweep.count:
            return found
    words = f"these fields have only {len(found)} different combinations, and {sweep.count} are asked for"
    raise _refused(Fault("invalid_value", words, "sweep.count"))


def _draw(values: list[Any] | Range, chance: float) -> Any:
    return values.draw(chance) if isinstance(values, Range) else values[int(chance * len(values))]


def job_at(job: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """The job with the values of one run. Raises SpecError where a field lies below one that is not an object."""
    job = json.loads(json.dumps(job))
    for name, value in point.items():
        *above, last = name.split(".")
        place: dict[str, Any] = job
        for depth, key in enumerate(above, 1):
            inner = place.get(key)
            if isinstance(inner, str) and above[0] not in ("model", "data"):
                inner = {"type": inner}  # a short form on the way
            if inner is None:
                inner = {}
            if not isinstance(inner, dict):
                words = f"`{'.'.join(above[:depth])}` is not an object in this job: write it in full"
                raise _refused(Fault("invalid_value", words, f"sweep.fields.{name}"))
            place[key] = inner
            place = inner
        place[last] = value
    return job


def _refused(fault: Fault) -> SpecError:
    return SpecError(f"{fault.field}: {fault.message}", field=fault.field, faults=(fault,), code=fault.code)
