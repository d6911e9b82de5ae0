"""The model card that goes with the weights (huggingface.co/docs/hub/model-cards)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import yaml

from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.method import OFT
from core.spec.axes.stage import Head
from core.spec.job import JobSpec
from core.spec.settled import method_of
from core.train.export.card.handed import Handed, handed
from core.train.export.card.sections import (
    answers,
    formats_kept,
    handed_back,
    held_out,
    how_to_ask,
    lineage,
    reward_models,
    scores,
)
from core.train.stage import Stage


def base_name(source: dict[str, Any], model_dir: str) -> str:
    """What to call the base model: its hub id, else the folder it was read from."""
    name = source.get("id")
    return str(name) if isinstance(name, str) and name and not source.get("file") else model_dir


def model_card(
    spec: JobSpec,
    record: dict[str, Any],
    result: dict[str, Any],
    stage: Stage,
    *,
    base: str,
    samples: Sequence[dict[str, Any]] = (),
    exported: dict[str, Any] | None = None,
) -> str:
    """README.md with metadata the hub understands, and code that loads what lies beside it: the adapter, the model, or
    the format that `exported` (an entry of the result's `export`) says was made of them."""
    if exported is not None and exported["type"] == "lm_eval":
        return "\n".join(scores([exported]))
    what = handed(spec, record, head=stage.head, base=base, exported=exported)
    lines = [
        "---",
        yaml.safe_dump(_metadata(spec, record, stage, what, base), sort_keys=False).strip(),
        "---",
        "",
        f"# {spec.name or 'Fine-tuned ' + what.kind}",
        "",
        f"{stage.title} ({what.how}) of `{base}`, made by eft {record['environment']['versions']['eft']}.",
        "",
        "## How to load",
        "",
        what.load,
        "",
        *(how_to_ask(record["data"]["rendering"]) if stage.head == "tokens" else [_HOW_TO_SCORE[stage.head], ""]),
        *formats_kept(result.get("export", ()) if exported is None else [exported]),
        *(scores(result.get("export", ())) if exported is None else []),
        *_training(spec, record, result),
        *held_out(record, result),
        *lineage(record.get("lineage") or []),
        *reward_models(record.get("reward_models") or []),
        *answers(samples, handed_back(result)),
        "## Limits",
        "",
        "It inherits the licence, the abilities and the biases of its base model, and knows of its data only what the "
        "figures above say. `run_record.json` of the job holds versions, seeds and hashes.",
        "",
    ]
    return "\n".join(lines)


def _metadata(spec: JobSpec, record: dict[str, Any], stage: Stage, what: Handed, base: str) -> dict[str, Any]:
    adapter = ["oft" if isinstance(method_of(spec), OFT) else "lora"] if what.library == "peft" else []
    meta: dict[str, Any] = {
        "library_name": what.library,
        "pipeline_tag": _PIPELINES[stage.head],
        "base_model_relation": what.relation,
        "tags": ["eft", stage.name, *adapter],
    }
    if not base.startswith(("/", ".")):
        meta["base_model"] = base
    if datasets := [one["id"] for one in record["data"]["train"].get("sources", ()) if one.get("type") == "hub"]:
        meta["datasets"] = list(dict.fromkeys(datasets))
    return meta


def _training(spec: JobSpec, record: dict[str, Any], result: dict[str, Any]) -> list[str]:
    train, training, environment = record["data"]["train"], spec.training, record["environment"]
    return [
        "## How it was trained",
        "",
        "| | |",
        "|---|---|",
        f"| rows | {train['rows']} (`{train['format']}`){_whence(train)} |",
        f"| steps | {result['steps']} of {_batch(spec)} "
        f"× {training.gradient_accumulation_steps}, {result['total_tokens']} tokens |",
        f"| optimizer | {spec.optimizer.type}, peak learning rate {spec.optimizer.learning_rate:g}, "
        f"{spec.schedule.type} schedule |",
        f"| precision | {environment['precision']} on {environment['device']}{_why(record)} |",
        f"| seed | {training.seed} |",
        f"| training loss | {result['train_loss']:.4f} (mean over steps) |",
        f"| time | {result['train_seconds']:.0f} s, {result['tokens_per_second']:.0f} tokens/s |",
        "",
    ]


def _why(record: dict[str, Any]) -> str:
    """The reason where it is not the precision that was asked for."""
    notice = record["precision"]["notice"]
    return f" ({notice.partition(': computing in')[0]})" if notice else ""


def _whence(train: dict[str, Any]) -> str:
    """Where the training rows are from: each source's file by its hash, or a hub's data set by its commit."""
    told = []
    for source in train.get("sources") or [{"sha256": [train["sha256"]]}]:
        weight = f", weight {source['weight']:g}" if "weight" in source else ""
        if source.get("type") == "hub":
            told.append(f"`{source['id']}` at commit `{source['commit'][:12]}`{weight}")
        else:
            hashes = ", ".join(f"`{digest[:16]}…`" for digest in source["sha256"])
            told.append(f"SHA-256 {hashes}{weight}")
    return "".join(f", {one}" for one in told)


def _batch(spec: JobSpec) -> str:
    match spec.batching:
        case Rows():
            return f"{spec.training.per_device_train_batch_size} rows"
        case Tokens(tokens_per_batch=tokens):
            return f"at most {tokens} tokens, padding counted,"
        case Packed(tokens_per_batch=tokens):
            return f"at most {tokens} tokens, packed,"
        case _ as never:
            assert_never(never)


_PIPELINES: dict[Head, str] = {
    "tokens": "text-generation",
    "score": "text-classification",
    "labels": "token-classification",
}
_HOW_TO_SCORE: dict[Head, str] = {
    "tokens": "",
    "score": "The one logit of a row is its score: larger for a better answer. Give the model a prompt with its whole "
    "answer, end token included, rendered as in training.",
    "labels": "Logits of two labels, `wrong` (0) and `right` (1). They count at the last token of the separator (a "
    "line break) behind each step of a solution; prompt, steps and separators are tokenised apart.",
}
