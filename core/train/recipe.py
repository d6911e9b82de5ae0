"""A batch run from its order to its artifacts: load → quantise → adapt → train → evaluate → save."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from core.plan.advice import of_losses
from core.spec.axes.batching import Packed
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.attention.probe import prepare_packing
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter, Unheard
from core.train.base.log_lines import LogLines
from core.train.base.reading import is_panic
from core.train.checkpoint.best import load_best_model
from core.train.checkpoint.resume import resume
from core.train.engine import Engine, LossFunction, build_engine
from core.train.entry.fencing import Stop
from core.train.evaluate import build_evaluator
from core.train.export.artifacts import Trained, write_artifacts
from core.train.failures import describe
from core.train.feed import RunData, build_feed, read_data
from core.train.loop import Loop
from core.train.model.build import Built, build_model
from core.train.model.compute import Compute, prepare_compute
from core.train.model.gemm_limits import split_products, tell_parts
from core.train.model.load import load_tokenizer, pad_token
from core.train.optim.schedules import build_schedule
from core.train.ranks.env import Seat
from core.train.ranks.meet import tell_launcher
from core.train.run import Run, StopRequested
from core.train.stages.sft import choose_sft_loss, whole_logits
from core.train.state import TrainerState


def run(run_dir: Path, stop: Stop | None = None, seat: Seat | None = None) -> int:
    """Run what `run_dir/run.json` orders and return the exit code (core/spec/run). A failure is told in an
    error event and in the log, there with the traceback unless its message is made for users.

    Set `stop.requested` (SIGTERM does) to checkpoint and leave. `seat`: which of several ranks this process is; None:
    there is one.
    """
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout)) if seat is None or seat.rank == 0 else Unheard()
    try:
        order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with Run(order, run_dir, events, stop or Stop(), seat) as here:
            train(here)
    except StopRequested:
        return EXIT_CHECKPOINTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        payload = describe(error, events.phase)
        return tell_failure(error, events, payload) if seat is None else tell_launcher(error, seat, events, payload)
    finally:
        events.close()
    return EXIT_OK


def train(run: Run) -> None:
    """Load, adapt, train, evaluate and save, in this order for every stage and every method."""
    run.phase("loading")
    compute = prepare_compute(run)
    with run.stop.at_once():
        run.check_stop()
        tokenizer = load_tokenizer(run.model_dir)
        with run.ranks.in_turn(run.caches_tokens):
            data = read_data(run, tokenizer)
        with run.ranks.in_turn(run.caches_weights):
            built = build_model(run, compute.placement, tokenizer, data.longest)
    run.ranks.seed(run.spec.training.seed)
    feed, total_steps = build_feed(run, data, pad_token(tokenizer))
    state = TrainerState()
    engine = build_engine(
        built.model,
        run.spec.optimizer,
        build_schedule(run.spec.schedule, total_steps),
        device=compute.placement.device,
        autocast=compute.placement.autocast,
        max_grad_norm=run.spec.training.max_grad_norm,
        pad_token_id=pad_token(tokenizer),
        parts={"ledger": state, "environment": compute.environment, "cursor": feed},
        scaler=compute.scaler,
        ranks=run.ranks,
        updates=built.updates,
    )
    loss, chosen = choose_kernels(run, compute, engine, data)
    parts = (run, compute, data, engine, built)
    record = {name: value for part in parts for name, value in part.about().items()} | chosen
    record["total_steps"] = total_steps
    run.events.write("run_record", record=record)
    evaluator = build_evaluator(run, engine, tokenizer, data)
    resume(run, engine, feed, state, compute.environment)
    engine.hold_together()
    loop = Loop(run, engine, loss, feed, total_steps, evaluator, state)
    loop.train()
    save(loop, built, tokenizer, data, record)


def choose_kernels(run: Run, compute: Compute, engine: Engine, data: RunData) -> tuple[LossFunction, dict[str, Any]]:
    """The loss function of the run with the kernels that it takes, and entries of the run record."""
    placement = compute.placement
    packing = prepare_packing(engine) if isinstance(run.spec.batching, Packed) else None
    loss_function, loss = choose_sft_loss(engine, veto=compute.choice.veto.get("chunked"))
    whole = loss["kernel"] == "logits"
    if whole:
        run.notice("whole_logits", whole_logits(loss["reason"], engine.model))
    split_products(engine.model, placement.limits)
    computed = placement.autocast or placement.weights
    if in_parts := tell_parts(run.spec, engine.model, placement.limits, computed, data.longest, whole):
        run.notice("products_in_parts", in_parts)
    return loss_function, {"loss": loss, "packing": packing}


def save(loop: Loop, built: Built, tokenizer: Any, data: RunData, record: dict[str, Any]) -> None:
    """Hand back what was trained, with all that is known of how it came about."""
    run, engine, state = loop.run, loop.engine, loop.state
    run.phase("saving")
    if run.spec.export:
        loop.save()  # making and checking formats may take a while: a run that is stopped in it goes on from here
    run.ranks.disband()
    if not run.ranks.first:
        return  # what is left is one model's, and one process's work
    best = load_best_model(run, engine, state.evaluations)
    result = state.result(engine.steps, best, stopped_early=loop.stopped_early)
    before, after = (values and values["eval_loss"] for values in (result["eval_before"], result["eval_after"]))
    if (rose := of_losses(before, after)) is not None:
        result["notices"] = [rose.as_dict()]
        run.notice(rose.code, rose.message)
    built.hand_back()
    trained = Trained(engine.model, tokenizer, record, result, state, data.first_rows)
    result, artifacts = write_artifacts(run, trained)
    run.events.write("result", result=result, artifacts=artifacts)
