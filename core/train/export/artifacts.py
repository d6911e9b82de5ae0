"""The artifacts folder of a run, and its list."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from core.spec.job import JobSpec
from core.spec.run.contract import ARTIFACTS
from core.spec.settled import method_of
from core.train.base.events import EventWriter
from core.train.base.files import sha256, sync
from core.train.export.card import base_name, model_card
from core.train.export.formats import write_formats
from core.train.export.handed_back import check_saved
from core.train.export.plot import plot_loss
from core.train.export.weights import save_weights


def write_artifacts(
    run_dir: Path,
    *,
    spec: JobSpec,
    model: nn.Module,
    tokenizer: Any,
    source: dict[str, Any],
    model_dir: str,
    dtype: torch.dtype,
    record: dict[str, Any],
    result: dict[str, Any],
    metrics: Sequence[dict[str, float]],
    evaluations: Sequence[dict[str, float]],
    samples: Sequence[dict[str, Any]] = (),
    probes: Sequence[Tensor],
    events: EventWriter,
    between: Callable[[], None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write everything the job hands back, synced: its result, with what became of each format of `spec.export` (see
    core/train/export/formats.py), and the list of files: path below artifacts/, bytes, sha256, kind."""
    folder = run_dir / ARTIFACTS
    if folder.exists():
        shutil.rmtree(folder)  # of an attempt in this same folder that died while saving
    folder.mkdir(parents=True)
    base = base_name(source, model_dir)
    card = partial(model_card, spec, record, result, base=base, samples=samples)
    revision = source.get("commit") if source.get("type") == "hub" else None
    weights = save_weights(model, tokenizer, method_of(spec), folder, base=base, revision=revision, dtype=dtype)
    record |= {"handed_back": {"folder": weights.name, "compared": check_saved(model, method_of(spec), weights)}}
    (weights / "README.md").write_text(card(), encoding="utf-8")
    if spec.export:
        outcomes = write_formats(
            spec,
            model,
            tokenizer,
            folder,
            model_dir=Path(model_dir),
            probes=probes,
            events=events,
            between=between,
        )
        result = result | {"export": outcomes}
        for outcome in (one for one in outcomes if one["released"]):
            (folder / outcome["folder"] / "README.md").write_text(card(merged=outcome), encoding="utf-8")
    lines = [json.dumps(m) for m in (*metrics, *evaluations)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if samples:
        rows = [{"step": at["step"], **one} for at in samples for one in at["samples"]]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / "samples.jsonl").write_text(text, encoding="utf-8")
    record_text = json.dumps(record | {"result": result}, indent=2, ensure_ascii=False)
    (folder / "run_record.json").write_text(record_text + "\n", encoding="utf-8")
    best = result["best"]
    plot_loss(metrics, evaluations, folder / "loss.png", chosen=best["step"] if best and best["restored"] else None)
    return result, [_entry(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    sync(path)
    return {
        "path": path.relative_to(folder).as_posix(),
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "kind": _kind(path),
    }


def _kind(path: Path) -> str:
    match path.parent.name, path.name:
        case _, "loss.png":
            return "plot"
        case _, "metrics.jsonl":
            return "metrics"
        case _, "samples.jsonl":
            return "samples"
        case _, "run_record.json":
            return "run_record"
        case _, "README.md":
            return "card"
        case "adapter", name if name.startswith("adapter_"):
            return "adapter"
        case "model" | "merged", name if name.startswith("model") or name in ("config.json", "generation_config.json"):
            return "model"
        case _:
            return "tokenizer"
