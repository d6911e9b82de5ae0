"""A batch run from its order to its artifacts: load → quantise → adapt → train → evaluate → save."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, assert_never

from core.errors import SpecError
from core.plan.advice import of_losses
from core.spec.axes.batching import Packed
from core.spec.axes.method import LowRank
from core.spec.axes.rollout.stages import GRPO, RLOO, PPOStage, RolloutStage
from core.spec.axes.runtime import HeldOut, NoStream
from core.spec.axes.stage import CPT, DPO, KTO, ORPO, SFT, ProcessReward, Reward, SimPO
from core.spec.job import JobSpec
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.attention.probe import prepare_packing, prepare_padded, share_prompts
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter, NullEventWriter
from core.train.base.log_lines import LogLines
from core.train.base.reading import is_panic
from core.train.base.stop import Stop, StopRequested
from core.train.checkpoint import engine_state
from core.train.checkpoint.resume import CURSOR, resume
from core.train.compiling.prepare import compile_blocks
from core.train.data.loaders import RowLoader, StepLoader
from core.train.engine import Engine, build_engine
from core.train.evaluation.best import load_best_model
from core.train.evaluation.held_out import HeldOutMeasure, build_evaluator
from core.train.evaluation.reference import prepare_reference
from core.train.export.artifacts import Trained, write_artifacts
from core.train.export.retention import RowsOf
from core.train.failures import describe
from core.train.feed import RunData, build_loader, read_data
from core.train.kernels.float32 import through_float32
from core.train.loop.loop import Loop
from core.train.model.build import Built, build_model, disable_dropout
from core.train.model.compute import Compute, prepare_compute
from core.train.model.gemm_limits import describe_row_splits, split_matmuls
from core.train.model.heads import has_head
from core.train.model.placement import Placement
from core.train.optim.schedules import Factor, build_schedule
from core.train.policy import describe_whole_logits
from core.train.ranks.env import RankEnv
from core.train.ranks.last_word import tell_launcher
from core.train.rollout.exactness import compute_exactly
from core.train.rollout.held_out import build_reward_evaluator
from core.train.rollout.loader import RolloutLoader
from core.train.rollout.tryout import try_rewards
from core.train.run import Run
from core.train.stage import Stage
from core.train.stages.balanced import with_balance
from core.train.state import TrainerState
from core.train.vocabulary.new_tokens import require_new
from core.train.vocabulary.tokenizer import load_tokenizer, pad_token


def run(run_dir: Path, stop: Stop | None = None, rank_env: RankEnv | None = None) -> int:
    """Run what `run_dir/run.json` orders and return the exit code (core/spec/run). A failure is told in an
    error event and in the log, there with the traceback unless its message is made for users.

    Set `stop.requested` (SIGTERM does) to checkpoint and leave. `rank_env`: which of several ranks this process is;
    None: there is one.
    """
    events = (
        EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
        if rank_env is None or rank_env.rank == 0
        else NullEventWriter()
    )
    try:
        order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with Run(order, run_dir, events, stop or Stop(), rank_env) as here:
            train(here)
    except StopRequested:
        return EXIT_CHECKPOINTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        payload = describe(error, events.phase)
        return (
            tell_failure(error, events, payload)
            if rank_env is None
            else tell_launcher(error, rank_env, events, payload)
        )
    finally:
        events.close()
    return EXIT_OK


def train(run: Run) -> None:
    """Load, adapt, train, evaluate and save, in this order for every stage and every method."""
    run.phase("loading")
    compute = prepare_compute(run)
    with through_float32(compute.products):
        _train(run, compute)


def _train(run: Run, compute: Compute) -> None:
    with run.stop.at_once():
        run.check_stop()
        tokenizer = load_tokenizer(run.tokenizer_dir)
        if isinstance(run.spec.method, LowRank) and run.adapter_dir is None:
            require_new(tokenizer, run.spec.method.new_tokens)
        with run.ranks.rank_zero_first(run.caches_tokens):
            data = read_data(run, tokenizer)
        with run.ranks.rank_zero_first(run.caches_weights):
            built = build_model(run, compute.placement, tokenizer, data.longest)
    run.ranks.seed(run.spec.training.seed)
    stage, balance = with_balance(run, build_stage(run.spec, data), built.model, data.train.trained)
    state = TrainerState()
    rollouts = build_rollouts(run, data, tokenizer, compute.placement)
    loader: StepLoader
    if rollouts is not None:
        loader, total_steps = rollouts, rollouts.total_steps()
    else:
        loader, total_steps = build_loader(run, data, stage.shares, pad_token(tokenizer), stage.prelude_sequences)
    engine = build_engine(
        built.model,
        run.spec.optimizer,
        build_run_schedule(run.spec, total_steps, stage, state),
        device=compute.placement.device,
        autocast=compute.placement.autocast,
        max_grad_norm=run.spec.training.max_grad_norm,
        pad_token_id=pad_token(tokenizer),
        parts={"ledger": state, "environment": compute.environment, CURSOR: loader},
        scaler=compute.scaler,
        ranks=run.ranks,
        updates=built.updates,
        groups=built.groups,
    )
    if rollouts is not None:
        rollouts.answerer.engine = engine
    if not stage.dropout:
        disable_dropout(built.model)
    packing = choose_kernels(run, compute, engine, stage, data)
    if rollouts is not None:
        packing = compute_prompts_once(run, engine, data, rollouts)
    # Compiled blocks have PyTorch's attention in their code.
    padded = prepare_padded(engine) if packing is None and not run.spec.training.compile else None
    parts = (run, compute, data, built, engine, engine.policy)
    record = {name: value for part in parts for name, value in part.about().items()}
    record |= {"packing": packing, "total_steps": total_steps} | balance
    record |= {"padding": padded} if padded is not None else {}
    record |= {} if rollouts is None else rollouts.answerer.about()
    used = loader.rows_until(total_steps) if isinstance(loader, RowLoader) else None
    record |= prepare_reference(run, engine, stage, data, used)
    record["compile"] = compile_run(run, compute, engine, balanced="router_loss" in balance)
    compute.environment.describe(record, None if run.order.selftest is None else run.order.selftest.get("runtime"))
    run.events.write("run_record", record=record)
    if run.order.trial_prompts is not None and rollouts is not None:
        result = try_rewards(run, engine, stage, rollouts, run.order.trial_prompts)
        run.events.write("result", result=result, artifacts=[])
        run.ranks.destroy()
        return
    evaluator = evaluator_of(run, engine, stage, tokenizer, data, rollouts)
    resume(run, engine, loader, state, compute.environment, total_steps)
    engine_state.assert_in_sync(engine)
    loop = Loop(run, engine, stage, loader, total_steps, evaluator, state)
    loop.train()
    save(loop, built, tokenizer, data, record)


def build_rollouts(run: Run, data: RunData, tokenizer: Any, placement: Placement) -> RolloutLoader | None:
    """The loader of a stage that samples the answers it learns from; None for the others."""
    if not isinstance(run.spec.stage, RolloutStage):
        return None
    assert data.prompts is not None
    return RolloutLoader(
        run, run.spec.stage, data.train, data.prompts, tokenizer, pad_token(tokenizer), placement, data.options
    )


def evaluator_of(
    run: Run, engine: Engine, stage: Stage, tokenizer: Any, data: RunData, rollouts: RolloutLoader | None
) -> HeldOutMeasure | None:
    """What measures held-out rows: rewards of answers where the stage learns from answers."""
    if rollouts is None:
        return build_evaluator(run, engine, stage, tokenizer, data)
    return build_reward_evaluator(run, rollouts.answerer, data)


def build_run_schedule(spec: JobSpec, total_steps: int, stage: Stage, state: TrainerState) -> Factor:
    """The schedule over the run's own evaluations, which `state` holds."""
    if not isinstance(spec.evaluation, HeldOut):
        return build_schedule(spec.schedule, total_steps)
    metric = spec.evaluation.metric_for_best_model
    better = spec.evaluation.measured(stage.held_out_metrics).get(
        metric, "lower"
    )  # build_evaluator refuses a metric that is not measured
    return build_schedule(spec.schedule, total_steps, lambda: state.evaluations, metric=metric, better=better)


def build_stage(spec: JobSpec, data: RunData) -> Stage:
    """The stage that the job asks for."""
    match spec.stage:
        case SFT(loss=loss):
            from core.train.stages.sft import SupervisedFineTuning

            return SupervisedFineTuning(completions=data.completions, loss_type=loss)
        case CPT():
            from core.train.stages.cpt import ContinuedPreTraining

            return ContinuedPreTraining()
        case DPO() as dpo:
            from core.train.stages.dpo import DirectPreference

            return DirectPreference(dpo)
        case SimPO() as simpo:
            from core.train.stages.simpo import SimplePreference

            return SimplePreference(simpo)
        case ORPO() as orpo:
            from core.train.stages.orpo import OddsRatioPreference

            return OddsRatioPreference(orpo)
        case KTO() as kto:
            from core.train.stages.kto import KahnemanTversky

            return KahnemanTversky(kto)
        case Reward() as reward:
            from core.train.stages.reward import RewardModel

            return RewardModel(reward)
        case ProcessReward():
            from core.train.stages.process_reward import ProcessRewardModel

            return ProcessRewardModel()
        case GRPO() as grpo:
            from core.train.stages.rollout.grpo import GroupRelativePolicy

            return GroupRelativePolicy(grpo)
        case RLOO() as rloo:
            from core.train.stages.rollout.rloo import LeaveOneOutPolicy

            return LeaveOneOutPolicy(rloo)
        case PPOStage() as ppo:
            from core.train.stages.rollout.ppo import ProximalPolicy

            return ProximalPolicy(ppo)
        case _ as never:
            assert_never(never)


def choose_kernels(run: Run, compute: Compute, engine: Engine, stage: Stage, data: RunData) -> dict[str, Any] | None:
    """Try the kernels of packed rows and of the loss, and tell what is unusual; the run record's entry of packing."""
    placement = compute.placement
    packing = prepare_packing(engine) if isinstance(run.spec.batching, Packed) else None
    if packing is not None and data.train.trained > 1:
        packing["prompts"] = choose_prompts(run, engine, data)
    elif packing is not None and stage.continues:
        packing["prompts"] = continue_prompts(run, engine, data)
    engine.policy.head(compute.choice.veto.get("chunked"))
    whole = None if has_head(engine.model) else engine.policy.whole_logits
    if whole is not None:
        run.notice("whole_logits", describe_whole_logits(whole, engine.model))
    split_matmuls(engine.model, placement.limits)
    computed = placement.autocast or placement.weights
    if in_parts := describe_row_splits(
        run.spec, engine.model, placement.limits, computed, data.longest, whole is not None
    ):
        run.notice("products_in_parts", in_parts)
    return packing


def compile_run(run: Run, compute: Compute, engine: Engine, *, balanced: bool) -> dict[str, Any] | None:
    """Compile the blocks where the job asks for it; the run record's entry. `balanced`: the loss reads what routers
    answer inside of the blocks, which compiled code does not show."""
    why_not = "its loss of balance reads what the routers of the blocks answer" if balanced else None
    compiled = compile_blocks(run, compute, engine, why_not)
    if compiled is None:
        return None
    compute.environment.here["compiled"] = compiled.fingerprint()
    return compiled.record


def choose_prompts(run: Run, engine: Engine, data: RunData) -> dict[str, Any]:
    """Have the prompt of each pair computed once, where the job and the model allow it; the run record's entry."""
    batching = run.spec.batching
    if not isinstance(batching, Packed) or not batching.share_prompts:
        return {"computed": "for each answer", "why": "batching.share_prompts is false"}
    if (why := share_prompts(engine, data.longest)) is not None:
        return {"computed": "for each answer", "why": why}
    data.train.share_prompts = True
    if data.stream is not None:
        data.stream.share_prompts = True
    if data.eval is not None:
        data.eval.share_prompts = True
    return {"computed": "once", "saved_tokens": data.train.shared_tokens()}


def compute_prompts_once(run: Run, engine: Engine, data: RunData, rollouts: RolloutLoader) -> dict[str, Any]:
    """Have the prompt of each group of answers computed once in a batch, where the job and the model allow it; the run
    record's entry."""
    stage, packing = rollouts.stage, dict[str, Any]()
    why: str | None = None
    if stage.sampler == "exact":
        compute_exactly(engine, data.longest, stage.temperature)
        why = "`stage.sampler: exact` computes each answer by itself"
    elif stage.num_generations == 1:
        why = "a prompt has one answer"
    else:
        try:
            packing = prepare_packing(engine)
            why = share_prompts(engine, data.longest)
        except SpecError as refused:
            why = str(refused).partition(";")[0]
    if why is not None:
        return packing | {"prompts": {"computed": "for each answer", "why": why}}
    rollouts.prompts_once = True
    return packing | {"prompts": {"computed": "once"}}


def continue_prompts(run: Run, engine: Engine, data: RunData) -> dict[str, Any]:
    """Have what is looked at before a step continue the prompts of the rows of the step, where a step is one batch and
    the job and the model allow it; the run record's entry. No memory is taken for that, since it takes the keys and
    values of the prompts that the backward needs anyway."""
    spec, batching = run.spec, run.spec.batching
    memory = spec.memory
    if not isinstance(batching, Packed) or not batching.share_prompts:
        why: str | None = "batching.share_prompts is false"
    elif memory.gradient_checkpointing or not isinstance(memory.stream, NoStream):
        why = "the forward of the step keeps no keys and values for its backward"
    elif spec.training.neftune_noise_alpha is not None:
        why = "the embeddings have noise in training"
    elif run.ranks.world > 1 or data.stream is not None:
        why = "the run has several ranks, or streams its rows"
    else:
        why = share_prompts(engine, data.longest)
    if why is not None:
        return {"computed": "for each answer", "why": why}
    data.train.continue_prompts = True
    return {"computed": "once, where a step is one batch"}


def save(loop: Loop, built: Built, tokenizer: Any, data: RunData, record: dict[str, Any]) -> None:
    """Hand back what was trained, with all that is known of how it came about."""
    run, engine, state = loop.run, loop.engine, loop.state
    run.phase("saving")
    if run.spec.export:
        loop.save()  # making and checking formats may take a while: a run that is stopped in it goes on from here
    run.ranks.destroy()
    if not run.ranks.first:
        return  # what is left is one model's, and one process's work
    best = load_best_model(run, engine, loop.stage, state.evaluations)
    result = state.result(engine.steps, best, stopped_early=loop.stopped_early)
    before, after = (values and values.get("eval_loss") for values in (result["eval_before"], result["eval_after"]))
    if (rose := of_losses(before, after)) is not None:
        result["notices"] = [rose.as_dict()]
        run.notice(rose.code, rose.message)
    if built.inputs is not None and built.inputs.counts.missed:
        run.notice("activations_stayed", built.inputs.counts.describe_missed())
    built.hand_back()
    rows_of: RowsOf = "training" if data.eval is None else "held_out"
    rows = (data.first_rows, rows_of, data.training_rows)
    trained = Trained(engine.model, tokenizer, loop.stage, record, result, state, *rows)
    result, artifacts = write_artifacts(run, trained)
    run.events.write("result", result=result, artifacts=artifacts)
