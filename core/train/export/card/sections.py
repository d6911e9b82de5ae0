"""Sections of a card: what the result and the record of a run say, as lines of Markdown. A section of which nothing is
known has no lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

CARD_SAMPLES, CARD_CHARS = 5, 600


def how_to_ask(rendering: dict[str, Any]) -> list[str]:
    """How to prompt a model that was trained on pairs of strings, with the exact text of an example."""
    if "ask" not in rendering:
        return []
    lines = [
        "## How to ask",
        "",
        f"Of its rows {rendering['done']}. To get what the figures below promise, {rendering['ask']}.",
        "",
    ]
    if (example := rendering.get("example")) is not None:
        lines += [
            f"For the prompt `{example['prompt']}` the model is given this text, here as a JSON string:",
            "",
            "```json",
            json.dumps(example["sent"], ensure_ascii=False),
            "```",
            "",
        ]
    return lines


def formats_kept(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """How much of the tuning each format has kept, as its own reader found it."""
    measured = [one for one in outcomes if one.get("retention")]
    if not measured:
        return []
    lines = [
        "## What the exported formats have kept",
        "",
        "| format | retention | required | same choice | KL to the tuned model | rows | reader | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in measured:
        found = one["retention"]
        kept = "–" if found["retention"] is None else f"{found['retention']:.4f}"
        apart = "–" if found["kl_exported"] is None else f"{found['kl_exported']:.2g}"
        state = "" if one["released"] else "**not released**"
        lines.append(
            f"| {one['folder']} | {kept} | {found['required']:g} | {found['same_choice']:.1%} | {apart} | "
            f"{found['rows']} {found['rows_of'].replace('_', ' ')} | {found['reader']} | {state} |"
        )
    return [
        *lines,
        "",
        "Retention is 1 − KL(tuned‖exported) / KL(tuned‖base): 1 is the tuned model itself, 0 is as far from it as the "
        "base model. Where the tuning has changed too little to tell, there is no figure.",
        "",
    ]


def scores(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """What lm-eval has found, a line for each metric; its standard errors beside their metrics."""
    lines = [
        f"| {one['task']} | {metric} | {score:.4f} | {_error_of(one['scores'], metric)} | {one['rows']} | "
        f"{one['num_fewshot']} | {one['scored_by']}, {one['dtype']} |"
        for one in outcomes
        if one.get("scores")
        for metric, score in one["scores"].items()
        if "_stderr," not in metric
    ]
    if not lines:
        return []
    head = [
        "| task | metric | score | standard error | rows | examples shown | measured by |",
        "|---|---|---|---|---|---|---|",
    ]
    return ["## Scores", "", *head, *lines, ""]


def _error_of(scores: dict[str, float], metric: str) -> str:
    name, _, rule = metric.partition(",")
    found = scores.get(f"{name}_stderr,{rule}")
    return "–" if found is None else f"{found:.4f}"


def held_out(record: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Metrics of held-out rows, before and after."""
    before, after = result.get("eval_before"), result.get("eval_after")
    if not after:
        return []
    return [
        "## Held-out evaluation",
        "",
        "| | before | after |",
        "|---|---|---|",
        *(f"| {name} | {_figure(before, name)} | {_figure(after, name)} |" for name in after),
        "",
        f"Over {record['data']['eval']['rows']} rows that were not trained on.{_chosen(result)}",
        "",
    ]


def handed_back(result: dict[str, Any]) -> int:
    """The step whose weights these are."""
    best = result["best"]
    return int(best["step"] if best and best["restored"] else result["steps"])


def _chosen(result: dict[str, Any]) -> str:
    step = handed_back(result)
    words = f" Training ended early, after step {result['steps']}." if result["stopped_early"] else ""
    if step != result["steps"]:
        words += f" The weights are those after step {step}, the best by {result['best']['metric']}."
    return words


def _figure(values: dict[str, float] | None, name: str) -> str:
    return f"{values[name]:.4g}" if values and name in values else "–"


def lineage(ancestors: Sequence[dict[str, Any]]) -> list[str]:
    """The jobs before this one, nearest first, with what they can be told apart by."""
    if not ancestors:
        return []
    lines = [
        "## Lineage",
        "",
        "It was trained on what these jobs have made, nearest first. `run_record.json` has their hashes in full.",
        "",
        "| job | stage | method | training data | spec | weights |",
        "|---|---|---|---|---|---|",
    ]
    for one in ancestors:
        data = ", ".join(f"`{digest[:12]}…`" for digest in one["data"]["train"]) or "–"
        weights = next((f"`{digest[:12]}…`" for name, digest in one["weights"].items() if "safetensors" in name), "–")
        lines.append(
            f"| `{one['job']}` | {one['stage']} | {one['method']} | {data} | `{one['spec_sha256'][:12]}…` | {weights} |"
        )
    return [*lines, ""]


def reward_models(models: Sequence[dict[str, Any]]) -> list[str]:
    """The reward models whose scores it learned from."""
    if not models:
        return []
    lines = ["## Reward models", ""]
    for one in models:
        source = one["model"].get("id") or one["model"].get("path") or "a folder"
        what = f"`{one['job']}`, weights `{one['sha256'][:12]}…`" if one["job"] else source
        lines.append(f"- `{one['reward']}`: {what}")
    return [*lines, ""]


def answers(samples: Sequence[dict[str, Any]], step: int) -> list[str]:
    """Some prompts with the answers of the base model and of this one."""
    by_step = {entry["step"]: entry["samples"] for entry in samples}
    tuned, base = by_step.get(step), by_step.get(0)
    if not tuned:
        return []
    lines = ["## Samples", ""]
    for place, after in enumerate(tuned[:CARD_SAMPLES]):
        shown = {"Prompt": after["prompt"], "Expected": after["reference"]}
        if base is not None and step > 0:
            shown["Base model"] = base[place]["completion"]
        for name, text in (shown | {"This model": after["completion"]}).items():
            if text is not None:
                lines += [f"{name}:", "", *_quoted(text), ""]
        lines += ["---", ""]
    return lines[:-2]


def _quoted(text: str) -> list[str]:
    """As an indented block, in which nothing is markup."""
    cut = text if len(text) <= CARD_CHARS else text[:CARD_CHARS] + "…"
    return [f"    {line}" for line in cut.splitlines()] or ["    (nothing)"]
