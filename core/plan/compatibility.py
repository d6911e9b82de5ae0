"""What goes together: one table of rules over the axes of a job, with a reason for every refusal and a way out.

Pure data and pure functions. The API checks a job with it at submit (422), the worker again before a start; docs and
tests are generated from it. An axis takes its values from the spec's arms, so a new arm appears here by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from pydantic import BaseModel

from core.errors import Fault
from core.plan.steps import micro_batches
from core.spec.axes.batching import Batching, Packed, Rows, Tokens
from core.spec.axes.data import FORMATS, Data, format_of
from core.spec.axes.evaluation.generation import NoGeneration
from core.spec.axes.export import GGUF, LMEval, Merged, PackedExport, VLLMAdapter
from core.spec.axes.method import OFT, Adapter, Full, LowRank
from core.spec.axes.model import JobModel
from core.spec.axes.optim.schedules import Adaptive
from core.spec.axes.quantization import NoQuantization
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.runtime import Evaluation, HeldOut, NoSamples, Resident, SingleDevice
from core.spec.axes.stage import CPT, DPO, KTO, ORPO, SFT, SimPO, Stage, loss_on
from core.spec.axes.training import Training
from core.spec.job import JobSpec


def _arms(annotation: Any) -> tuple[str, ...]:
    """Discriminators of an axis, in the order of its union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation.model_fields["type"].default,)
    return tuple(arm for part in get_args(annotation) for arm in _arms(part))


def _field(name: str) -> tuple[str, ...]:
    return _arms(JobSpec.model_fields[name].annotation)


def _batching(batching: Batching) -> str:
    return "rows by length" if isinstance(batching, Rows) and batching.group_by_length else batching.type


AXES: dict[str, tuple[str, ...]] = {
    "stage": _field("stage"),
    "loss on": ("default", "completions", "last", "turns", "all"),
    "adapter": ("new", "continue", "merge"),
    "method": _field("method"),
    "quantization": ("default", *_field("quantization")),
    "merged": ("no", "yes"),
    "optimizer": _field("optimizer"),
    "schedule": _field("schedule"),
    "batching": tuple(_batching(arm) for arm in (Rows(), Rows(group_by_length=True), Tokens(), Packed())),
    "truncation": get_args(Training.model_fields["truncation"].annotation),
    "streaming": ("no", "yes"),
    "noise": ("no", "yes"),
    "precision": get_args(Training.model_fields["precision"].annotation),
    "compile": ("no", "yes"),
    "memory": _field("memory"),
    "checkpointing": ("default", "no", "yes", "selective"),
    "activation offloading": _arms(Resident.model_fields["activation_offloading"].annotation),
    "stream": _arms(Resident.model_fields["stream"].annotation),
    "offload optimizer": _arms(Resident.model_fields["offload_optimizer"].annotation),
    "strategy": _field("resources"),
    "ranks": ("one", "several"),
    "accelerator": get_args(SingleDevice.model_fields["accelerator"].annotation),
    "train rows": ("auto", *FORMATS),
    "eval rows": ("absent", "auto", *FORMATS),
    "evaluation": ("default", *_field("evaluation"), "held_out in steps"),
}
"""Every axis and its values. `auto` rows are in a file that only the worker can read; it checks again."""

Values = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Rule:
    """Refuses every job whose axes all have one of the values in `when`."""

    code: str
    when: Mapping[str, tuple[str, ...]]
    field: str
    """Where the user can change it."""
    reason: str
    way_out: str
    training_only: bool = False
    """Such rows can be previewed all the same."""

    def refuses(self, values: Values) -> bool:
        return all(values[axis] in among for axis, among in self.when.items())

    @property
    def message(self) -> str:
        return f"{self.reason}; {self.way_out}"


_STAGES = {arm.model_fields["type"].default: arm for arm in get_args(get_args(Stage)[0])}


def _rows_of_another_stage() -> Iterator[Rule]:
    for name, stage in _STAGES.items():
        others = tuple(rows for rows in FORMATS if rows not in stage.rows)
        for axis, code, field in (
            ("train rows", "rows_of_another_stage", "data.train"),
            ("eval rows", "eval_rows_of_another_stage", "data.eval"),
        ):
            yield Rule(
                code,
                {"stage": (name,), axis: others},
                field,
                f"`stage: {name}` learns from rows of the format {_or(stage.rows)}",
                f"use such rows, or the stage that learns from these ({_stages_of(others)})",
                training_only=True,
            )


def _stages_of(rows: Iterable[str]) -> str:
    """The stages that learn from rows, as a list of words."""
    return ", ".join(
        f"{one}: {' or '.join(f'`{name}`' for name, stage in _STAGES.items() if one in stage.rows) or 'none yet'}"
        for one in rows
    )


def _or(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _of_compiled_blocks() -> Iterator[Rule]:
    """What `training.compile` does not go with: where it would not resume to the bit, or would be of no use."""
    compared = tuple(name for name, arm in _STAGES.items() if issubclass(arm, DPO | KTO | RolloutStage))
    refused: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
        ("streamed", "stream", ("host", "disk", "auto"), "a streamed block has other weights in each pass, and code is "
         "compiled for weights that stay", "remove `memory.stream`"),
        ("packed", "batching", ("packed",), "the lengths of packed rows would be a part of the code, which would be "
         "compiled anew for each batch", "use `batching: rows` or `tokens`"),
        ("selective", "checkpointing", ("selective",), "`selective` keeps results of single operators, and compiled "
         "blocks have none", "set `memory.gradient_checkpointing` to `true` or `false`"),
        ("inputs_on_host", "activation offloading", ("host",), "the inputs of compiled blocks beside copies to the "
         "host have not been shown to resume to the bit", "remove `memory.activation_offloading`"),
        ("offloaded", "offload optimizer", ("host",), "weights that are copied during a pass have not been shown to "
         "resume to the bit in compiled blocks", "remove `memory.offload_optimizer`"),
        ("over_ranks", "ranks", ("several",), "a rank that falls back alone would compute otherwise than the rest, and "
         "resuming to the bit has not been shown", "set `resources.gpus` to 1"),
        ("blocks_in_turn", "optimizer", ("badam",), "`badam` trains other blocks after some steps, and each choice "
         "would be compiled anew", "use another optimizer"),
        ("in_fp8", "precision", ("fp8",), "layers that multiply in 8-bit floats are not compiled", "use another "
         "precision"),
        ("rotations", "method", ("oft",), "rotations have not been shown to resume to the bit in compiled blocks",
         "use `method: lora`"),
        ("compared_passes", "stage", compared, "the stage compares log-probabilities of training with those of passes "
         "that are not compiled, and both are rounded in other ways", "use a stage that compares none"),
    )  # fmt: skip
    for code, axis, values, reason, way_out in refused:
        yield Rule(f"compile_{code}", {"compile": ("yes",), axis: values}, "training.compile", reason,
                   f"{way_out}, or remove `training.compile`")  # fmt: skip


RULES: tuple[Rule, ...] = (
    Rule(
        "no_completions",
        {"loss on": ("completions", "last"), "train rows": ("text",)},
        "stage.loss_on",
        "raw text has no prompt and therefore no completion",
        "set `all`, or use rows with `prompt` and `completion`",
    ),
    Rule(
        "no_completions_in_eval",
        {"loss on": ("completions", "last"), "eval rows": ("text",)},
        "data.eval",
        "the training loss is on completions, and held-out raw text has none",
        "evaluate on rows that have completions, or set `stage.loss_on` to `all`",
    ),
    Rule(
        "no_turns",
        {"loss on": ("turns",), "train rows": ("prompt_completion", "instruction", "text")},
        "stage.loss_on",
        "`turns` selects the turns of a chat with `weight: 1`, and these rows have no turns",
        "remove `stage.loss_on`, or use chats",
    ),
    Rule(
        "no_turns_in_eval",
        {"loss on": ("turns",), "eval rows": ("prompt_completion", "instruction", "text")},
        "data.eval",
        "the training loss is on the turns of a chat with `weight: 1`, and the held-out rows have no turns",
        "use held-out rows that are chats",
    ),
    *_rows_of_another_stage(),
    Rule(
        "nothing_held_out",
        {"evaluation": ("held_out", "held_out in steps"), "eval rows": ("absent",)},
        "evaluation",
        "a held-out evaluation needs held-out rows",
        "set `data.eval` or `data.split`, or remove `evaluation`",
    ),
    Rule(
        "eval_unused",
        {"evaluation": ("none",), "eval rows": ("auto", *FORMATS)},
        "evaluation",
        "held-out rows are given but would not be used",
        "remove `evaluation` to evaluate on them, or remove the rows",
    ),
    Rule(
        "schedule_without_evaluations",
        {"schedule": _arms(Adaptive), "evaluation": ("default", "none", "held_out")},
        "schedule",
        "this schedule changes the learning rate by held-out evaluations while training, and there are none",
        "give held-out rows and set `evaluation.eval_steps`, or choose another schedule",
    ),
    Rule(
        "refuse_in_a_stream",
        {"streaming": ("yes",), "truncation": ("refuse",)},
        "training.truncation",
        "a stream's rows are measured during the run, so a long row would end a job after hours of training",
        "set `training.truncation` to cut or split rows, or remove `data.streaming`",
    ),
    Rule(
        "noise_in_packed_rows",
        {"noise": ("yes",), "batching": ("packed",)},
        "training.neftune_noise_alpha",
        "the noise on embeddings is scaled by the length of a row, and packed rows have no length of their own",
        "use `batching: rows` or `tokens`, or remove `training.neftune_noise_alpha`",
    ),
    Rule(
        "adapter_not_trained",
        {"method": ("full",), "adapter": ("continue",)},
        "model.adapter",
        "`continue` trains an adapter further, and `method: full` trains no adapter",
        "use `model.adapter: merge`, or a method that trains an adapter",
    ),
    Rule(
        "full_over_packed",
        {"method": ("full",), "quantization": ("nf4", "int8")},
        "quantization",
        "the steps of packed weights are larger than any update, so these weights cannot be trained",
        "train adapters over them (`method: qlora`), or set `quantization` to `none`",
    ),
    Rule(
        "qlora_over_dense",
        {"method": ("qlora",), "quantization": ("none",)},
        "quantization",
        "QLoRA needs a packed base, and `none` packs nothing",
        "remove `quantization` (nf4), or use `method: lora`",
    ),
    Rule(
        "fp8_with_oft",
        {"precision": ("fp8",), "method": ("oft",)},
        "training.precision",
        "a rotation changes the input of a layer after its scale for 8-bit floats was chosen",
        "use `method: lora`, or another precision",
    ),
    Rule(
        "fp8_with_qlora",
        {"precision": ("fp8",), "method": ("qlora",)},
        "training.precision",
        "fp8 applies to dense linear layers, and packed weights are unpacked to 16 bits",
        "use `method: lora`, or another precision",
    ),
    Rule(
        "fp8_over_packed",
        {"precision": ("fp8",), "quantization": ("nf4", "int8")},
        "training.precision",
        "fp8 applies to dense linear layers, and packed weights are unpacked to 16 bits",
        "set `quantization` to `none`, or use another precision",
    ),
    Rule(
        "stream_over_ranks",
        {"ranks": ("several",), "stream": ("host", "disk", "auto")},
        "memory.stream",
        "each rank would stream the whole model through the same memory or disk, which is slower than one rank",
        "remove `memory.stream`, or set `resources.gpus` to 1",
    ),
    Rule(
        "stream_of_what_is_trained",
        {"method": ("full",), "stream": ("host", "disk")},
        "memory.stream",
        "only frozen weights can be streamed, and `method: full` trains all weights",
        "train adapters (`method: lora` or `qlora`), or remove `memory.stream`",
    ),
    Rule(
        "offload_over_ranks",
        {"ranks": ("several",), "offload optimizer": ("host",)},
        "memory.offload_optimizer",
        "each rank would keep and update the whole optimizer state in the same host memory",
        "remove `memory.offload_optimizer`, or set `resources.gpus` to 1",
    ),
    Rule(
        "curvature_without_tokens",
        {"optimizer": ("sophia_g",), "stage": ("reward", "process_reward")},
        "optimizer",
        "`sophia_g` estimates the curvature by drawing tokens, and a reward model has no logits of tokens",
        "use another optimizer",
    ),
    Rule(
        "curvature_over_ranks",
        {"optimizer": ("sophia_g",), "ranks": ("several",)},
        "optimizer",
        "`sophia_g` estimates the curvature by the first batch of a step, which one rank has",
        "use another optimizer, or set `resources.gpus` to 1",
    ),
    Rule(
        "blocks_on_the_host",
        {"optimizer": ("badam",), "offload optimizer": ("host",)},
        "memory.offload_optimizer",
        "`badam` keeps the state of one block on the device, and an offload would take the gradients of all",
        "remove `memory.offload_optimizer`, or use another optimizer",
    ),
    Rule(
        "nothing_kept_to_offload",
        {"checkpointing": ("no",), "activation offloading": ("host",)},
        "memory.gradient_checkpointing",
        "`activation_offloading` moves the inputs of checkpointed blocks, and `false` checkpoints none",
        "remove `memory.gradient_checkpointing` or `memory.activation_offloading`",
    ),
    Rule(
        "nothing_to_merge",
        {"method": ("full",), "merged": ("yes",)},
        "export",
        "all parameters are trained, so there is no adapter to merge",
        "remove `merged` from `export`",
    ),
    *_of_compiled_blocks(),
)
"""Everything the spec can say and the trainer cannot do. What is slow or falls back (bf16 on an old CPU) is no
refusal: it runs, and says so in the job's events."""


def values_of(spec: JobSpec) -> dict[str, str]:
    """Where a job stands on every axis."""
    return {
        "stage": spec.stage.type,
        "loss on": loss_on(spec.stage) or "default",
        "adapter": _adapter(spec),
        "method": spec.method.type,
        "quantization": spec.quantization.type if spec.quantization is not None else "default",
        "merged": "yes" if any(isinstance(item, Merged) for item in spec.export) else "no",
        "optimizer": spec.optimizer.type,
        "schedule": spec.schedule.type,
        "batching": _batching(spec.batching),
        "truncation": spec.training.truncation,
        "streaming": "yes" if spec.data.streaming else "no",
        "noise": "no" if spec.training.neftune_noise_alpha is None else "yes",
        "precision": spec.training.precision,
        "compile": "yes" if spec.training.compile else "no",
        "memory": spec.memory.type,
        "checkpointing": _checkpointing(spec.memory.gradient_checkpointing),
        "activation offloading": spec.memory.activation_offloading.type,
        "stream": spec.memory.stream.type,
        "offload optimizer": spec.memory.offload_optimizer.type,
        "strategy": spec.resources.type,
        "ranks": "one" if spec.resources.gpus == 1 else "several",
        "accelerator": spec.resources.accelerator,
        "train rows": format_of(spec.data.train),
        "eval rows": _eval_rows(spec.data),
        "evaluation": _evaluation(spec.evaluation),
    }


def _adapter(spec: JobSpec) -> str:
    return (spec.model.adapter or "new") if isinstance(spec.model, JobModel) else "new"


def _checkpointing(said: bool | str | None) -> str:
    match said:
        case None:
            return "default"
        case bool():
            return "yes" if said else "no"
        case _:
            return said


def _evaluation(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "default"
    in_steps = isinstance(evaluation, HeldOut) and evaluation.eval_steps is not None
    return "held_out in steps" if in_steps else evaluation.type


def _eval_rows(data: Data) -> str:
    if data.split is not None:
        return format_of(data.train)
    return format_of(data.eval) if data.eval is not None else "absent"


def _of_its_stage(spec: JobSpec, *, preview: bool) -> Iterator[Fault]:
    """Faults of a stage's own, which are no matter of axes: they would connect nearly all of them."""
    stage = spec.stage
    if stage.sequences > 1 and spec.training.truncation == "split":
        yield Fault(
            "pairs_are_not_split",
            f"a row of `stage: {stage.type}` is two answers that belong together, so it cannot be split; set "
            "`training.truncation` to `cut_left`, `cut_right` or `refuse`",
            "training.truncation",
        )
    if stage.head == "labels" and spec.training.truncation == "split":
        yield Fault(
            "solutions_are_not_split",
            f"`stage: {stage.type}` judges a step by all that is before it, so a solution cannot be split; set "
            "`training.truncation` to `cut_left`, `cut_right` or `refuse`",
            "training.truncation",
        )
    if preview:
        return
    if isinstance(stage, RolloutStage):
        yield from _of_rollouts(spec, stage)
    if spec.training.neftune_noise_alpha is not None and not isinstance(stage, SFT | CPT):
        yield Fault(
            "noise_of_another_stage",
            f"`stage: {stage.type}` compares log-probabilities, and is trained without dropout and without noise; "
            "remove `training.neftune_noise_alpha`",
            "training.neftune_noise_alpha",
        )
    if isinstance(stage, DPO | KTO) and isinstance(spec.method, Full) and spec.data.streaming:
        yield Fault(
            "reference_is_trained",
            f"`stage: {stage.type}` compares with the model that training starts from, which `method: full` has "
            "changed by the time later rows of a stream are read; train adapters, or remove `data.streaming`",
            "data.streaming",
        )
    if isinstance(stage, DPO | KTO) and _adapter(spec) == "continue" and spec.data.streaming:
        yield Fault(
            "reference_is_trained",
            f"`stage: {stage.type}` compares with the adapter that the job continues, which has changed by the time "
            "later rows of a stream are read; set `model.adapter: merge`, or remove `data.streaming`",
            "data.streaming",
        )
    samples = spec.evaluation.samples if isinstance(spec.evaluation, HeldOut) else NoSamples()
    if stage.head != "tokens" and not isinstance(samples, NoSamples):
        yield Fault(
            "no_text_to_sample",
            f"a model of `stage: {stage.type}` judges text and writes none; remove `evaluation.samples`",
            "evaluation.samples",
        )
    if stage.head != "tokens" and any(isinstance(item, GGUF | PackedExport | LMEval) for item in spec.export):
        yield Fault(
            "no_gguf_of_a_reward_model",
            f"a model of `stage: {stage.type}` ends in a head that lm-eval and the readers of GGUF and of "
            "quantised folders do not have; use `export: [merged]`",
            "export",
        )
    generation = spec.evaluation.generation if isinstance(spec.evaluation, HeldOut) else NoGeneration()
    if not isinstance(generation, NoGeneration) and not isinstance(stage, SFT | DPO | SimPO | ORPO):
        yield Fault(
            "no_answers_to_score",
            f"rows of `stage: {stage.type}` have no completion that an answer could be scored against; remove "
            "`evaluation.generation`",
            "evaluation.generation",
        )
    measured = spec.evaluation.measured(stage.metrics) if isinstance(spec.evaluation, HeldOut) else {}
    if isinstance(spec.evaluation, HeldOut) and (metric := spec.evaluation.metric_of(stage.metrics)) not in measured:
        yield Fault(
            "metric_of_another_stage",
            f"`stage: {stage.type}` does not measure `{metric}`; set the metric to one of {_or(measured)}",
            "evaluation.metric_for_best_model",
        )


def _of_its_method(spec: JobSpec) -> Iterator[Fault]:
    """Faults of a method's own, beside the table for the same reason."""
    if isinstance(spec.method, LowRank) and spec.method.started and _adapter(spec) == "continue":
        yield Fault(
            "adapter_has_begun",
            f"`init_lora_weights: {spec.method.init_lora_weights}` says where a new adapter begins, and the job "
            "continues one; remove the field, or set `model.adapter: merge`",
            "method.init_lora_weights",
        )
    if isinstance(spec.method, LowRank) and spec.method.use_dora and spec.training.compile:
        yield Fault(
            "compile_dora",
            "DoRA in compiled blocks would be computed in another way, and more slowly; remove `training.compile`, or "
            "`method.use_dora`",
            "training.compile",
        )
    if isinstance(spec.method, Adapter) and spec.method.modules_to_save and spec.training.precision == "fp8":
        yield Fault(
            "fp8_of_what_is_trained",
            "fp8 multiplies frozen weights, and `method.modules_to_save` trains some in float32; use another "
            "precision, or remove `modules_to_save`",
            "training.precision",
        )


def _of_rollouts(spec: JobSpec, stage: RolloutStage) -> Iterator[Fault]:
    """Faults of a stage that samples the answers it learns from."""
    training = spec.training
    answers = training.per_device_train_batch_size * micro_batches(spec)
    if answers % stage.num_generations:
        yield Fault(
            "no_whole_groups",
            f"a step has {answers} answers (per_device_train_batch_size · gradient_accumulation_steps · gpus), which "
            f"are no whole groups of {stage.num_generations}; make it a multiple of `stage.num_generations`",
            "stage.num_generations",
        )
    if stage.max_completion_length >= training.max_length:
        yield Fault(
            "no_room_for_prompts",
            f"an answer may take all of training.max_length = {training.max_length} tokens; raise it, or lower "
            "`stage.max_completion_length`",
            "stage.max_completion_length",
        )
    if not isinstance(spec.batching, Rows) or spec.batching.group_by_length:
        yield Fault(
            "rollouts_in_rows",
            "the answers of a step are counted in rows; use `batching: rows` without `group_by_length`",
            "batching",
        )
    if spec.data.streaming:
        yield Fault(
            "rollouts_of_a_stream", "prompts are few and short, and are read at once; remove `data.streaming`", "data"
        )
    if stage.sampler == "exact":
        yield from _of_exact_sampler(spec)
    if stage.beta and (isinstance(spec.method, Full) or _adapter(spec) == "continue"):
        yield Fault(
            "no_reference_in_rollouts",
            "the divergence from the starting model needs that model beside the trained one, which only a new adapter "
            "has; set `stage.beta` to 0, or train a new adapter (`model.adapter: merge`)",
            "stage.beta",
        )


def _of_exact_sampler(spec: JobSpec) -> Iterator[Fault]:
    """What computes in ways that `stage.sampler: exact` does not see, or has no form in it."""
    refused = (
        (spec.method.type == "qlora" or not isinstance(spec.quantization, NoQuantization | None), "quantization",
         "packed weights are multiplied by kernels of their own", "use `method: lora` without `quantization`"),
        (spec.training.precision == "fp8", "training.precision", "fp8 takes its scales from all rows of a product",
         "use another precision"),
        (spec.memory.stream.type != "none", "memory.stream",
         "streamed blocks compute where their products are not seen", "remove `memory.stream`"),
    )  # fmt: skip
    for applies, field, reason, way_out in refused:
        if applies:
            yield Fault(
                "exact_sampler",
                f"with `stage.sampler: exact` a token is computed with the same bits in every batch, and {reason}; "
                f"{way_out}, or remove `stage.sampler`",
                field,
            )


def _of_its_exports(spec: JobSpec) -> Iterator[Fault]:
    """Adapters that vLLM does not load."""
    if not any(isinstance(item, VLLMAdapter) for item in spec.export):
        return
    method, why = spec.method, None
    if isinstance(method, Full):
        why = "all parameters are trained, so there is no adapter: vLLM serves `model/` as it is"
    elif isinstance(method, OFT):
        why = "vLLM loads adapters of LoRA alone"
    elif isinstance(method, LowRank) and method.use_dora:
        why = "vLLM does not compute DoRA"
    elif isinstance(method, Adapter) and method.modules_to_save:
        why = "vLLM does not load `modules_to_save`"
    elif isinstance(method, LowRank) and method.new_tokens:
        why = "vLLM does not load the rows of `new_tokens`"
    elif spec.stage.head != "tokens":
        why = f"the adapter of `stage: {spec.stage.type}` has a head of its own, which vLLM does not load"
    if why is not None:
        way = "remove `vllm` from `export`" if isinstance(method, Full) else "take `merged` instead of `vllm`"
        yield Fault("vllm_refuses", f"{why}; {way}", "export")


def check(spec: JobSpec, *, preview: bool = False) -> tuple[Fault, ...]:
    """One fault for every rule that refuses the job (or a preview of its rows), and those of its stage; none: it can
    run."""
    values = values_of(spec)
    of_table = (
        Fault(rule.code, rule.message, rule.field)
        for rule in RULES
        if rule.refuses(values) and not (preview and rule.training_only)
    )
    return (*of_table, *_of_its_stage(spec, preview=preview), *_of_its_method(spec), *_of_its_exports(spec))


def cells(*axes: str) -> Iterator[tuple[dict[str, str], tuple[Rule, ...]]]:
    """Every combination of values of some axes with the rules that refuse it whatever the other axes say."""
    for combination in product(*(AXES[axis] for axis in axes)):
        values = dict(zip(axes, combination, strict=True))
        yield values, tuple(rule for rule in RULES if rule.when.keys() <= values.keys() and rule.refuses(values))
