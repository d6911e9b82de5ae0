"""The eight moments of a run, one of which is its peak: what each has on the device beside what is held throughout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from core.plan.activations import Numbers, Pass, ended, passed
from core.plan.constants import BUCKET_BYTES, BUCKETS_IN_FLIGHT, PROMPT_TOKENS, SAMPLED_LOGIT_BYTES
from core.plan.device import Device
from core.plan.logits import evaluation_bytes, logits_why, logprobs_bytes, reference_bytes, training_bytes
from core.plan.memory.kept import Kept, casts_of, casts_of_block
from core.plan.memory.passes import held_out_pass, numbers_of
from core.plan.memory.result import Item
from core.plan.models.scorers import scoring_bytes
from core.plan.models.shape import Shape
from core.plan.models.weights import WeightBytes
from core.spec.axes.evaluation.generation import NoGeneration
from core.spec.axes.optim.optimizers import SophiaG
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.runtime import HeldOut, HostOffload, NoSamples
from core.spec.axes.stage import DPO, KTO, ORPO, SimPO
from core.spec.job import JobSpec


def moments(
    spec: JobSpec, shape: Shape, held: WeightBytes, device: Device, what: Pass, kept: Kept
) -> dict[str, list[Item]]:
    """Items by the moments that the job has. `what` is the largest pass of training, `kept` what it keeps."""
    tokens, longest = what.tokens, what.longest
    numbers = replace(
        numbers_of(spec, shape, device, frozenset()), whole=held.head or isinstance(spec.optimizer, SophiaG)
    )
    offloads = isinstance(spec.memory.offload_optimizer, HostOffload)
    window = held.gradients if spec.training.gradient_accumulation_steps > 1 else 0
    gradients = _travelling(shape, held, numbers) if offloads else held.gradients
    of_window = Item("gradients", 0 if offloads else window, "of the micro-batches before, in float32")
    of_all = Item("gradients", gradients, "on their way to the host" if offloads else "in float32")
    casts = 0 if offloads and numbers.trained else casts_of(shape, held, numbers)
    casts += held.copied
    again = min(casts, casts_of_block(shape, held, numbers)) if kept.recomputed else casts
    logprobs = isinstance(spec.stage, DPO | SimPO | ORPO | KTO | RolloutStage)
    logits = (logprobs_bytes if logprobs else training_bytes)(shape, numbers, tokens, device)
    found: dict[str, list[Item]] = {
        "loss": [
            of_window,
            Item("activations", kept.all + casts + ended(shape, numbers, tokens), kept.why),
            Item("logits", logits, logits_why(shape, numbers, tokens, logprobs=logprobs)),
        ],
        "backward begins": [of_window, Item("activations", kept.first + again, kept.why)],
        "backward ends": [of_all, Item("activations", kept.last, "of the first block")],
        "step": [of_all, *_reducing(spec)],
    }
    if isinstance(spec.stage, DPO | KTO):
        inside = max(passed(shape, numbers, what), ended(shape, numbers, tokens))
        found["reference"] = [
            Item("activations", inside + casts, "of one block"),
            Item("logits", reference_bytes(shape, numbers, tokens, device), "a chunk of them, in float32"),
        ]
    if isinstance(spec.evaluation, HeldOut) and not isinstance(spec.stage, RolloutStage):  # which answers in its slots
        found["evaluation"] = _evaluating(spec.evaluation, shape, numbers, what, casts, device)
    if isinstance(spec.stage, RolloutStage):
        found["rollout"] = _answering(spec.stage, shape, numbers, longest, casts)
    if shape.scorers:
        scoring = max(scoring_bytes(spec, one, numbers, longest) for one in shape.scorers)
        found["rewards"] = [Item("activations", scoring, "of answers in one block of a reward model, nothing kept")]
    return found


def _evaluating(
    held_out: HeldOut, shape: Shape, numbers: Numbers, training: Pass, casts: int, device: Device
) -> list[Item]:
    """What a pass of held-out rows takes, or of the prompts that are answered at once where that is more."""
    what = held_out_pass(held_out, training, training.longest)
    inside = max(passed(shape, numbers, what), ended(shape, numbers, what.tokens))
    logits = evaluation_bytes(shape, numbers, what.tokens, device)
    found = [
        Item("activations", inside + casts, "of one block, nothing kept"),
        Item("logits", logits, "all of them, in float32 too" if numbers.whole else "a chunk of them"),
    ]
    generated = (held_out.samples, held_out.generation)
    new = max(0 if isinstance(one, NoSamples | NoGeneration) else one.max_new_tokens for one in generated)
    if not new:
        return found
    what = held_out_pass(held_out, training, training.longest + new)
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * numbers.computed * what.tokens
    answering = [
        Item("activations", passed(shape, numbers, what) + casts, "of the prompts in one block, nothing kept"),
        Item("cache", cache, f"keys and values of {what.tokens} tokens, {new} of them new in each answer"),
    ]
    return max(found, answering, key=lambda items: sum(item.bytes for item in items))


def _answering(stage: RolloutStage, shape: Shape, numbers: Numbers, longest: int, casts: int) -> list[Item]:
    """What answers in the making take: keys and values of all slots, a pass over prompts, and the logits of a token."""
    cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * numbers.computed * stage.slots * longest
    what = Pass(max(longest, PROMPT_TOKENS), longest)
    return [
        Item("activations", passed(shape, numbers, what) + casts, "of the prompts in one block, nothing kept"),
        Item("cache", cache, f"keys and values of {stage.slots} answers of up to {longest} tokens with their prompts"),
        Item("logits", SAMPLED_LOGIT_BYTES * stage.slots * shape.vocab, "of one token of each answer, and their sums"),
    ]


def _travelling(shape: Shape, held: WeightBytes, numbers: Numbers) -> int:
    """Gradients on their way to the host: twice the larger of a block's and of the largest other parameter's."""
    if not numbers.trained:
        return 2 * max(held.gradients // max(1, shape.layers), 0)
    block = max((sum(weight.numel for weight in block) for block in shape.patterns), default=0) * numbers.computed
    return 2 * max(block, 4 * max((weight.numel for weight in shape.outside), default=0))


def _reducing(spec: JobSpec) -> Iterable[Item]:
    if spec.resources.gpus > 1:
        yield Item("scratch of ranks", BUCKETS_IN_FLIGHT * BUCKET_BYTES, "two buckets of gradients on their way")
