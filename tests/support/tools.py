"""The libraries that exports need, installed once a machine: `python -m tests.support.tools`."""

from __future__ import annotations

from pathlib import Path

from core.tools import ToolSet
from core.train.tools.install import Tools, install
from tests.support.models import HOME

CACHE = HOME / "cache"
"""Stands for the cache of a data root. It is everybody's: nothing but tools is written there."""
TRACKERS: tuple[ToolSet, ...] = ("tensorboard", "mlflow", "wandb", "trackio")


def compressed_tools() -> Tools:
    """Install what reads fp8, GPTQ and AWQ folders, or answer what is there."""
    return install("compressed", CACHE, offline=False, field="export")


def torchao_tools() -> Tools:
    """Install what reads int8 and int4 folders, or answer what is there."""
    return install("torchao", CACHE, offline=False, field="export")


def lm_eval_tools() -> Tools:
    """Install lm-eval, or answer what is there."""
    return install("lm_eval", CACHE, offline=False, field="export")


def math_tools() -> Tools:
    """Install math-verify, or answer what is there."""
    return install("math", CACHE, offline=False, field="stage.reward")


def task_tools() -> Tools:
    """Install reasoning-gym, or answer what is there."""
    return install("tasks", CACHE, offline=False, field="data.train")


def game_tools() -> Tools:
    """Install textarena, or answer what is there."""
    return install("games", CACHE, offline=False, field="data.train")


def tracker_tools(tracker: ToolSet) -> Tools:
    """Install one of TRACKERS, or answer what is there."""
    return install(tracker, CACHE, offline=False, field="tracking")


def gguf_tools() -> Tools:
    """Install what writes, quantises and reads GGUF files, or answer what is there."""
    install("quants", CACHE, offline=False, field="export")
    return install("gguf", Path(CACHE), offline=False, field="export")


if __name__ == "__main__":
    print(
        gguf_tools().folder,
        compressed_tools().folder,
        torchao_tools().folder,
        lm_eval_tools().folder,
        math_tools().folder,
        task_tools().folder,
        game_tools().folder,
        *(tracker_tools(tracker).folder for tracker in TRACKERS),
    )
