"""Bad input to layer streaming: each with its code, its field and a way out, under real limits of the kernel's."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, RwkvConfig, RwkvForCausalLM

from core.error_codes import PARTS
from core.errors import EftError
from core.spec.run.exit_codes import EXIT_DATA_ROOT_LOST
from core.train.base.stop import Stop
from core.train.memory.available import available_bytes
from core.train.memory.streaming.block_source import FileBlocks, HostBlocks
from core.train.memory.streaming.blocks import StreamedBlock, find_blocks, lay_out, lay_out_block
from core.train.memory.streaming.stream import StreamedModel, stream_from_host
from core.train.memory.transfer.pinned import PinnedRefused
from core.train.recipe import run
from tests.support import tiny_model
from tests.support.blocks import CPU
from tests.support.status import status_bytes
from tests.support.trainer import events, pairs, write_rows, write_run
from worker.attempt.outcome import read

MIB = 2**20
CODES = {code for _, codes in PARTS.values() for code in codes}


def told(error: EftError, code: str, field: str, way_out: str) -> None:
    assert (error.code, error.field) == (code, field), error.message
    assert way_out in error.message
    assert code in CODES


@contextmanager
def limited(limit: int, more: int) -> Iterator[None]:
    """Within, this process may take `more` bytes beside what it has: a real limit of the kernel's."""
    soft, hard = resource.getrlimit(limit)
    of = {resource.RLIMIT_DATA: "VmData", resource.RLIMIT_MEMLOCK: "VmLck"}[limit]
    resource.setrlimit(limit, (status_bytes(of) + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def large(folder: Path, count: int) -> tuple[nn.Module, list[StreamedBlock], FileBlocks]:
    """Blocks of 40 MiB in a file with holes: large enough that the allocator asks the kernel for each."""
    file = folder / "blocks"
    with file.open("wb") as opened:
        opened.truncate(count * 40 * MIB)
    files = FileBlocks([(file, n * 40 * MIB, 40 * MIB) for n in range(count)])
    layers = [nn.Linear(5120, 4096, bias=False, device="meta") for _ in range(count)]
    for n, layer in enumerate(layers):
        weight = files.rest(n).view(torch.bfloat16).view(4096, 5120)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    blocks = [lay_out_block(f"layers.{n}", layer, trained=True) for n, layer in enumerate(layers)]
    return nn.ModuleList(layers), blocks, files


def llama(**sizes: Any) -> Any:
    small: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**small | sizes)).requires_grad_(False)


# --- slots and host memory ---------------------------------------------------------------------------------


def test_slots_that_do_not_fit(tmp_path: Path) -> None:
    """What is free is known beforehand, by the process's own limits too."""
    model, blocks, files = large(tmp_path, 3)
    with limited(resource.RLIMIT_DATA, 60 * MIB):
        free = available_bytes()
        assert free is not None and free <= 60 * MIB
        with pytest.raises(EftError) as refused:
            StreamedModel(model, blocks, files, CPU, slots=3)
        one = StreamedModel(model, blocks, files, CPU, slots=1)
    told(refused.value, "slots_do_not_fit", "memory.stream.slots", "take fewer slots")
    assert "3 slots of 41 MiB" in refused.value.message
    one.close()


def test_more_slots_than_blocks() -> None:
    with pytest.raises(EftError) as refused:
        stream_from_host(llama(), CPU, slots=4)
    told(refused.value, "more_slots_than_blocks", "memory.stream.slots", "or take fewer")


def test_blocks_that_the_hosts_memory_does_not_hold(tmp_path: Path) -> None:
    _, blocks, _ = large(tmp_path, 2)
    with limited(resource.RLIMIT_DATA, 20 * MIB), pytest.raises(EftError) as refused:
        HostBlocks(blocks, pinned=False)
    told(refused.value, "blocks_do_not_fit", "memory.stream", "set `memory.stream` to `disk`")
    assert "layers.0" in refused.value.message


# --- pinned memory -----------------------------------------------------------------------------------------


class Driver:
    """In place of a GPU's driver, which is not here: locks memory by mlock(2), so that the kernel refuses."""

    libc = ctypes.CDLL(None, use_errno=True)
    locked: ClassVar[dict[int, int]] = {}

    def cudaHostRegister(self, at: int, nbytes: int, flags: int) -> int:
        if self.libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(nbytes)):
            return 2  # cudaErrorMemoryAllocation
        self.locked[at] = nbytes
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        return int(self.libc.munlock(ctypes.c_void_p(at), ctypes.c_size_t(self.locked.pop(at))))


@contextmanager
def without_privileges() -> Iterator[None]:
    """root may lock as much as it likes (CAP_IPC_LOCK)."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was == 0:
            os.seteuid(0)


def test_memory_that_the_system_will_not_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a real RLIMIT_MEMLOCK that has room for one block of three. What was locked is unlocked again."""
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    model = llama(hidden_size=32, intermediate_size=48)
    blocks = lay_out(model)
    most: list[int] = []

    class Watched(HostBlocks):
        def close(self) -> None:
            most.append(len(Driver.locked))
            super().close()

    with limited(resource.RLIMIT_MEMLOCK, blocks[0].nbytes * 3 // 2), without_privileges():
        with pytest.raises(PinnedRefused) as refused:
            Watched(blocks, pinned=True)
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] >> 10
    told(refused.value, "pinned_memory_refused", "memory.stream.pinned", "`memory.stream.pinned` to false")
    assert f"its limit on locked memory is {limit} KiB" in refused.value.message
    assert "LimitMEMLOCK=" in refused.value.message
    assert (most, Driver.locked) == ([1], {})
    assert model(torch.zeros(1, 4, dtype=torch.long)).logits.isfinite().all()  # nothing of the model is lost


# --- blocks ------------------------------------------------------------------------------------------------


def test_blocks_that_cannot_be_found() -> None:
    with pytest.raises(EftError) as refused:
        find_blocks(nn.Sequential(nn.Linear(4, 4)))
    told(refused.value, "blocks_not_found", "memory.stream", "leave `memory.stream` out")
    with pytest.raises(EftError) as refused:
        lay_out(llama().requires_grad_(True))
    told(refused.value, "blocks_not_found", "memory.stream", "nothing of model.layers.0 is frozen")


def test_blocks_that_are_one_or_share_weights() -> None:
    model = llama()
    layers = model.model.layers
    layers[2].mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    with pytest.raises(EftError) as refused:
        lay_out(model)
    told(refused.value, "blocks_shared", "memory.stream", "leave `memory.stream` out")
    assert "model.layers.2 shares a weight with model.layers.0" in refused.value.message
    layers[2] = layers[1]
    with pytest.raises(EftError) as refused:
        lay_out(model)
    told(refused.value, "blocks_shared", "memory.stream", "leave `memory.stream` out")
    assert "model.layers.2 is the same block as model.layers.1" in refused.value.message
    tied = llama()
    tied.model.layers[0].mlp.extra = tied.model.embed_tokens
    with pytest.raises(EftError, match=r"shares a weight with model\.layers\.0") as refused:
        lay_out(tied)
    told(refused.value, "blocks_shared", "memory.stream", "leave `memory.stream` out")


def test_a_model_that_rewrites_its_blocks() -> None:
    """RWKV scales them where it evaluates: in a mapped file that ends the process, in a slot it would be forgotten."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}
    model = RwkvForCausalLM(RwkvConfig(**sizes))
    with pytest.raises(EftError) as refused:
        find_blocks(model)
    told(refused.value, "blocks_shared", "memory.stream", "leave `memory.stream` out")


# --- a data root that disappears ---------------------------------------------------------------------------


class After(Stop):
    """Does something once the first step is done."""

    def __init__(self, path: Path, do: Any) -> None:
        super().__init__()
        self._path, self._do = path, do

    @property
    def requested(self) -> bool:  # type: ignore[override]
        if self._do is not None and events(self._path, "metrics"):
            do, self._do = self._do, None
            do()
        return False

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def order(folder: Path, root: Path, stream: Any) -> Path:
    tiny_model.make(folder / "model")
    config = AutoConfig.from_pretrained(folder / "model")
    config.num_hidden_layers = 3
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return write_run(
        root / "runs" / "one",
        folder / "model",
        write_rows(folder / "rows.jsonl", pairs(8)),
        cache_dir=root / "cache",
        method={"type": "lora", "r": 2},
        training={"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 32},
        checkpoint={"save_steps": 2},
        memory={"stream": stream},
    )


@pytest.mark.parametrize("stream", ["disk", "none"])
def test_a_data_root_that_disappears(tmp_path: Path, stream: str) -> None:
    """Deleted in mid-run with the run's own folder. The blocks' files are open and can be read to the end; nothing can
    be written any more, no event either: the exit code has to say it."""
    root = tmp_path / "root"
    path = order(tmp_path, root, stream)
    code = run(path, After(path, lambda: shutil.rmtree(root)))
    assert code == EXIT_DATA_ROOT_LOST
    assert not root.exists()
    outcome = read(code, None, asked=None, out_of_memory=False)
    assert (outcome.failure, outcome.code) == ("machine", "data_root_lost")  # type: ignore[union-attr]
    assert "data root" in outcome.message  # type: ignore[union-attr]
    assert outcome.code in CODES  # type: ignore[union-attr]
