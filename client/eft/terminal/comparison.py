"""Jobs side by side: in what their specs differ, and what each has come to."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eft.types import Job

ABSENT = object()
"""A field that one of them has not."""


def flat(spec: Any, path: str = "") -> dict[str, Any]:
    """`{"method": {"type": "lora"}}` as `{"method.type": "lora"}`; lists of objects by their index."""
    match spec:
        case dict() if spec:
            return {key: value for name, inner in spec.items() for key, value in flat(inner, _join(path, name)).items()}
        case list() if any(isinstance(one, dict) for one in spec):
            parts = (flat(inner, f"{path}[{at}]") for at, inner in enumerate(spec))
            return {key: value for part in parts for key, value in part.items()}
        case _:
            return {path: spec}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def written(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job file with the short form of each axis, `method: lora`, written out: `method: {type: lora}`."""
    plain = ("name", "model", "data", "version", "priority", "notify")
    return {
        name: {"type": value} if isinstance(value, str) and name not in plain else value for name, value in job.items()
    }


def differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Fields that are not the same in all of them, in the order in which specs write them, with each one's value."""
    tables = [flat(spec) for spec in specs]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = {name: [table.get(name, ABSENT) for table in tables] for name in names}
    return {name: row for name, row in rows.items() if any(value != row[0] for value in row[1:])}


SETTLED = "settled"
"""What `method: auto` came to: of two jobs with the same spec, one may have trained all weights and one adapters."""


@dataclass(frozen=True, slots=True)
class Comparison:
    jobs: Sequence[Job]
    spec: Mapping[str, Sequence[Any]]
    """Where the specs differ."""
    figures: Mapping[str, Sequence[float | None]]
    """What was measured; None where a job has no such figure."""

    @classmethod
    def of(cls, jobs: Sequence[Job], figures: Sequence[Mapping[str, float]], only: Iterable[str] = ()) -> Comparison:
        wanted = list(only)
        names = dict.fromkeys(name for one in figures for name in one)
        chosen = [name for name in names if not wanted or name in wanted or name.rpartition(".")[2] in wanted]
        rows = {name: [one.get(name) for one in figures] for name in chosen}
        specs = [
            {name: value for name, value in job.spec.items() if name != "name"}
            | ({} if job.settled is None else {SETTLED: job.settled["rung"]})
            for job in jobs
        ]
        return cls(jobs, differences(specs), rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "jobs": [
                {"id": job.id, "name": job.name, "status": job.status, "node": job.node, "attempt": job.attempt}
                for job in self.jobs
            ],
            "spec": {name: [None if v is ABSENT else v for v in row] for name, row in self.spec.items()},
            "figures": {
                name: [None if v is None or not math.isfinite(v) else v for v in row]
                for name, row in self.figures.items()
            },
        }

    def rows(self) -> list[tuple[str, str, list[str]]]:
        """Kind, name, and each job's words."""
        found = [("job", "status", [job.status for job in self.jobs])]
        if any(job.name for job in self.jobs):
            found.insert(0, ("job", "name", [job.name or "" for job in self.jobs]))
        found += [("spec", name, [words(value) for value in row]) for name, row in self.spec.items()]
        found += [("figure", name, [figure(value) for value in row]) for name, row in self.figures.items()]
        return found

    def difference(self, name: str) -> str:
        """How much more the second job has of a figure than the first, also in per cent."""
        first, second = self.figures[name]
        if first is None or second is None or not math.isfinite(second - first):
            return ""
        share = f" ({(second - first) / abs(first):+.1%})" if first else ""
        return f"{second - first:+.4g}{share}"

    def as_csv(self) -> str:
        """Figures in full."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("kind", "field", *(job.id for job in self.jobs)))
        writer.writerows((kind, name, *row) for kind, name, row in self.rows() if kind != "figure")
        for name, row in self.figures.items():
            writer.writerow(("figure", name, *("" if value is None else value for value in row)))
        return text.getvalue()

    def as_markdown(self) -> str:
        lines = [f"| | {' | '.join(f'`{job.id}`' for job in self.jobs)} |", f"|---|{'---|' * len(self.jobs)}"]
        for _, name, row in self.rows():
            cells = " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row)
            lines.append(f"| {name} | {cells} |")
        return "\n".join(lines) + "\n"


def words(value: Any) -> str:
    """A spec's value as a job file writes it."""
    if value is ABSENT:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
