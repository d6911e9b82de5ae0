"""`method: auto` for real: a CPU slot with little memory, a trainer that is killed, and the method that stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from sqlalchemy import insert, select

from core.db.engine import Database
from core.db.tables import Attempt, Event, Job, Project, User
from core.jobs.admission import fit
from core.jobs.base.slots import Slot
from core.jobs.lifecycle.submit import Actor, cancel, submit
from core.plan.candidates import candidates
from core.plan.memory.plan import plan
from core.plan.models.shape import Shape
from core.plan.stream import MARGIN
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support import migrated, selftest
from tests.support.service import wait_for
from worker.agent.agent import Agent

ADA = Actor("user-ada", "proj-lab")
HIDDEN, INNER, KEYS, LAYERS, VOCABULARY = 512, 1024, 256, 7, 258
LENGTH = 32


def make(folder: Path, tokenizer: Path) -> Path:
    """A Llama of 17 million random weights: enough that packing saves more than the scratch space it takes."""
    shutil.copytree(tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    chance = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return (chance.standard_normal((rows, columns), dtype=np.float32) * 0.02).astype(np.float16)

    ones = np.ones(HIDDEN, dtype=np.float16)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}.{name}.weight": ones for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def job(model: Path, rows: Path) -> JobSpec:
    training = {"max_steps": 100_000, "per_device_train_batch_size": 1, "max_length": LENGTH, "precision": "fp32"}
    document = {
        "model": str(model),
        "data": str(rows),
        "method": {"type": "auto", "r": 2},
        "training": training,
        "checkpoint": {"save_steps": 1},
    }
    return resolve(parse_job(document))


def room_for(name: str, spec: JobSpec, shape: Shape) -> int:
    """Memory of a CPU slot on which the rung of this name is the first that fits."""
    peaks: dict[str, int] = {}
    for rung in candidates(spec):
        assert rung.spec is not None
        peaks[rung.name] = plan(rung.spec, shape, longest=LENGTH, device=fit.device_of(Slot("cpu", "cpu"))).peak
        if rung.name == name:
            break
    *before, own = peaks.values()
    assert own < min(before), "each rung is to need less here than those before it"
    return round((own + min(before)) / 2 / MARGIN)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)  # 50 MB


@pytest.mark.usefixtures("forked")
def test_it_settles_on_what_fits_and_stays(root: Path, tiny_dir: Path) -> None:
    model = make(root / "models" / "wide", tiny_dir)
    rows = root / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(32)))
    spec, shape = job(model, rows), Shape.of_folder(model)
    settings = Settings(
        data=str(root / "data"),
        node="box",
        model_roots=(root / "models",),
        data_roots=(root,),
        cpu_slot_bytes=room_for("qlora", spec, shape),
        lease_seconds=60,
        renew_seconds=0.5,
        fence_seconds=40,
        relay_seconds=0.1,
        retry_backoff_seconds=0.1,
        min_free_bytes=0,
        spare=False,
    )
    layout = Layout(settings.root)
    layout.create()
    selftest.lay(settings.root, "box")
    migrated.lay(settings.root / "eft.db")
    database = Database(settings.sqlalchemy_url)
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
    with database.write() as session:
        job_id = submit(session, ADA, spec).id

    def row() -> Job:
        with database.read() as session:
            return session.execute(select(Job).where(Job.id == job_id)).scalar_one()

    def events(kind: str) -> list[dict[str, Any]]:
        with database.read() as session:
            query = select(Event.data).where(Event.job_id == job_id, Event.type == kind)
            return list(session.execute(query.order_by(Event.seq)).scalars())

    def told() -> str:
        logs = [path.read_text()[-2000:] for path in sorted(settings.root.glob("runs/*/*/log.txt"))]
        return "\n".join([f"{row().status}: {row().reason}", *logs])

    @contextmanager
    def served(settings: Settings) -> Iterator[None]:
        agent, over = Agent(settings), threading.Event()

        def serve() -> None:
            while not over.wait(0.05):
                agent.serve()

        thread = threading.Thread(target=serve)
        try:
            agent.start(lambda job_id: None, lambda: 0)
            thread.start()
            yield
        finally:
            over.set()
            agent.stop()
            thread.join(120)
            assert not thread.is_alive()

    with served(settings):
        wait_for(lambda: events("checkpoint"), 300, "a checkpoint", told)
        settled = row().settled
        assert settled is not None and settled["rung"] == "qlora", settled
        assert (settled["spec"]["method"]["type"], settled["spec"]["quantization"]["type"]) == ("qlora", "nf4")
        names = [one["rung"] for one in settled["rejected"]]
        assert [name for name in names if " with " not in name] == ["full", "lora", "lora over int8"]
        assert row().spec["method"]["type"] == "auto" and row().spec["optimizer"]["learning_rate"] is None
        method = next(one for one in events("notice") if one["code"] == "method")
        assert "`method: auto` is qlora" in method["message"] and "full: takes" in method["message"]
        with database.read() as session:
            query = select(Attempt.pid).where(Attempt.job_id == job_id).order_by(Attempt.attempt.desc()).limit(1)
            pid = session.execute(query).scalar_one()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: row().machine_failures, 120, "its end to be seen", told)
    # A worker with the box's whole memory: another job would be fully fine-tuned there.
    with served(settings.model_copy(update={"cpu_slot_bytes": 0})):
        wait_for(lambda: events("resumed"), 300, "the run to go on", told)
        assert row().settled == settled
        with database.read() as session:
            told_of = select(Attempt.run_record).where(Attempt.job_id == job_id).order_by(Attempt.attempt)
            records = [record for record in session.execute(told_of).scalars() if record is not None]
        assert len(records) >= 2
        for record in records:
            assert record["settled"]["rung"] == "qlora" and record["spec"]["method"]["type"] == "qlora"
            assert record["quantization"]["format"] == "nf4"
            assert record["spec"]["optimizer"]["learning_rate"] == 2e-4
        with database.write() as session:
            cancel(session, ADA, job_id)
        wait_for(lambda: row().status == "cancelled", 120, "its end", told)
    database.dispose()
