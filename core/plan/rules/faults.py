"""Refusals that are no matter of axes: rules of one stage, one method or one export, which as rows of the table would
connect nearly all axes."""

from __future__ import annotations

from collections.abc import Iterator

from core.errors import Fault
from core.plan.rules.axes import adapter_of, quoted
from core.plan.steps import micro_batches
from core.spec.axes.batching import Rows
from core.spec.axes.data import GameRows, singles
from core.spec.axes.evaluation.generation import NoGeneration
from core.spec.axes.export import GGUF, LMEval, PackedExport, VLLMAdapter
from core.spec.axes.method import OFT, Adapter, Full, LowRank
from core.spec.axes.quantization import QAT, NoQuantization
from core.spec.axes.rollout.environment import GameEnvironment, PythonEnvironment, TaskEnvironment
from core.spec.axes.rollout.reward import EnvironmentReward, TaskReward
from core.spec.axes.rollout.stages import RolloutStage
from core.spec.axes.runtime import HeldOut, NoSamples
from core.spec.axes.stage import CPT, DPO, KTO, ORPO, SFT, SimPO
from core.spec.job import JobSpec


def faults_of_stage(spec: JobSpec, *, preview: bool) -> Iterator[Fault]:
    """Faults of one stage; a preview trains nothing, and is refused by fewer."""
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
        yield from _faults_of_rollouts(spec, stage)
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
    if isinstance(stage, DPO | KTO) and adapter_of(spec) == "continue" and spec.data.streaming:
        yield Fault(
            "reference_is_trained",
            f"`stage: {stage.type}` compares with the adapter that the job continues, which has changed by the time "
            "later rows of a stream are read; set `model.adapter: merge`, or remove `data.streaming`",
            "data.streaming",
        )
    if stage.head != "tokens" and any(isinstance(item, GGUF | PackedExport | LMEval) for item in spec.export):
        yield Fault(
            "no_gguf_of_a_reward_model",
            f"a model of `stage: {stage.type}` ends in a head that lm-eval and the readers of GGUF and of "
            "quantised folders do not have; use `export: [merged]`",
            "export",
        )
    yield from _faults_of_evaluation(spec)


def _faults_of_evaluation(spec: JobSpec) -> Iterator[Fault]:
    """What a stage cannot sample, score or measure of its held-out rows."""
    evaluation, stage = spec.evaluation, spec.stage
    if not isinstance(evaluation, HeldOut):
        return
    if stage.head != "tokens" and not isinstance(evaluation.samples, NoSamples):
        yield Fault(
            "no_text_to_sample",
            f"a model of `stage: {stage.type}` judges text and writes none; remove `evaluation.samples`",
            "evaluation.samples",
        )
    if not isinstance(evaluation.generation, NoGeneration) and not isinstance(stage, SFT | DPO | SimPO | ORPO):
        yield Fault(
            "no_answers_to_score",
            f"rows of `stage: {stage.type}` have no completion that an answer could be scored against; remove "
            "`evaluation.generation`",
            "evaluation.generation",
        )
    measured = evaluation.measured(stage.metrics)
    if (metric := evaluation.metric_of(stage.metrics)) not in measured:
        yield Fault(
            "metric_of_another_stage",
            f"`stage: {stage.type}` does not measure `{metric}`; set the metric to one of {quoted(measured)}",
            "evaluation.metric_for_best_model",
        )


def faults_of_method(spec: JobSpec) -> Iterator[Fault]:
    """Faults of one method."""
    if isinstance(spec.method, LowRank) and spec.method.started and adapter_of(spec) == "continue":
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
    if isinstance(spec.quantization, QAT):
        yield from _faults_of_rounding(spec)
    if isinstance(spec.method, Adapter) and spec.method.modules_to_save and spec.training.precision == "fp8":
        yield Fault(
            "fp8_of_what_is_trained",
            "fp8 multiplies frozen weights, and `method.modules_to_save` trains some in float32; use another "
            "precision, or remove `modules_to_save`",
            "training.precision",
        )


def _faults_of_rounding(spec: JobSpec) -> Iterator[Fault]:
    """What layers that round their weights in each pass do not go with."""
    memory = spec.memory
    refused = (
        (not isinstance(spec.stage, SFT | CPT), "stage", "the stage compares or samples with models that are not "
         "rounded", "use it for the last stage that learns tokens (`sft` or `cpt`)"),
        (memory.stream.type != "none", "memory.stream", "streamed weights have not been shown to be rounded alike in "
         "each pass", "remove `memory.stream`"),
        (memory.gradient_checkpointing == "selective", "memory.gradient_checkpointing", "`selective` would keep the "
         "product of each adapter, as large as its weight", "set it to `true` or `false`"),
        (memory.offload_optimizer.type != "none", "memory.offload_optimizer", "the device has 16 bits of an offloaded "
         "weight, and these would be rounded once more", "remove `memory.offload_optimizer`"),
        (spec.training.compile, "training.compile", "rounded layers are not compiled", "remove `training.compile`"),
    )  # fmt: skip
    for applies, field, reason, way_out in refused:
        if applies:
            words = (
                f"`quantization: qat` rounds weights in each pass, and {reason}; {way_out}, or remove `quantization`"
            )
            yield Fault("qat_refused", words, field)
    if isinstance(spec.method, LowRank) and (found := _unmerged(spec.method)):
        yield Fault(
            "qat_adapter",
            f"`quantization: qat` rounds the weight with its adapter added, and `{found}` is no such sum; remove "
            f"`method.{found}`, or `quantization`",
            f"method.{found}",
        )


def _unmerged(method: LowRank) -> str | None:
    """The field by which an adapter is more than B·A added to its base's weight in each step."""
    has = {"lora_dropout": method.lora_dropout, "use_dora": method.use_dora, "init_lora_weights": method.started}
    return next((name for name, there in has.items() if there), None)


def _faults_of_rollouts(spec: JobSpec, stage: RolloutStage) -> Iterator[Fault]:
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
    yield from _faults_of_episodes(spec, stage)
    if stage.sampler == "exact":
        yield from _faults_of_exact_sampler(spec)
    if stage.beta and (isinstance(spec.method, Full) or adapter_of(spec) == "continue"):
        yield Fault(
            "no_reference_in_rollouts",
            "the divergence from the starting model needs that model beside the trained one, which only a new adapter "
            "has; set `stage.beta` to 0, or train a new adapter (`model.adapter: merge`)",
            "stage.beta",
        )


def _faults_of_episodes(spec: JobSpec, stage: RolloutStage) -> Iterator[Fault]:
    """Rewards and an environment that do not go together."""
    environment = stage.environment
    gives = isinstance(environment, PythonEnvironment | GameEnvironment)
    if not gives and any(isinstance(r, EnvironmentReward) for r in stage.reward):
        yield Fault(
            "no_environment",
            "the reward `environment` is what an environment of type `python` or `game` says; set `stage.environment`, "
            "or remove the reward",
            "stage.reward",
        )
    if isinstance(environment, TaskEnvironment) and not any(isinstance(r, TaskReward) for r in stage.reward):
        yield Fault(
            "no_environment",
            "the environment `task` replies with what the reward `task` finds; add that reward, or remove "
            "`stage.environment`",
            "stage.environment",
        )
    sources = [*singles(spec.data.train, "data.train")]
    if spec.data.eval is not None:
        sources += singles(spec.data.eval, "data.eval")
    for field, source in sources:
        if isinstance(source, GameRows) != isinstance(environment, GameEnvironment):
            yield Fault(
                "no_environment",
                "the environment `game` plays the games of `data` of type `game`, and no others; set both, or neither",
                field,
            )


def _faults_of_exact_sampler(spec: JobSpec) -> Iterator[Fault]:
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


def faults_of_exports(spec: JobSpec) -> Iterator[Fault]:
    """Adapters that vLLM does not load, and formats with other numbers than those that were trained."""
    if isinstance(spec.quantization, QAT):
        own = f"torchao_{spec.quantization.weights}"
        for item in spec.export:
            if item.type != own:
                yield Fault(
                    "qat_export",
                    f"`{item.type}` does not compute with the {spec.quantization.weights} weights and the 8-bit inputs "
                    f"that the model was trained with; take `{own}`",
                    "export",
                )
        return
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
