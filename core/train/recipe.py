"""A batch run from order to artifacts: load → quantise → adapt → data → loop → evaluate → save."""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from core.errors import SpecError
from core.hardware import selftest
from core.hardware.selftest import Verdict, choose
from core.plan.advice import of_losses
from core.plan.memory import training_pass
from core.spec.axes.runtime import HeldOut, NoEvaluation, NoStream
from core.spec.axes.training import NoQuantization, Packed
from core.spec.run.contract import CHECKPOINTS, EVENTS_FILE, EXIT_CHECKPOINTED, EXIT_OK, ORDER_FILE, RunOrder
from core.spec.settled import method_of
from core.train.attention.probe import prepare_packing
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter, Unheard
from core.train.base.log_lines import LogLines
from core.train.base.reading import is_panic
from core.train.checkpoint import store
from core.train.checkpoint.best import hand_back_best
from core.train.data.windows import Feed
from core.train.engine import REMEDY, Diverged, Engine
from core.train.entry import memory_limit
from core.train.entry.fencing import Stop
from core.train.evaluate import Evaluator
from core.train.export.artifacts import write_artifacts
from core.train.export.compare import probes
from core.train.failures import describe
from core.train.feed import Data, build_feed, read_data
from core.train.loop import Ledger, Loop, StopRequested
from core.train.model.build import build_model, count_parameters
from core.train.model.gemm_limits import split_products, tell_parts
from core.train.model.load import load_tokenizer, quiet, saved_dtype
from core.train.model.placement import Placement, place
from core.train.model.record import Environment
from core.train.model.scaler import LossScaler
from core.train.optim.optimizers import build_optimizer
from core.train.optim.schedules import build_schedule
from core.train.optim.updates import OnDevice
from core.train.quant.fp8 import dense_again
from core.train.ranks.env import Seat
from core.train.ranks.group import join
from core.train.ranks.meet import meet, tell_launcher
from core.train.selftest.apply import apply_selftest
from core.train.stages.sft import choose_sft_loss, whole_logits


def run(run_dir: Path, stop: Stop | None = None, seat: Seat | None = None) -> int:
    """Do what `run_dir/run.json` orders; the answer is the exit code (core/spec/run/contract.py). A failure is told in
    an error event and in the log, there with the traceback unless its message is made for users. Set `stop.requested`
    (SIGTERM does) to checkpoint and leave. `seat`: which of several ranks this process is; None: there is one."""
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout)) if seat is None or seat.rank == 0 else Unheard()
    try:
        order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with ExitStack() as at_end:
            _train(order, run_dir, events, stop or Stop(), seat, at_end)
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


def _train(
    order: RunOrder, run_dir: Path, events: EventWriter, stop: Stop, seat: Seat | None, at_end: ExitStack
) -> None:
    spec, training = order.spec, order.spec.training

    def leave_if_asked() -> None:
        events.alive()
        if stop.requested:
            raise StopRequested

    # --- load, quantise, adapt -----------------------------------------------------------------------
    events.write("phase", phase="loading")
    quiet()
    tried = None if order.selftest is None else Verdict.model_validate(order.selftest)
    choice = choose(tried)
    local_rank = 0 if seat is None else seat.local_rank
    placement = place(spec.resources, spec.training, method_of(spec), choice, local_rank=local_rank)
    ranks = join(seat, placement.device)
    together = meet(ranks, order, placement)
    if placement.notice:
        events.write("notice", code="precision_fallback", message=placement.notice)
    for code, words in [*placement.notices, *apply_selftest(choice, spec, placement.precision)]:
        events.write("notice", code=code, message=words)
    if order.settled is not None:
        events.write("notice", code="method", message=order.settled["words"])
    with stop.at_once():
        leave_if_asked()
        tokenizer = load_tokenizer(Path(order.model_dir))
        with ranks.in_turn(order.cache_dir is not None and not spec.data.streaming):
            data = read_data(order, tokenizer, events, leave_if_asked, ranks)
        plain = isinstance(spec.quantization, NoQuantization) and isinstance(spec.memory.stream, NoStream)
        with ranks.in_turn(order.cache_dir is not None and not plain):
            built = build_model(
                spec,
                Path(order.model_dir),
                placement,
                tokenizer,
                cache_dir=None if order.cache_dir is None else Path(order.cache_dir),
                longest=data.longest,
                events=events,
                between=leave_if_asked,
                memory_bytes=order.memory_bytes,
            )
    for held in (built.streamed, built.offload):
        if held is not None:
            at_end.callback(held.close)
    if built.inputs is not None:
        at_end.callback(built.inputs.close)
    ranks.seed(training.seed)

    # --- engine --------------------------------------------------------------------------------------
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    feed, total_steps = build_feed(spec, data, pad, events, ranks)
    ledger, environment = Ledger(), Environment(placement)
    updates = built.offload or OnDevice(built.model)
    engine = Engine(
        built.model,
        build_optimizer(spec.optimizer, updates.parameters, built.model),
        build_schedule(spec.schedule, total_steps),
        device=placement.device,
        autocast=placement.autocast,
        max_grad_norm=training.max_grad_norm,
        pad_token_id=pad,
        parts={"ledger": ledger, "environment": environment, "cursor": feed},
        scaler=LossScaler() if placement.precision == "fp16" else None,
        ranks=ranks,
        updates=updates,
    )
    packing = prepare_packing(engine) if isinstance(spec.batching, Packed) else None
    loss_function, loss_record = choose_sft_loss(engine, veto=choice.veto.get("chunked"))
    computed = placement.autocast or placement.weights
    whole = loss_record["kernel"] == "logits"
    if whole:
        events.write("notice", code="whole_logits", message=whole_logits(loss_record["reason"], engine.model))
    split_products(engine.model, placement.limits)
    if in_parts := tell_parts(spec, engine.model, placement.limits, computed, data.longest, whole):
        events.write("notice", code="products_in_parts", message=in_parts)
    record = _record(order, placement, environment, data, engine, total_steps) | {"selftest": selftest.record(tried)}
    record |= {
        "quantization": built.quantization,
        "fp8": built.fp8,
        "memory": built.memory,
        "loss": loss_record,
        "packing": packing,
    }
    record |= {"ranks": together, "settled": order.settled}
    events.write("run_record", record=record)
    held_out = spec.evaluation or NoEvaluation()
    evaluator: Evaluator | None = None
    if isinstance(held_out, HeldOut):
        tokens, _ = training_pass(spec, data.longest)
        evaluator = Evaluator(
            engine, tokenizer, data.eval, held_out, options=data.options, most_tokens=tokens, between=leave_if_asked
        )
    _resume(engine, feed, ledger, environment, order, run_dir, events)
    engine.hold_together()

    # --- loop ----------------------------------------------------------------------------------------
    loop = Loop(
        engine=engine,
        loss_function=loss_function,
        feed=feed,
        total_steps=total_steps,
        evaluation=held_out,
        evaluator=evaluator,
        checkpoint=spec.checkpoint,
        ledger=ledger,
        events=events,
        stop=stop,
        run_dir=run_dir,
    )
    gc.collect()
    gc.freeze()  # the collector need not walk the models' objects again and again: 3 % of a step on a CPU
    try:
        loop.run()
    finally:
        gc.unfreeze()
    if 0 < engine.steps == ledger.lost_losses:  # fewer than the scaler has patience with
        raise Diverged(
            f"in none of {engine.steps} step(s) the loss was a finite number; {REMEDY}", field="training.precision"
        )

    # --- save ----------------------------------------------------------------------------------------
    events.write("phase", phase="saving")
    if spec.export:
        loop.save()  # making and checking formats may take a while: whoever is stopped in it goes on from here
    ranks.disband()
    if not ranks.first:
        return  # what is left is one model's, and one process's work
    best = hand_back_best(engine, ledger.evaluations, held_out, _checkpoint_folders(order, run_dir), events)
    result = _result(ledger, engine, best, stopped_early=loop.stopped_early)
    if (rose := of_losses(*(_loss(result[name]) for name in ("eval_before", "eval_after")))) is not None:
        result["notices"] = [rose.as_dict()]
        events.write("notice", code=rose.code, message=rose.message)
    if built.offload is not None:
        built.offload.hand_back()
    if placement.fp8:
        dense_again(engine.model)
    result, artifacts = write_artifacts(
        run_dir,
        spec=spec,
        model=engine.model,
        tokenizer=tokenizer,
        source=order.model_source,
        model_dir=order.model_dir,
        dtype=saved_dtype(Path(order.model_dir)),
        record=record,
        result=result,
        metrics=ledger.metrics,
        evaluations=ledger.evaluations,
        samples=ledger.samples,
        probes=probes([data.train[row][0] for row in range(min(len(data.train), 64))]),
        events=events,
        between=leave_if_asked,
    )
    events.write("result", result=result, artifacts=artifacts)


# --- state and record ------------------------------------------------------------------------------------


def _resume(
    engine: Engine,
    feed: Feed,
    ledger: Ledger,
    environment: Environment,
    order: RunOrder,
    run_dir: Path,
    events: EventWriter,
) -> None:
    """Go on from the furthest checkpoint that is whole, of this attempt or of those before. Rank 0 looks for all."""
    ranks = engine.ranks
    found = _furthest(_checkpoint_folders(order, run_dir), events) if ranks.first else None
    path = ranks.share("" if found is None else str(found))
    if not path:
        return
    try:
        engine.load(Path(path))
    except ValueError as error:
        raise SpecError(f"{Path(path).name} belongs to another run: {error}", code="checkpoint_mismatch") from error
    step, before = engine.steps, engine.micro_steps
    micro = feed.translate(step, before)
    if micro is None:  # it lies between two batches of ours: the step begins anew, with all of its rows
        engine.zero_grad()
        ledger.drop_window()
    else:
        engine.micro_steps = micro
    events.write("resumed", step=step, micro_step=before, path=path)
    if drift := environment.drift():
        message = f"not where it was before ({'; '.join(drift)}): the rest may differ in the last bits"
        events.write("notice", code="drift", message=message)


def _furthest(folders: list[Path], events: EventWriter) -> Path | None:
    """The furthest checkpoint that is whole; those before it that are not are put aside."""
    for found in store.newest_first(folders):
        wrong = store.fault(found.path)
        if wrong is None:
            return found.path
        kept = store.quarantine(found.path)
        message = f"{found.path.name} is damaged ({wrong}); kept as {kept.name}, the one before it is tried"
        events.write("notice", code="bad_checkpoint", message=message)
    return None


def _checkpoint_folders(order: RunOrder, run_dir: Path) -> list[Path]:
    """Of this attempt, then of those before it."""
    return [folder / CHECKPOINTS for folder in (run_dir, *map(Path, order.resume_from))]


def _record(
    order: RunOrder, placement: Placement, environment: Environment, data: Data, engine: Engine, total_steps: int
) -> dict[str, Any]:
    total = count_parameters(engine.model)
    trained = sum(p.numel() for p in engine.trained_parameters.values())
    return {
        "job_id": order.job_id,
        "attempt": order.attempt,
        "model": order.model_source or {"path": order.model_dir},
        "environment": environment.here,
        "precision": {
            "wanted": order.spec.training.precision,
            "compute": placement.precision,
            "weights": str(placement.weights).removeprefix("torch."),
            "trained": "float32",
            "notice": placement.notice,
            "loss_scaler": None if engine.scaler is None else engine.scaler.about(),
        },
        "data": {
            "train": data.train_record,
            "eval": data.eval_record,
            "loss_on": data.loss_on,
            "rendering": data.rendering,
        },
        "parameters": {"total": total, "trained": trained},
        "total_steps": total_steps,
        "seed": order.spec.training.seed,
        "spec": order.spec.model_dump(mode="json"),
    }


def _loss(values: dict[str, float] | None) -> float | None:
    return None if values is None else values["eval_loss"]


def _result(ledger: Ledger, engine: Engine, best: dict[str, Any] | None, *, stopped_early: bool) -> dict[str, Any]:
    def values(step: int) -> dict[str, float] | None:
        found = ledger.evaluated(step)
        return None if found is None else {name: value for name, value in found.items() if name != "step"}

    return {
        "train_loss": ledger.loss_sum / max(1, engine.steps - ledger.lost_losses),
        "steps": engine.steps,
        "train_seconds": ledger.seconds,
        "tokens_per_second": ledger.tokens / max(ledger.seconds, 1e-9),
        "total_tokens": ledger.tokens,
        "stopped_early": stopped_early,
        "best": best,
        "eval_before": values(0),
        "eval_after": values(best["step"] if best is not None and best["restored"] else engine.steps),
    }
