"""A process that wants more memory than it was given ends in words that name the setting, and alone."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.jobs.lifecycle.finish import Failed
from core.spec.axes.model import LocalModel
from core.spec.run.exit_codes import EXIT_FAILED
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import MemoryLimit, PrepareOrder
from core.train.base import memory_limit
from core.train.data.tokenise.helpers import Helpers, HelperShort
from core.train.failures import describe
from core.train.render.options import RenderOptions
from tests.support.trainer import ROOT, events
from worker.attempt import outcome

GIB = 1 << 30


@pytest.fixture
def held() -> Iterator[MemoryLimit]:
    """This process may take no more than 256 MiB more."""
    limit = MemoryLimit(bytes=GIB // 4, setting="EFT_CPU_SLOT_BYTES")
    memory_limit.hold(limit)
    yield limit
    memory_limit.hold(None)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


def test_a_preparation_beyond_its_limit(tmp_path: Path, tiny_dir: Path) -> None:
    folder = Path(shutil.copytree(tiny_dir, tmp_path / "models" / "greedy"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config)[:-1] + ', "more": [' + "0," * (1 << 23) + "0]}")
    order = PrepareOrder(
        job_id="job-test", attempt=1, model=LocalModel(path=str(folder)), models_dir=str(tmp_path / "cache"),
        model_roots=[str(tmp_path)], memory_limit=MemoryLimit(bytes=64 << 20, setting="EFT_PREPARE_BYTES"),
    )  # fmt: skip
    (run := tmp_path / "run").mkdir()
    (run / ORDER_FILE).write_text(order.model_dump_json())
    command = [sys.executable, "-m", "core.train.entry.prepare", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_FAILED, done.stderr
    (error,) = events(run, "error")
    assert (error["failure"], error["code"]) == ("memory", "memory_limit")
    assert "may take 0.0671 GB beyond what it starts with (EFT_PREPARE_BYTES)" in error["message"]


def test_a_trainer_beyond_its_limit(held: MemoryLimit) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(GIB, dtype=torch.uint8)
    loading, training = describe(caught.value, "loading"), describe(caught.value, "training")
    assert (loading["failure"], loading["code"]) == ("memory", "memory_limit")
    # Smaller batches may help here, and are tried as on a box that is full.
    assert (training["code"], training["field"]) == ("out_of_memory", "training.per_device_train_batch_size")
    for told in (loading, training):
        assert "may take 0.268 GB beyond what it starts with (EFT_CPU_SLOT_BYTES)" in told["message"]


def test_what_is_known_only_later_is_allowed_beside_it(held: MemoryLimit) -> None:
    memory_limit.allow_more(2 * GIB)
    assert torch.zeros(GIB, dtype=torch.uint8).nbytes == GIB


def test_a_gpu_without_memory_is_not_the_limits_doing(held: MemoryLimit) -> None:
    told = describe(torch.OutOfMemoryError("HIP out of memory"), "loading")
    assert told["code"] == "out_of_memory" and "EFT_" not in told["message"]


def test_a_helper_beyond_its_limit(tiny_dir: Path) -> None:
    memory_limit.hold(None, of_helpers=MemoryLimit(bytes=GIB // 2, setting="EFT_PREPARE_BYTES"))
    helpers = Helpers(1, RenderOptions(), tiny_dir)
    try:
        with pytest.raises(HelperShort) as caught:
            helpers.result(helpers.submit(bytearray, GIB), lambda: None)
        assert helpers.result(helpers.submit(len, b"four"), lambda: None) == 4, "it goes on"
    finally:
        helpers.close()
        memory_limit.hold(None)
    told = describe(caught.value, "loading")
    assert (told["failure"], told["code"]) == ("memory", "memory_limit")
    assert "0.537 GB that it may take (EFT_PREPARE_BYTES)" in told["message"]


def test_a_library_that_aborts_for_want_of_memory() -> None:
    """tokenizers and safetensors are in Rust, which aborts where an allocation fails."""
    words = "memory allocation of 1000000000000 bytes failed\nFatal Python error: Aborted\n"
    found = outcome.read(-signal.SIGABRT, None, asked=None, out_of_memory=False, last_words=words)
    assert isinstance(found, Failed) and (found.failure, found.code) == ("memory", "memory_limit")
    other = outcome.read(-signal.SIGABRT, None, asked=None, out_of_memory=False, last_words="HSA_STATUS_ERROR")
    assert isinstance(other, Failed) and (other.failure, other.code) == ("machine", "aborted")
