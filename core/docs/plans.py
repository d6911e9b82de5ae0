"""docs/compatibility.md, from the table: `make docs` writes it (core/docs/__main__.py)."""

from __future__ import annotations

from core.plan.compatibility import AXES, RULES, Rule, cells

_PAGES = (
    ("loss on", "train rows"),
    ("loss on", "eval rows"),
    ("evaluation", "eval rows"),
    ("stage", "train rows"),
    ("stage", "eval rows"),
    ("stage", "method"),
    ("method", "quantization"),
    ("method", "merged"),
    ("method", "optimizer"),
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
    ("precision", "accelerator"),
    ("precision", "method"),
    ("precision", "quantization"),
)
"""Pairs of axes worth a picture; every rule must show in one of them."""


def render() -> str:
    lines = [
        "# What goes together",
        "",
        "Generated from `core/plan/compatibility.py` by `make docs`. A job is checked against this table when it is",
        "submitted (422, with the code, the reason and the field) and again by the worker that starts it.",
        "",
        "## Axes",
        "",
        "| axis | values |",
        "|---|---|",
        *(f"| {axis} | {', '.join(f'`{value}`' for value in values)} |" for axis, values in AXES.items()),
        "",
        "`auto` rows lie in a file that only the worker can read: it checks once it has. `default` is settled when the",
        "job is submitted. `method: auto` goes with all that one of its methods goes with: those that are refused",
        "beside what the job asks for are passed over, with the reason ([plans](plans.md#method-auto)).",
        "",
        "## Refused",
        "",
        "Everything that no rule refuses is accepted. What is slow or falls back to something else (bf16 on hardware",
        "without it) is no refusal: it runs, and the job's events and run record say so.",
        "",
        "| | code | refused when | reason | way out |",
        "|---|---|---|---|---|",
        *(
            f"| {number} | `{rule.code}` | {_when(rule)} | {rule.reason} | {rule.way_out} |"
            for number, rule in enumerate(RULES, 1)
        ),
        "",
        "## Tables",
        "",
        "`✓` goes together, a number is the rule that refuses it.",
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
