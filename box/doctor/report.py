"""What the doctor says: findings, and the tables behind them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "problem"]
MARKS: dict[Level, str] = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    what: str
    detail: str


@dataclass(slots=True)
class Report:
    """Everything the doctor says; `as_dict` is the JSON form."""

    versions: dict[str, str] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    determinism: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    def add(self, level: Level, what: str, detail: str) -> None:
        self.findings.append(Finding(level, what, detail))

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def for_people(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [versions, ""]
        width = max((len(finding.what) for finding in self.findings), default=0)
        lines += [f"{MARKS[finding.level]:<8}{finding.what:<{width}}  {finding.detail}" for finding in self.findings]
        if self.determinism:
            lines += ["", f"determinism: {self.determinism['class']} ({'; '.join(self.determinism['reasons'])})"]
        problems = sum(finding.level == "problem" for finding in self.findings)
        lines += ["", "jobs can run here" if self.ok else f"{problems} problem{'s' * (problems > 1)} to mend first"]
        return "\n".join(lines)
