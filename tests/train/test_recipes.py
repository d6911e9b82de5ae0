"""The recipes really train: each job file of examples/recipes, cut to two steps of a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from core.spec.axes.data import Single
from core.spec.load import load_yaml
from core.spec.run.exit_codes import EXIT_OK
from core.train.hub.model_cache import ModelCache
from core.train.rollout.sandboxed.tasks import prepare_problems
from tests.support.tools import CACHE, game_tools, task_tools
from tests.support.trainer import ROOT, events, log, run, write_run
from tests.train.test_reward_task import linked

RECIPES = ROOT / "examples" / "recipes"
RANKS = {"two-gpus"}
"""Several processes: tests/train/test_ranks.py."""
LIBRARIES = {"task": task_tools, "game": game_tools}
"""Recipes whose problems and rewards are those of a library."""


def absolute(part: Any, cache: Path) -> Any:
    """Sources beside the job file, as `eft submit` finds them; problems and games as a preparation makes them."""
    match part:
        case str() if part.endswith(".jsonl"):
            return str((RECIPES / part).resolve())
        case {"type": "task" | "game"}:
            source: Any = TypeAdapter(Single).validate_python(part)
            models = ModelCache(cache)
            found, _ = prepare_problems(source, "data", models, CACHE, offline=True, told=lambda *_: None)
            return str(found[0])
        case dict():
            return {key: absolute(value, cache) for key, value in part.items()}
        case list():
            return [absolute(value, cache) for value in part]
        case _:
            return part


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_trains(path: Path, tmp_path: Path, tiny_dir: Path) -> None:
    job = load_yaml(path.read_bytes())
    assert path.read_text().startswith("# ") and job["name"] == path.stem
    if path.stem in RANKS:
        assert job["resources"]["gpus"] > 1
        return
    if path.stem in LIBRARIES:
        LIBRARIES[path.stem]()
    training = job["training"] | {"max_steps": 2}
    axes = {key: value for key, value in job.items() if key not in ("version", "name", "model", "data", "training")}
    folder = write_run(
        tmp_path / "run",
        tiny_dir,
        RECIPES / "text.jsonl",
        data=absolute(job["data"], tmp_path / "models"),
        training=training,
        cache_dir=linked(tmp_path / "cache") if path.stem in LIBRARIES else tmp_path / "cache",
        **axes,
    )
    assert run(folder) == EXIT_OK, f"{events(folder, 'error')}\n{log(folder)}"
    (result,) = events(folder, "result")
    assert result["result"]["steps"] == 2
    names = {file.parent.name for file in (folder / "artifacts").glob("*/*model.safetensors")}
    assert names == {"adapter", "merged"} if job.get("export") else names == {"adapter"}
