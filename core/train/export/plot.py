"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from core.spec.axes.evaluation.generation import PREFIX

SCORES = 3
"""Metrics of generated answers that are drawn at most, in the order of the job."""

WHOLE = ("eval_exact_match", "eval_reward")
"""Other figures that are drawn."""


def plot_loss(
    metrics: Sequence[dict[str, float]],
    evaluations: Sequence[dict[str, float]],
    to: Path | BinaryIO,
    *,
    unit: str,
    chosen: int | None = None,
) -> None:
    """Write a PNG: training loss by optimizer step; held-out loss where it was measured, with a line at the base
    model's and a star at the step whose weights were handed back (`chosen`); exact match and metrics of generated
    answers on an axis of their own. `unit`: what the loss is a mean over."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.add_axes((0.08, 0.11, 0.84, 0.85))  # a layout engine would draw everything twice
    marker = "o" if len(metrics) == 1 else ""
    with_loss = [m for m in metrics if "loss" in m]  # a lost one has none
    axes.plot(
        [m["step"] for m in with_loss], [m["loss"] for m in with_loss], linewidth=1.2, marker=marker, label="training"
    )
    at = [e["step"] for e in evaluations]
    if evaluations and "eval_loss" in evaluations[0]:
        held_out = [e["eval_loss"] for e in evaluations]
        axes.plot(at, held_out, "o--", linewidth=1.0, label="held out")
        if at[0] == 0 and len(at) > 1:
            axes.axhline(held_out[0], color="tab:gray", linestyle=":", linewidth=1.0, label="base model, held out")
        if chosen in at:
            axes.plot(chosen, held_out[at.index(chosen)], "*", color="tab:red", markersize=13, label="exported")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylabel(f"loss (mean over {unit})")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    scores = [name for name in evaluations[0] if name.startswith(PREFIX)][:SCORES] if evaluations else []
    handles, labels = axes.get_legend_handles_labels()
    if len(evaluations) > 1 and (shown := [*scores, *(name for name in WHOLE if name in evaluations[0])]):
        share = axes.twinx()
        for name, color in zip(shown, ("green", "purple", "brown", "olive"), strict=False):
            label = name.removeprefix(PREFIX).removeprefix("eval_").replace("_", " ")
            values = [evaluation[name] for evaluation in evaluations]
            share.plot(at, values, "s:", color=f"tab:{color}", linewidth=1.0, label=label)
        if "eval_reward" in shown:
            share.set_ylabel("mean reward, held out")
        else:
            share.set_ylabel("share of rows, or mean score" if scores else "exact match (share of rows)")
            if all(0 <= evaluation[name] <= 1 for evaluation in evaluations for name in shown):
                share.set_ylim(0, 1.02)
        more, words = share.get_legend_handles_labels()
        handles, labels = [*handles, *more], [*labels, *words]
    axes.legend(handles, labels, loc="upper right")
    figure.savefig(to, pil_kwargs={"compress_level": 1})  # smaller files take longer than they are worth
