"""How checks and previews of data look on a terminal, in a pipe and without colours."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from rich.console import Console
from rich.text import Text

from eft.terminal.output import size

BAR = 40
LEARNED = "bold green"
OPEN, CLOSE = "⟦", "⟧"
"""Around what is learned, where there are no colours."""


def print_check(report: dict[str, Any], console: Console) -> None:
    """What a file is, and every fault that was told."""
    what = report["format"] or "no rows"
    head = Text.assemble((report["file"], "bold"), f": {size(report['bytes'])}")
    if report.get("container"):
        head.append(f" of {report['container']}")
    head.append(f", {report['rows']} rows, {what}" if report["format"] else ", no rows we can read")
    _line(console, head)
    for ours, theirs in (report.get("columns") or {}).items():
        _line(console, Text(f"  {ours} is read from {theirs}"))
    print_notices(report, console)
    _faults(report, console)
    if report["ok"]:
        _line(console, Text("  no fault", style="green"))


def print_notices(report: dict[str, Any], console: Console, leave_out: Container[str] = ()) -> None:
    """Print a file's notices, but for the codes in `leave_out`; one that asks for an answer stands out."""
    for notice in report.get("notices") or ():
        if notice["code"] in leave_out:
            continue
        style = "bold yellow" if notice["code"] == "label_ignored" else "yellow"
        _line(console, Text.assemble(("  notice ", style), _where(notice), _safe(notice["message"])))


def print_preview(found: dict[str, Any], console: Console) -> None:
    """What training would make of a file."""
    rows, tokens = found["rows"], found.get("tokens")
    if name := found.get("file"):
        _line(console, Text(name, style="bold"))
    _line(console, Text(f"{rows['file']} rows of {found['format']}"))
    if tokens is not None:
        limit = found["max_length"]
        words = f"{rows['used']} used"
        for key, said in (
            ("truncated", f"longer than {limit} tokens ({found['truncation']})"),
            ("dropped", "left out: nothing to learn"),
            ("refused", "refused"),
            ("cut_prompts", "with a token across the end of the prompt"),
        ):
            if rows.get(key):
                words += f", {rows[key]} {said}"
        _line(console, Text(words))
        rendering = found["rendering"]
        template = rendering["family"] or ("of its own" if rendering["chat_template"] else "none")
        _line(console, Text(f"chat template: {template}; loss on {rendering['loss_on']}"))
        if "pairs" in rendering:
            _line(console, Text(f"pairs ({rendering['pairs']}): {_safe(rendering['done'])}"))
            words = f"to ask the tuned model, {_safe(rendering['ask'])}"
            if (example := rendering.get("example")) is not None:
                words += f"; for {json.dumps(example['prompt'])} it is given {_safe(json.dumps(example['sent']))}"
            _line(console, Text(words))
        _histogram(tokens, limit, console)
    if epoch := found.get("epoch"):
        share = epoch["label_tokens"] / max(1, epoch["tokens"])
        streamed = f"; streamed in {epoch['blocks']} blocks of {epoch['block_rows']} rows" if "blocks" in epoch else ""
        _line(
            console,
            Text(
                f"an epoch: {epoch['tokens']} tokens, {share:.0%} of them learned; {epoch['steps']} steps, "
                f"{epoch['padding_share']:.1%} padding; {epoch['total_steps']} steps in all{streamed}"
            ),
        )
        if shared := epoch.get("shared_tokens"):
            words = f"{shared} tokens ({shared / max(1, epoch['tokens']):.0%}) are prompts that pairs have in common"
            _line(console, Text(f"{words}: they are computed once if the model's attention allows it"))
    if (doubles := found.get("duplicates")) and doubles["rows"]:
        shown = "; ".join(f"line {one['line']} again in {_lines(one['again'])}" for one in doubles["examples"][:5])
        _line(console, Text(f"{doubles['rows']} rows are there more than once: {shown}", style="yellow"))
    print_notices(found, console)
    for sample in found.get("samples") or ():
        _sample(sample, console)
    _faults(found, console)


def print_samples(found: dict[str, Any], console: Console) -> None:
    """Answers of the base model and of the tuned one, prompt by prompt."""
    if not found["data"]:
        _line(console, Text("no samples; `evaluation.samples` asks for them"))
        return
    _line(console, Text(f"after step {found['step']} (there are: {', '.join(map(str, found['steps']))})"))
    for one in found["data"]:
        _line(console, Text(""))
        _line(console, Text(_safe(one["prompt"]).strip("\n"), style="dim"))
        for name, style in (("reference", "cyan"), ("base", "yellow"), ("tuned", LEARNED)):
            if one[name] is not None:
                _line(console, Text.assemble((f"{name:>9}  ", style), _safe(one[name]).strip("\n")))


def print_rollouts(found: dict[str, Any], console: Console) -> None:
    """Answers of a rollout with their rewards, below their prompts."""
    if found["newest"] is None:
        _line(console, Text("no rollouts; stages that learn from sampled answers keep them"))
        return
    mismatch = found["sampler_mismatch_kl"]
    words = f"answers of step {found['step']} (the newest are of step {found['newest']})"
    _line(console, Text(words if mismatch is None else f"{words}, sampler_mismatch_kl {mismatch:.2g}"))
    line = None
    for one in found["data"]:
        if one["line"] != line:
            line = one["line"]
            _line(console, Text(""))
            _line(console, Text(f"line {line}: {_safe(one['prompt'])}".strip("\n"), style="dim"))
        rewards = ", ".join(f"{name} {value:g}" for name, value in one["rewards"].items())
        words = f"  reward {one['reward']:g} ({_safe(rewards)}), advantage {one['advantage']:+.2f}, "
        words += f"{one['tokens']} tokens" + ("" if one["finished"] else ", cut off")
        _line(console, Text(words, style="cyan"))
        _line(console, Text(f"    {_safe(one['completion'])}".rstrip("\n")))
    if found["next"] is not None:
        _line(console, Text(f"there are more: --step {found['step']} --offset {found['next']}", style="yellow"))


def _histogram(tokens: dict[str, Any], limit: int, console: Console) -> None:
    _line(
        console,
        Text(
            f"tokens of a row: {tokens['shortest']} to {tokens['longest']}, median {tokens['median']}, "
            f"90 % up to {tokens['p90']}, 99 % up to {tokens['p99']}"
        ),
    )
    most = max(part["rows"] for part in tokens["histogram"])
    for part in tokens["histogram"]:
        width = round(BAR * part["rows"] / most)
        bar = Text("█" * width or ("▏" if part["rows"] else ""), style="red" if part["from"] >= limit else "cyan")
        _line(console, Text.assemble(f"  {part['from']:>7} – {part['to'] - 1:<7} ", bar, f" {part['rows']}"))


def _sample(sample: dict[str, Any], console: Console) -> None:
    words = f"line {sample['line']}: {sample['tokens']} tokens, {sample['label_tokens']} learned"
    if sample.get("cut_from"):
        words += f", cut from {sample['cut_from']}"
    if sample.get("labels"):
        words += ", steps " + ", ".join("right" if label else "wrong" for label in sample["labels"])
    _line(console, Text(""))
    _line(console, Text(words, style="bold"))
    plain = console.no_color or console.color_system is None
    text = Text()
    for part in sample["segments"]:
        if part.get("left_out"):
            text.append(f"\n… {part['left_out']} tokens …\n", style="dim")
        elif part["learned"]:
            text.append(f"{OPEN}{_safe(part['text'])}{CLOSE}" if plain else _safe(part["text"]), style=LEARNED)
        else:
            text.append(_safe(part["text"]), style="dim")
    _line(console, text)


def _faults(report: dict[str, Any], console: Console) -> None:
    for fault in report.get("faults") or ():
        _line(console, Text.assemble(("  fault ", "bold red"), _where(fault), fault["message"]))
    shown = sum(fault.get("times", 1) for fault in report.get("faults") or ())
    count = report.get("fault_count", 0)
    if count > shown:
        _line(console, Text(f"  and {count - shown} more", style="red"))


def _where(fault: dict[str, Any]) -> str:
    field, line = fault.get("field"), fault.get("line")
    if field:
        return f"{field}: "
    return f"line {line}: " if line else ""


def _lines(lines: list[int]) -> str:
    return ", ".join(map(str, lines[:5])) + (" …" if len(lines) > 5 else "")


def _safe(text: str) -> str:
    """Rows are strangers' text: nothing in it may be obeyed by a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\u{ord(char):04x}" for char in text)


def _line(console: Console, text: Text) -> None:
    console.print(text, soft_wrap=True)
