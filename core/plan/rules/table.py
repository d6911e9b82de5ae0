"""Every combination of values that is refused, with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from core.plan.rules.axes import Values, arms, quoted
from core.spec.axes.data import FORMATS
from core.spec.axes.optim.schedules import Adaptive
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.stage import DPO, KTO, Stage


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
                f"`stage: {name}` learns from rows of the format {quoted(stage.rows)}",
                f"use such rows, or the stage that learns from these ({_stages_of(others)})",
                training_only=True,
            )


def _stages_of(rows: Iterable[str]) -> str:
    """The stages that learn from rows, as a list of words."""
    return ", ".join(
        f"{one}: {' or '.join(f'`{name}`' for name, stage in _STAGES.items() if one in stage.rows) or 'none yet'}"
        for one in rows
    )


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


def _of_rounded_weights() -> Iterator[Rule]:
    """Methods and precisions that `quantization: qat` does not go with; core/plan/rules/faults.py has the rest."""
    refused: tuple[tuple[str, str, tuple[str, ...], str, str], ...] = (
        ("packed", "method", ("qlora",), "`qlora` trains over packed weights, and rounding needs 16-bit weights",
         "use `method: lora` or `full`"),
        ("rotations", "method", ("oft",), "a rotation of the inputs cannot be rounded with the weight",
         "use `method: lora` or `full`"),
        ("settled_later", "method", ("auto",), "`auto` chooses between packed and unpacked weights",
         "use `method: lora` or `full`"),
        ("in_fp8", "precision", ("fp8",), "a layer multiplies in 8-bit floats or in rounded weights, not in both",
         "use another precision"),
    )  # fmt: skip
    for code, axis, values, reason, way_out in refused:
        yield Rule(f"qat_{code}", {"quantization": ("qat",), axis: values}, "quantization", reason,
                   f"{way_out}, or remove `quantization`")  # fmt: skip


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
        {"schedule": arms(Adaptive), "evaluation": ("default", "none", "held_out")},
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
    *_of_rounded_weights(),
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
