"""The artifacts folder of a run, and its list."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from core.base.files import sha256, sync
from core.spec.axes.quantization import QAT
from core.spec.run.folder import ARTIFACTS, RUN_RECORD_FILE
from core.spec.settled import method_of
from core.train.export.card.card import base_name, model_card
from core.train.export.formats.subject import Subject
from core.train.export.formats.write import WITHHELD, write_formats
from core.train.export.handed_back import check_saved
from core.train.export.plot import plot_loss
from core.train.export.retention import RowsOf, probes
from core.train.export.weights import save_weights
from core.train.model.heads import causal_base, has_head
from core.train.model.load import saved_dtype
from core.train.rollout.loader import merge_rollouts
from core.train.run import Run
from core.train.stage import Stage
from core.train.state import TrainerState


@dataclass(frozen=True, slots=True)
class Trained:
    """A run that has come to its end: the model, and all that is known of how it came about."""

    model: nn.Module
    tokenizer: Any
    stage: Stage
    record: dict[str, Any]
    result: dict[str, Any]
    state: TrainerState
    rows: Sequence[Tensor]
    """Rows of ids on which exported formats are compared."""
    rows_of: RowsOf
    """Whether these rows are held out."""
    calibration: Sequence[Tensor]
    """Rows of ids that it was trained on."""


def write_artifacts(run: Run, trained: Trained) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write everything the job hands back, synced: its result, with what became of each format of `spec.export` (see
    core/train/export/formats/write.py), and the list of files: path below artifacts/, bytes, sha256, kind."""
    spec, model, tokenizer = run.spec, trained.model, trained.tokenizer
    record, result, state = trained.record, trained.result, trained.state
    folder = run.folder / ARTIFACTS
    if folder.exists():
        shutil.rmtree(folder)  # of an attempt in this same folder that died while saving
    folder.mkdir(parents=True)
    source, dtype = run.order.model_source, saved_dtype(run.model_dir)
    base = base_name(source, run.order.model_dir)
    if has_head(model):  # what the model takes for padding
        pad = causal_base(model).config.get_text_config().pad_token_id
        tokenizer.pad_token = None if pad is None else tokenizer.convert_ids_to_tokens(pad)
    card = partial(model_card, spec, record, result, trained.stage, base=base, samples=state.samples)
    revision = source.get("commit") if source.get("type") == "hub" else None
    weights = save_weights(model, tokenizer, method_of(spec), folder, base=base, revision=revision, dtype=dtype)
    compared = check_saved(model, method_of(spec), weights, spec.stage.head)
    record |= {"handed_back": {"folder": weights.name, "compared": compared}}
    if spec.export:
        whole: Any = model
        vocabulary = whole.get_input_embeddings().weight.shape[0]
        subject = Subject(
            whole,
            method_of(spec),
            tokenizer,
            model_dir=run.model_dir,
            artifacts=folder,
            trained_dir=weights,
            cache_dir=run.cache_dir,
            rows=probes(trained.rows, vocabulary),
            rows_of=trained.rows_of,
            calibration=trained.calibration,
            name=spec.name or f"{base} tuned",
            between=run.check_stop,
            rounded=spec.quantization if isinstance(spec.quantization, QAT) else None,
            task_folder=run.task_folder,
        )
        outcomes = write_formats(spec.export, subject, run.events)
        result = result | {"export": outcomes}
        for outcome in outcomes:
            if (folder / outcome["folder"]).is_dir():
                (folder / outcome["folder"] / "README.md").write_text(card(exported=outcome), encoding="utf-8")
    (weights / "README.md").write_text(
        model_card(spec, record, result, trained.stage, base=base, samples=state.samples), encoding="utf-8"
    )
    lines = [json.dumps(m) for m in (*state.metrics, *state.evaluations)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if state.samples:
        rows = [{"step": at["step"], **one} for at in state.samples for one in at["samples"]]
        _write_lines(folder / "samples.jsonl", rows)
    if state.answers:
        _write_lines(folder / "answers.jsonl", state.answers)
    merge_rollouts([run.folder, *map(Path, run.order.resume_from)], folder / "rollouts.jsonl")
    record_text = json.dumps(record | {"result": result}, indent=2, ensure_ascii=False)
    (folder / RUN_RECORD_FILE).write_text(record_text + "\n", encoding="utf-8")
    best = result["best"]
    chosen = best["step"] if best and best["restored"] else None
    plot_loss(state.metrics, state.evaluations, folder / "loss.png", unit=trained.stage.loss_unit, chosen=chosen)
    return result, list_files(folder)


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def list_files(folder: Path) -> list[dict[str, Any]]:
    """All files below the artifacts, synced: path, bytes, sha256, kind."""
    return [_entry(folder, path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _entry(folder: Path, path: Path) -> dict[str, Any]:
    sync(path)
    return {
        "path": path.relative_to(folder).as_posix(),
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "kind": _kind(path.relative_to(folder)),
    }


def _kind(path: Path) -> str:
    if path.parts[0] == WITHHELD:
        return "withheld"
    match path.parent.name, path.name:
        case _, "loss.png":
            return "plot"
        case _, "metrics.jsonl":
            return "metrics"
        case _, "samples.jsonl" | "answers.jsonl" as name:
            return name.removesuffix(".jsonl")
        case _, "rollouts.jsonl":
            return "rollouts"
        case _, name if name == RUN_RECORD_FILE:
            return "run_record"
        case _, "README.md":
            return "card"
        case "adapter" | "vllm", name if name.startswith("adapter_"):
            return "adapter"
        case _, name if name.endswith(".gguf"):
            return "gguf"
        case "model" | "merged" | "fp8" | "gptq" | "awq" | "mxfp4" | "torchao_int8" | "torchao_int4", name if (
            name.startswith("model")
            or name
            in (
                "config.json",
                "generation_config.json",
            )
        ):
            return "model"
        case _:
            return "tokenizer"
