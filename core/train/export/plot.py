"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def plot_loss(metrics: Sequence[dict[str, float]], evaluations: Sequence[dict[str, float]], path: Path) -> None:
    """Training loss by optimizer step, and held-out loss where it was measured, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    marker = "o" if len(metrics) == 1 else ""
    axes.plot(
        [m["step"] for m in metrics], [m["loss"] for m in metrics], linewidth=1.2, marker=marker, label="training"
    )
    if evaluations:
        steps, losses = [e["step"] for e in evaluations], [e["eval_loss"] for e in evaluations]
        axes.plot(steps, losses, "o--", linewidth=1.0, label="held out")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (mean over label tokens)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
