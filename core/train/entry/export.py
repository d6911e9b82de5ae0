"""`python -m core.train.entry.export RUN_DIR`: the child of an export that was asked for after training. Its order is a
trainer's, with the base model in `model_dir` and what was trained in `adapter_dir`. Needs no GPU. SIGTERM ends it at
once: nothing of it is kept, and another attempt begins anew."""

from __future__ import annotations

import json
import os
import shutil
import sys
from functools import partial
from typing import Any

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import ARTIFACTS, EVENTS_FILE, ORDER_FILE, RUN_RECORD_FILE
from core.spec.run.orders import RunOrder
from core.train.__main__ import importing
from core.train.base import memory_limit
from core.train.base.log_lines import LogLines
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import arm, leave


def main(arguments: list[str]) -> int:
    run_dir = run_folder("core.train.entry.export", "Write formats of a model that was trained before.", arguments)
    order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    arm(order.fence_seconds, held_at=order.held_at, on_stop=lambda: os._exit(EXIT_CHECKPOINTED))
    with importing():
        from core.train.base.disk import tell_failure
        from core.train.base.events import EventWriter
        from core.train.base.reading import is_panic
        from core.train.failures import describe
        from core.train.run import Run

    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
    try:
        memory_limit.hold(order.memory_limit, of_helpers=order.helper_limit)
        with Run(order, run_dir, events) as run:
            _export(run)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        return tell_failure(error, events, describe(error, events.phase))
    finally:
        events.close()
    return EXIT_OK


def _export(run: Any) -> None:
    """Load what was trained, and write and prove the formats as a training run does at its end."""
    from core.spec.axes.method import Full
    from core.spec.axes.quantization import QAT
    from core.spec.job import JobSpec
    from core.spec.settled import method_of
    from core.train.export.artifacts import list_files
    from core.train.export.card.card import base_name, model_card
    from core.train.export.formats.subject import Subject
    from core.train.export.formats.write import write_formats
    from core.train.export.in_files import FusedInFiles
    from core.train.export.retention import probes
    from core.train.feed import read_data
    from core.train.kernels.fused.modules import fuse_parts
    from core.train.methods.qat import to_qat
    from core.train.model.build import build_model
    from core.train.model.compute import prepare_compute
    from core.train.model.load import given_head, load_model, saved_dtype
    from core.train.recipe import build_stage
    from core.train.vocabulary.tokenizer import load_tokenizer

    order, method = run.order, method_of(run.spec)
    rounded = run.spec.quantization if isinstance(run.spec.quantization, QAT) else None
    assert run.adapter_dir is not None  # every export has one
    run.phase("loading")
    compute = prepare_compute(run)
    tokenizer = load_tokenizer(run.tokenizer_dir)
    data = read_data(run, tokenizer)
    with FusedInFiles(run.folder):
        if isinstance(method, Full):
            head = run.spec.stage.head
            model = load_model(run.adapter_dir, saved_dtype(run.adapter_dir), head=given_head(run.adapter_dir, head))
            if rounded is not None:
                to_qat(model, rounded, saved_dtype(run.adapter_dir))
            if not run.spec.training.compile:
                fuse_parts(model, compute.placement.device)  # as it was trained: the figures are those of its run
        else:
            built = build_model(run, compute.placement, tokenizer, data.longest)
            built.hand_back()
            model = built.model
    model.eval()
    run.phase("saving")
    folder = run.folder / ARTIFACTS
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    base = base_name(order.model_source, order.model_dir)
    whole: Any = model
    subject = Subject(
        whole,
        method,
        tokenizer,
        model_dir=run.model_dir,
        artifacts=folder,
        trained_dir=run.adapter_dir,
        cache_dir=run.cache_dir,
        rows=probes(data.first_rows, whole.get_input_embeddings().weight.shape[0]),
        rows_of="training" if data.eval is None else "held_out",
        calibration=data.training_rows,
        name=run.spec.name or f"{base} tuned",
        between=run.check_stop,
        rounded=rounded,
        task_folder=run.task_folder,
    )
    outcomes = write_formats(run.spec.export, subject, run.events)
    record = json.loads((run.adapter_dir.parent / RUN_RECORD_FILE).read_text(encoding="utf-8"))
    trained = JobSpec.model_validate(record["spec"])
    card = partial(model_card, trained, record, record["result"], build_stage(trained, data), base=base)
    for outcome in outcomes:
        if (folder / outcome["folder"]).is_dir():
            (folder / outcome["folder"] / "README.md").write_text(card(exported=outcome), encoding="utf-8")
    run.events.write("result", result={"export": outcomes}, artifacts=list_files(folder))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
