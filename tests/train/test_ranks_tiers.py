"""A gang of two ranks resumes to the bit from each tier of its checkpoints; a bucket gives back what it was given."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from core.base.files import sha256
from core.settings import Settings
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.storage.bucket import Bucket
from core.storage.checkpoints import copy_checkpoint
from core.storage.layout import Layout
from core.storage.open import open_store
from core.train.checkpoint import store
from tests.support import boxes
from tests.support.claims import claim_of
from tests.support.gang import CODES, forked
from tests.support.trainer import events, log, pairs, weights, write_rows, write_run
from worker.store.local_cache import LocalCache
from worker.store.publisher import Publisher
from worker.store.staging import Staging

AXES: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "precision": "bf16",
        "max_length": 64,
    },
    "resources": {"gpus": 2, "accelerator": "cpu"},
}


def test_two_ranks_resume_to_the_bit_from_each_tier(tiny_dir: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(21))
    memory = [tmp_path / "memory" / f"attempt-{number}" for number in range(2)]

    def order(name: str, checkpoint: dict[str, int], **more: Any) -> Path:
        return write_run(tmp_path / name, tiny_dir, train, checkpoint={"type": "disk", **checkpoint}, **more, **AXES)

    calm = order("calm", {"save_steps": 2})
    left = order("left", {"save_steps": 2, "memory_steps": 1}, memory_dir=memory[0])
    from_memory = order(
        "from-memory", {"save_steps": 100, "memory_steps": 2}, memory_dir=memory[1], resume_from=[memory[0]]
    )
    from_disk = order("from-disk", {"save_steps": 100}, resume_from=[left])
    from_snapshot = order("from-snapshot", {"save_steps": 100}, resume_from=[memory[1]])
    ended = (from_memory, from_disk, from_snapshot)
    assert forked(str(calm), f"{left}@1:7", *map(str, ended)) == [EXIT_OK] * 2, log(calm)
    assert json.loads((calm / CODES).read_text()) == [EXIT_OK, EXIT_CHECKPOINTED, EXIT_OK, EXIT_OK, EXIT_OK]

    last = left / events(left, "checkpoint")[-1]["path"]
    resumed = [Path(events(run, "resumed")[0]["path"]) for run in ended]
    assert resumed[:2] == [memory[0] / "checkpoints" / last.name, last]
    assert resumed[2] == memory[1] / "checkpoints" / "step-00000004" and not events(from_memory, "checkpoint")
    for run in ended:
        assert weights(run) == weights(calm), run.name
    brought = copy_checkpoint(resumed[2], tmp_path / "checkpoints", "step-00000004")
    assert store.fault(brought) is None and {"rng.safetensors", "rng-1.safetensors"} <= files(brought).keys()
    assert files(through_a_bucket(left, last.name, tmp_path)) == files(last)


def files(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint."""
    return {path.name: sha256(path) for path in checkpoint.iterdir()}


def through_a_bucket(run: Path, name: str, folder: Path) -> Path:
    """A checkpoint of the first attempt as another box has it for the second: sent to an object store, and fetched."""
    job_id = "job-01kar3v8x5m2h6n9qst4wyz0bc"
    with boxes.object_store(folder, "lab") as port:
        settings = Settings(
            data="s3://lab/eft", work=folder / "work", s3_endpoint=f"http://127.0.0.1:{port}", s3_access_key_id="lab",
            s3_secret_access_key="secret", min_free_bytes=0,
        )  # fmt: skip
        bucket = open_store(settings)
        assert isinstance(bucket, Bucket)
        sender = Publisher(bucket, run, f"runs/{job_id}/attempt-1", keep_last=2, lost=threading.Event())
        sender.checkpoint(f"checkpoints/{name}")
        assert sender.finish((), True, lambda _: True)
        layout = Layout(folder / "other")
        layout.create()
        Staging(LocalCache(bucket, layout, 0, 0), claim_of(job_id, 2))._checkpoints(lambda: None)
        return layout.attempt(job_id, 1) / "checkpoints" / name
