"""What a run that resumes must have in common with where it was before: one pure table of rules.

`compare` is asked with what the checkpoint remembers and what is so now. Paths, node and slot are not compared: they
change nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from core.spec.differences import differences

Verdict = Literal["allow", "warn", "refuse"]
Result = Literal["same", "last bits", "other"]


@dataclass(frozen=True, slots=True)
class DriftRule:
    """What a difference means for a run that resumes."""

    field: str
    """Entry of what a checkpoint remembers; below an object, the path in it. A path covers all paths below it."""
    words: str
    verdict: Verdict
    result: Result
    """The weights at the end, compared with an undisturbed run: the same bits, other last bits, or another result."""
    why: str


RULES = (
    DriftRule(
        "base", "commit or hash of the base model", "refuse", "other", "an adapter fits the weights it was trained over"
    ),
    DriftRule(
        "data.train", "hashes of the training files", "refuse", "other", "the place in the data would be another"
    ),
    DriftRule(
        "data.eval", "hashes of the held-out files", "warn", "same", "evaluations cannot be compared with those before"
    ),
    DriftRule("ranks", "number of ranks", "refuse", "other", "each rank has a part of the checkpoint of its own"),
    DriftRule("spec.checkpoint", "which checkpoints are kept", "allow", "same", "training does not depend on it"),
    DriftRule(
        "spec.evaluation.per_device_eval_batch_size",
        "rows of an evaluation pass",
        "allow",
        "same",
        "training does not depend on it",
    ),
    DriftRule("spec.evaluation", "evaluation", "warn", "same", "the best checkpoint may be another"),
    DriftRule("spec.export", "formats", "allow", "same", "made after the training"),
    DriftRule("spec.tracking", "trackers", "allow", "same", "training does not depend on it"),
    DriftRule(
        "spec.memory",
        "placement in memory",
        "allow",
        "same",
        "the same arithmetic; on a GPU, the optimizer in host memory rounds in another way",
    ),
    DriftRule("spec.resources", "slots, time limit", "allow", "same", "the number of ranks has a rule of its own"),
    DriftRule(
        "spec.batching.tokens_per_batch",
        "tokens of a pass",
        "allow",
        "last bits",
        "a step has the same rows, and its sums are cut in another way",
    ),
    DriftRule(
        "spec.training.per_device_train_batch_size",
        "rows of a pass",
        "allow",
        "last bits",
        "a step has the same rows, and its sums are cut in another way",
    ),
    DriftRule(
        "spec.training.gradient_accumulation_steps",
        "passes of a step",
        "allow",
        "last bits",
        "as above; a step of another size is refused",
    ),
    DriftRule(
        "spec.training.precision", "precision asked for", "allow", "same", "what it came to has a rule of its own"
    ),
    DriftRule(
        "spec.training.attention",
        "attention kernel asked for",
        "allow",
        "same",
        "what it came to has a rule of its own",
    ),
    DriftRule(
        "spec.training.compile",
        "`training.compile`",
        "warn",
        "last bits",
        "compiled blocks round and sum in another order",
    ),
    DriftRule(
        "spec.training",
        "duration, lengths, seed and the rest of `training`",
        "warn",
        "other",
        "the steps that follow are others",
    ),
    DriftRule("spec", "any other field of training", "warn", "other", "the steps that follow are others"),
    DriftRule(
        "code", "code of the trainer", "warn", "last bits", "another version of eft may compute in another order"
    ),
    DriftRule("versions.safetensors", "safetensors", "allow", "same", "it reads and writes bytes"),
    DriftRule(
        "versions",
        "torch, transformers, peft, tokenizers, numpy, Python, eft",
        "warn",
        "last bits",
        "kernels and the order of sums belong to a version",
    ),
    DriftRule(
        "driver", "driver and runtime of the GPU", "warn", "last bits", "libraries of matrix products come with it"
    ),
    DriftRule("device", "kind of device", "warn", "last bits", "CPU and GPU sum in another order"),
    DriftRule("device_name", "card", "warn", "last bits", "kernels are chosen by the card"),
    DriftRule("arch", "architecture", "warn", "last bits", "kernels are built for it"),
    DriftRule("precision", "precision of products", "warn", "other", "products are rounded in another way"),
    DriftRule("weights_dtype", "dtype of the frozen weights", "warn", "other", "weights are rounded in another way"),
    DriftRule("attention", "attention kernel", "warn", "last bits", "it sums in another order"),
    DriftRule("products", "how a CPU computes 16-bit products", "warn", "last bits", "sums are made in another order"),
    DriftRule("tf32", "TF32", "warn", "other", "products are rounded in another way"),
    DriftRule(
        "compiled",
        "compiled blocks: their graphs, the compiler, and which of them are not compiled",
        "warn",
        "last bits",
        "other code rounds and sums in another order",
    ),
    DriftRule("threads", "CPU threads", "warn", "last bits", "sums are cut by the number of threads"),
)
"""The first rule that covers a path decides. What no rule covers is not compared."""
IGNORED = (
    "spec.name",
    "spec.tags",
    "spec.note",
    "spec.priority",
    "spec.after",
    "spec.notify",
    "spec.model",
    "spec.data",
)
"""Fields of the spec that change nothing, or whose content has a rule of its own."""


@dataclass(frozen=True, slots=True)
class Drifted:
    """A path on which then and now differ."""

    path: str
    then: Any
    now: Any
    rule: DriftRule

    @property
    def words(self) -> str:
        return f"{self.path.removeprefix('versions.')} was {_shown(self.then)}, is {_shown(self.now)}"

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "verdict": self.rule.verdict, "result": self.rule.result, "words": self.words}


def compare(then: Mapping[str, Any], now: Mapping[str, Any], but: Collection[str] = ()) -> list[Drifted]:
    """Where two states differ, by the rules. `but`: paths that a person has changed on purpose, with all below them.
    What only one of them knows, at the top, is not compared: an earlier version did not remember it."""
    both = {key for key in then.keys() & now.keys() if then[key] is not None and now[key] is not None}
    known: tuple[Mapping[str, Any], ...] = tuple({key: one[key] for key in both} for one in (then, now))
    found = []
    for path, (before, after) in differences(known).items():
        if covered(path, IGNORED) or covered(path, but):
            continue
        rule = next((rule for rule in RULES if covered(path, (rule.field,))), None)
        if rule is not None:
            found.append(Drifted(path, before, after, rule))
    return found


def covered(path: str, fields: Collection[str]) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in fields)


def worst(found: Collection[Drifted]) -> Result:
    """What all of them together mean for the weights at the end."""
    order: tuple[Result, ...] = ("same", "last bits", "other")
    return max((one.rule.result for one in found), key=order.index, default="same")


def _shown(value: Any) -> str:
    text = "unset" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def page() -> str:
    """docs/drift.md, from the rules."""
    lines = [
        "# Resuming elsewhere",
        "",
        "Generated from `core/plan/drift.py` by `make docs`.",
        "",
        "A checkpoint remembers where and from what it was made. A run that resumes compares that with what it finds:",
        "",
        "- **allow**: it continues. The `resumed` event lists the difference.",
        "- **warn**: it continues, and the notice `drift` says what differs.",
        "- **refuse**: the job fails with `drift_refused` before the first step.",
        "",
        "The last column says what becomes of the weights, compared with a run that was not disturbed: the same to the",
        "bit, different in the last bits, or another result. Without any of these differences, a resumed run is the",
        "same to the bit. Paths, node and slot do not matter. A field that `checkpoint.resume_from` allows to change",
        "([checkpoints.md](checkpoints.md)) is not compared. The first row that fits counts.",
        "",
        "| differs | entry | verdict | why | result |",
        "|---|---|---|---|---|",
    ]
    results = {"same": "the same", "last bits": "last bits", "other": "another"}
    for rule in RULES:
        lines.append(f"| {rule.words} | `{rule.field}` | {rule.verdict} | {rule.why} | {results[rule.result]} |")
    return "\n".join(lines) + "\n"
