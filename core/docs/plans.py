"""docs/compatibility.md, from the table: `make docs` writes it (core/docs/__main__.py)."""

from __future__ import annotations

from core.plan.compatibility import cells
from core.plan.rules.axes import AXES
from core.plan.rules.table import RULES, Rule

_PAGES = (
    ("loss on", "train rows"),
    ("loss on", "eval rows"),
    ("evaluation", "eval rows"),
    ("evaluation", "schedule"),
    ("stage", "train rows"),
    ("stage", "eval rows"),
    ("stage", "method"),
    ("adapter", "method"),
    ("method", "quantization"),
    ("method", "merged"),
    ("method", "optimizer"),
    ("stage", "optimizer"),
    ("ranks", "optimizer"),
    ("offload optimizer", "optimizer"),
    ("method", "strategy"),
    ("method", "stream"),
    ("ranks", "stream"),
    ("checkpointing", "activation offloading"),
    ("method", "offload optimizer"),
    ("ranks", "offload optimizer"),
    ("stream", "offload optimizer"),
    ("batching", "streaming"),
    ("batching", "truncation"),
    ("truncation", "streaming"),
    ("method", "batching"),
    ("batching", "noise"),
    ("precision", "accelerator"),
    ("precision", "method"),
    ("precision", "quantization"),
    *(
        (axis, "compile")
        for axis in sorted({axis for rule in RULES if "compile" in rule.when for axis in rule.when} - {"compile"})
    ),
)
"""Pairs of axes worth a picture; every rule must show in one of them."""


def render() -> str:
    lines = [
        "# Compatibility",
        "",
        "Generated from `core/plan/rules` by `make docs`. A job is checked against this table at submit",
        "(422, with the code, the reason and the field) and again by the worker that starts it.",
        "",
        "## Axes",
        "",
        "| axis | values |",
        "|---|---|",
        *(f"| {axis} | {', '.join(f'`{value}`' for value in values)} |" for axis, values in AXES.items()),
        "",
        "`auto` rows are in a file that only the worker can read; the worker checks them. `default` is resolved at",
        "submit. `method: auto` is compatible with everything that one of its methods supports. Methods that conflict",
        "with the rest of the job are skipped, with the reason ([plans](plans.md#method-auto)).",
        "",
        "## Rejected combinations",
        "",
        "Everything that no rule rejects is accepted. A combination that is slow or falls back to another one (bf16",
        "on hardware without it) is not rejected: the job runs, and its events and run record say so.",
        "",
        "| | code | rejected when | reason | way out |",
        "|---|---|---|---|---|",
        *(
            f"| {number} | `{rule.code}` | {_when(rule)} | {rule.reason} | {rule.way_out} |"
            for number, rule in enumerate(RULES, 1)
        ),
        "",
        "## Tables",
        "",
        "`✓` means compatible; a number is the rule that rejects the combination.",
    ]
    for rows, columns in _PAGES:
        lines += ["", *_table(rows, columns)]
    return "\n".join(lines) + "\n"


def _when(rule: Rule) -> str:
    return " and ".join(
        f"{axis} is {' or '.join(f'`{value}`' for value in values)}" for axis, values in rule.when.items()
    )


def _table(rows: str, columns: str) -> list[str]:
    found = {
        (values[rows], values[columns]): ", ".join(str(RULES.index(rule) + 1) for rule in refusing) or "✓"
        for values, refusing in cells(rows, columns)
    }
    return [
        f"| {rows} \\ {columns} | {' | '.join(f'`{value}`' for value in AXES[columns])} |",
        "|---" * (len(AXES[columns]) + 1) + "|",
        *(f"| `{row}` | {' | '.join(found[row, column] for column in AXES[columns])} |" for row in AXES[rows]),
    ]
