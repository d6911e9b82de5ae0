"""How a trial of rewards looks on a terminal, in a pipe and without colours."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from eft.terminal.output import duration
from eft.terminal.sanitize import harmless

ALIKE = 0.9
"""Share of groups without differences above which a submit is refused."""
BAR = 40


def print_trial(found: dict[str, Any], console: Console) -> None:
    """Rewards by name, and what they would teach."""
    tokens, step = found["tokens"], found["step"]
    _line(console, f"{found['prompts']} prompts of {tokens['prompt']:.0f} tokens, {found['answers']} answers")
    for name, spread in [*found["rewards"].items(), *_together(found)]:
        _line(console, f"\nreward {name}: mean {spread['mean']:.4g}, standard deviation {spread['std']:.4g}", "bold")
        _bars(spread["histogram"], console)
    alike = found["share_alike"]
    _line(
        console,
        f"\ngroups whose answers all have the same reward: {found['groups_alike']} of {found['prompts']} ({alike:.0%})",
        "red" if alike > ALIKE else "",
    )
    _line(
        console,
        f"answers of {tokens['answer']:.1f} tokens, at most {tokens['longest_answer']}; "
        f"{found['truncated']:.0%} cut off",
        "yellow" if found["truncated"] > 0.5 else "",
    )
    trained = step["train_seconds"]
    learning = "nothing to train on" if trained is None else f"{_seconds(trained)} to train"
    _line(
        console,
        f"a step: {step['prompts']} prompts, {step['answers']} answers, {step['tokens']:.0f} tokens; "
        f"{_seconds(step['rollout_seconds'])} to answer and reward, {learning}",
    )
    for one in found["examples"]:
        _line(console, f"\nline {one['line']}, reward {one['reward']:.4g}", "bold")
        _line(console, one["prompt"].strip("\n"), "dim")
        _line(console, one["answer"].strip("\n"))
    if alike > ALIKE:
        _line(
            console,
            "\nthese rewards teach next to nothing, and a submit is refused: use easier or harder prompts, raise "
            "stage.num_generations or stage.temperature, add a reward that tells answers apart, or set stage.force",
            "bold red",
        )


def _together(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [("in all, weighted", found["reward"])] if len(found["rewards"]) > 1 else []


def _bars(histogram: list[dict[str, Any]], console: Console) -> None:
    most = max(part["answers"] for part in histogram)
    for part in histogram:
        bar = "█" * round(BAR * part["answers"] / most) or ("▏" if part["answers"] else "")
        value = f"{part['from']:.4g}" if part["from"] == part["to"] else f"{part['from']:.4g} – {part['to']:.4g}"
        console.print(Text.assemble(f"  {value:>17} ", (bar, "cyan"), f" {part['answers']}"), soft_wrap=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _line(console: Console, words: str, style: str = "") -> None:
    console.print(Text(harmless(words), style=style), soft_wrap=True)
