"""The model card that goes with the weights (huggingface.co/docs/hub/model-cards)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, assert_never

import yaml

from core.spec.axes.batching import Packed, Rows, Tokens
from core.spec.axes.method import OFT, Full, LoRA, QLoRA, TrainedPart
from core.spec.axes.quantization import QAT
from core.spec.axes.stage import Head
from core.spec.job import JobSpec
from core.spec.settled import method_of
from core.train.model.heads import CLASSES, LABELS
from core.train.stage import Stage

CARD_SAMPLES, CARD_CHARS = 5, 600


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
    method = method_of(spec)
    match method:
        case LoRA() | QLoRA() | OFT():
            packed = None if isinstance(spec.quantization, QAT) else record["quantization"]
            over = f" over {packed['format']} weights" if packed else ""
            how, kind = f"{_adapter_words(method)}{over}", "adapter"
            library, relation, load = "peft", "adapter", _load_adapter(stage.head).format(base=base)
            if exported is not None:
                if "merge_onto" in exported:
                    original = exported["merge_onto"] == "original"
                    how += f"; merged onto {'its original weights' if original else 'the weights it was trained over'}"
                how += f", in {exported['dtype']}" if "dtype" in exported else ""
                kind, library, relation, load = "model", "transformers", "finetune", _load_model(stage.head)
        case Full(train=part):
            how, kind = "full fine-tuning" if part is None else f"fine-tuning of {_part(part)}", "model"
            library, relation, load = "transformers", "finetune", _load_model(stage.head)
        case _ as never:
            assert_never(never)
    if isinstance(spec.quantization, QAT):
        how += f", rounded to {rounding_of(spec.quantization)} in training"
        if exported is None:
            load += f"\n\n{_UNROUNDED.format(weights=spec.quantization.weights, kind=kind)}"
    if exported is not None and exported["type"] == "gguf":
        how += f"; GGUF, {exported['quantization']}"
        library, relation = "llama.cpp", "quantized"
        load = _LOAD_GGUF.format(file=f"model-{exported['quantization']}.gguf")
    if exported is not None and exported["type"] in _PACKED:
        words, library, load = _PACKED[exported["type"]]
        if exported.get("as_trained"):
            words = f"{exported['bits']}-bit integers, their inputs in 8 bits, as they were trained"
        how, relation = f"{how}; linear layers in {words}", "quantized"
    if exported is not None and exported["type"] == "lm_eval":
        return _scored(exported)
    if exported is not None and exported["type"] == "vllm":
        kind, library, relation = "adapter", "peft", "adapter"
        load = _LOAD_VLLM.format(base=base, rank=exported.get("max_lora_rank", "RANK"))
    meta: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": _PIPELINES[stage.head],
        "base_model_relation": relation,
        "tags": ["eft", stage.name, *(["oft" if isinstance(method, OFT) else "lora"] if library == "peft" else [])],
    }
    if not base.startswith(("/", ".")):
        meta["base_model"] = base
    if datasets := [one["id"] for one in record["data"]["train"].get("sources", ()) if one.get("type") == "hub"]:
        meta["datasets"] = list(dict.fromkeys(datasets))
    data, training = record["data"], spec.training
    lines = [
        "---",
        yaml.safe_dump(meta, sort_keys=False).strip(),
        "---",
        "",
        f"# {spec.name or 'Fine-tuned ' + kind}",
        "",
        f"{stage.title} ({how}) of `{base}`, made by eft {record['environment']['versions']['eft']}.",
        "",
        "## How to load",
        "",
        load,
        "",
        *(_how_to_ask(record["data"]["rendering"]) if stage.head == "tokens" else [_HOW_TO_SCORE[stage.head], ""]),
        *_exported(result.get("export", ()) if exported is None else [exported]),
        *(_scores(result.get("export", ())) if exported is None else []),
        "## How it was trained",
        "",
        "| | |",
        "|---|---|",
        f"| rows | {data['train']['rows']} (`{data['train']['format']}`){_whence(data['train'])} |",
        f"| steps | {result['steps']} of {_batch(spec)} "
        f"× {training.gradient_accumulation_steps}, {result['total_tokens']} tokens |",
        f"| optimizer | {spec.optimizer.type}, peak learning rate {spec.optimizer.learning_rate:g}, "
        f"{spec.schedule.type} schedule |",
        f"| precision | {record['environment']['precision']} on {record['environment']['device']}{_why(record)} |",
        f"| seed | {training.seed} |",
        f"| training loss | {result['train_loss']:.4f} (mean over steps) |",
        f"| time | {result['train_seconds']:.0f} s, {result['tokens_per_second']:.0f} tokens/s |",
        "",
    ]
    before, after = result.get("eval_before"), result.get("eval_after")
    if after:
        lines += ["## Held-out evaluation", "", "| | before | after |", "|---|---|---|"]
        lines += [f"| {name} | {_figure(before, name)} | {_figure(after, name)} |" for name in after]
        lines += ["", f"Over {data['eval']['rows']} rows that were not trained on.{_chosen(result)}", ""]
    lines += _lineage(record.get("lineage") or []) + _scored_by(record.get("reward_models") or [])
    lines += _answers(samples, _handed_back(result))
    lines += [
        "## Limits",
        "",
        "It inherits the licence, the abilities and the biases of its base model, and knows of its data only what the "
        "figures above say. `run_record.json` of the job holds versions, seeds and hashes.",
        "",
    ]
    return "\n".join(lines)


def _adapter_words(method: LoRA | QLoRA | OFT) -> str:
    match method:
        case OFT(r=None):
            return f"OFT, blocks of {method.oft_block_size or 32}"
        case OFT(r=r):
            return f"OFT, {r} blocks"
        case LoRA(r=r, lora_alpha=alpha) | QLoRA(r=r, lora_alpha=alpha):
            began = f", initialised by `{method.init_lora_weights}` and exported with rank {2 * r}"
            words = f"{'DoRA' if method.use_dora else 'LoRA'}, rank {r}, alpha {alpha:g}"
            return words + (began if method.started else "")
        case _ as never:
            assert_never(never)


def rounding_of(spec: QAT) -> str:
    """The numbers of `quantization: qat`, in words."""
    share = f" in groups of {spec.group_size}" if spec.weights == "int4" else ""
    return f"{spec.weights} weights{share} and 8-bit inputs"


def _part(part: TrainedPart) -> str:
    chosen = {"embeddings": part.embeddings, "the output head": part.head, "norms": part.norms}
    layers = [] if part.layers == "none" else [f"layers: {part.layers}"]
    return ", ".join([*layers, *(name for name, on in chosen.items() if on)])


def _lineage(ancestors: Sequence[dict[str, Any]]) -> list[str]:
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


def _scored_by(models: Sequence[dict[str, Any]]) -> list[str]:
    """The reward models whose scores it learned from."""
    if not models:
        return []
    lines = ["## Reward models", ""]
    for one in models:
        source = one["model"].get("id") or one["model"].get("path") or "a folder"
        what = f"`{one['job']}`, weights `{one['sha256'][:12]}…`" if one["job"] else source
        lines.append(f"- `{one['reward']}`: {what}")
    return [*lines, ""]


def _exported(outcomes: Sequence[dict[str, Any]]) -> list[str]:
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


def _scored(told: dict[str, Any]) -> str:
    """README.md beside the answers of a task of lm-eval."""
    return "\n".join(_scores([told]))


def _scores(outcomes: Sequence[dict[str, Any]]) -> list[str]:
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


def _how_to_ask(rendering: dict[str, Any]) -> list[str]:
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


def _why(record: dict[str, Any]) -> str:
    """The reason where it is not the precision that was asked for."""
    notice = record["precision"]["notice"]
    return f" ({notice.partition(': computing in')[0]})" if notice else ""


def _handed_back(result: dict[str, Any]) -> int:
    """The step whose weights these are."""
    best = result["best"]
    return int(best["step"] if best and best["restored"] else result["steps"])


def _chosen(result: dict[str, Any]) -> str:
    step = _handed_back(result)
    words = f" Training ended early, after step {result['steps']}." if result["stopped_early"] else ""
    if step != result["steps"]:
        words += f" The weights are those after step {step}, the best by {result['best']['metric']}."
    return words


def _answers(samples: Sequence[dict[str, Any]], step: int) -> list[str]:
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


def _figure(values: dict[str, float] | None, name: str) -> str:
    return f"{values[name]:.4g}" if values and name in values else "–"


def _load_adapter(head: Head) -> str:
    if head == "tokens":
        return _LOAD_ADAPTER
    return _LOAD_SCORING.replace("NUMBER", str(len(LABELS[head]))).replace("AutoModel", CLASSES[head].__name__)


def _load_model(head: Head) -> str:
    return _LOAD_MODEL.replace("AutoModelForCausalLM", CLASSES[head].__name__)


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
_LOAD_ADAPTER = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""

_LOAD_GGUF = """```sh
llama-server -m {file}
```

Ollama takes it as well: `FROM ./{file}` in a Modelfile. The file has the tokenizer and the chat template."""

_LOAD_VLLM = """```sh
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned=THIS_FOLDER
```

Requests name the model `tuned`."""

_LOAD_PACKED = """```sh
vllm serve THIS_FOLDER
```

SGLang takes it as well, and transformers with the package `compressed-tensors`."""

_LOAD_SCORING = """```python
from peft import PeftModel
from transformers import AutoModel, AutoTokenizer

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
base = AutoModel.from_pretrained("{base}", num_labels=NUMBER, pad_token_id=tokenizer.pad_token_id)
model = PeftModel.from_pretrained(base, folder)
```"""

_LOAD_MODEL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```"""

_UNROUNDED = (
    "It was trained to be quantised: `torchao_{weights}` is the model that was trained, and this {kind} computes "
    "without the rounding."
)
_LOAD_TORCHAO = f"With the package `torchao`:\n\n{_LOAD_MODEL}"
_PACKED = {
    "fp8": ("8-bit floats", "vllm", _LOAD_PACKED),
    "gptq": ("4 bits, by GPTQ", "vllm", _LOAD_PACKED),
    "awq": ("4 bits, by AWQ", "vllm", _LOAD_PACKED),
    "mxfp4": ("4-bit floats by GPTQ", "vllm", _LOAD_PACKED),
    "torchao_int8": ("8-bit integers", "transformers", _LOAD_TORCHAO),
    "torchao_int4": ("4-bit integers by GPTQ, their inputs in 8 bits", "transformers", _LOAD_TORCHAO),
}
"""What holds the linear layers of a quantised folder, the library of its card, and how it is loaded."""
