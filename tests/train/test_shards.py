"""Merged weights are written in constant memory: a limit of the kernel leaves half of what the model takes. The models
are of 100 MB and more, since buffers of libraries and holes of the heap take some 20."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from core.base.files import sha256
from core.train.base.shards import INDEX_FILE, write_shards
from core.train.export.in_files import FusedInFiles
from core.train.export.merge import merged_tensors, write_merged
from core.train.model.load import load_model
from tests.support.status import status_bytes


@contextmanager
def room(more: int) -> Iterator[None]:
    """Within, the process gets so many bytes more of the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def fits(more: int, work: Callable[[], object]) -> bool:
    """Whether so many bytes more suffice, in a fork. What other tests have freed in the heap is filled first."""
    child = os.fork()
    if child == 0:
        try:
            filled = list[torch.Tensor]()
            with suppress(MemoryError, RuntimeError), room(0):
                while True:
                    filled.append(torch.empty(2**18, dtype=torch.uint8))
            with room(more):
                work()
            os._exit(0)
        except (MemoryError, RuntimeError):
            os._exit(3)
        finally:
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 3), code
    return code == 0


def grown_by(work: Callable[[], object]) -> int:
    """Bytes of memory of its own that what `work` makes takes, in a fork; what lies in files is not counted."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be taken again without growing
            before = status_bytes("RssAnon")
            made = work()
            os.write(theirs, str(status_bytes("RssAnon") - before).encode())
            del made
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        found = int(told.read())
    os.waitpid(child, 0)
    return found


def test_a_model_twice_as_large_as_the_memory_left_is_merged(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=8,
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    size = sum(parameter.nbytes for parameter in base.parameters())
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    write_merged(model, tmp_path / "free", model_dir=tmp_path / "base", dtype=torch.float32)
    assert not fits(size // 2, lambda: dict(merged_tensors(model.get_base_model(), torch.float32, None)))
    assert fits(
        size // 2,
        lambda: write_merged(model, tmp_path / "limited", model_dir=tmp_path / "base", dtype=torch.float32),
    )
    assert sha256(tmp_path / "free/model.safetensors") == sha256(tmp_path / "limited/model.safetensors")
    whole = dict(merged_tensors(model.get_base_model(), torch.float32, None))
    save_file(whole, tmp_path / "plain.safetensors", metadata={"format": "pt"})
    assert sha256(tmp_path / "plain.safetensors") == sha256(tmp_path / "free/model.safetensors")
    assert not [one for one in (tmp_path / "limited").iterdir() if one.name.startswith((".", "shard-"))]


def test_fused_experts_are_read_and_merged_layer_by_layer(tmp_path: Path) -> None:
    """transformers fuses them in memory, and undoes that on all weights at once, for which the limit has no room."""
    config = Qwen2MoeConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, moe_intermediate_size=512, num_hidden_layers=12,
        shared_expert_intermediate_size=512, num_attention_heads=8, num_key_value_heads=8, num_experts=4,
        max_position_embeddings=64,
    )  # fmt: skip
    Qwen2MoeForCausalLM(config).save_pretrained(tmp_path / "base")
    model: Any = get_peft_model(
        load_model(tmp_path / "base", torch.float32),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False),
    )
    base = model.get_base_model()
    size = 2 * sum(parameter.numel() for parameter in base.parameters())

    def at_once() -> dict[str, torch.Tensor]:
        whole: dict[str, torch.Tensor] = revert_weight_conversion(
            base, dict(merged_tensors(base, torch.bfloat16, None))
        )
        return whole

    def merge(name: str) -> None:
        write_merged(model, tmp_path / name, model_dir=tmp_path / "base", dtype=torch.bfloat16)

    def read() -> nn.Module:
        return load_model(tmp_path / "base", torch.float32)

    def read_in_files() -> nn.Module:
        with FusedInFiles(tmp_path):
            return read()

    experts = sum(one.nbytes for name, one in base.named_parameters() if ".experts." in name)
    assert grown_by(read) > 0.9 * experts > 9 * grown_by(read_in_files)
    assert not fits(size // 2, at_once)
    assert fits(size // 2, lambda: merge("limited"))
    merge("free")
    assert sha256(tmp_path / "free/model.safetensors") == sha256(tmp_path / "limited/model.safetensors")
    plain, there = read().state_dict(), read_in_files().state_dict()
    assert all(torch.equal(plain[name], one) for name, one in there.items()) and not list(tmp_path.glob(".fused-*"))
    found, whole = load_file(tmp_path / "free/model.safetensors"), at_once()
    assert found.keys() == whole.keys() == load_file(tmp_path / "base/model.safetensors").keys()
    assert all(torch.equal(found[name], one) for name, one in whole.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
def test_large_tensors_of_every_dtype_come_back_from_several_files(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.arange(3 << 20).reshape(3, -1) % 2
    tensors = {"large": numbers.to(dtype), "turned": numbers.T.to(dtype), "small": torch.ones((), dtype=dtype)}
    write_shards(tensors.items(), tmp_path, lambda: None, shard_bytes=1 << 21)
    assert (tmp_path / INDEX_FILE).is_file()
    found = {name: one for path in tmp_path.glob("*.safetensors") for name, one in load_file(path).items()}
    assert found.keys() == tensors.keys()
    for name, one in tensors.items():
        assert found[name].shape == one.shape and torch.equal(found[name].float(), one.float()), name


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_shards({"large": torch.ones(1 << 20)}.items(), tmp_path, lambda: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
