"""That streaming lowers the peak: by a limit of the kernel's, and by an account of every byte."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from core.train.kernels.scratch import clear_scratch
from core.train.memory.streaming.blocks import StreamedBlock, lay_out
from core.train.quant.linear import QuantLinear
from core.train.quant.targets import QuantOptions
from tests.support.blocks import IDS, from_disk, resident
from tests.support.limited import limited_runs
from tests.support.live_bytes import LiveBytes
from tests.support.small_llama import save
from tests.support.trainer import Forked, events, log, pairs, weights, write_rows, write_run

MIB = 2**20


def test_under_a_limit_the_resident_run_dies_and_the_streamed_one_trains_the_same_weights(
    tmp_path: Path, tiny_dir: Path
) -> None:
    """12 blocks of 14 MB in float32, and room for half of them."""
    shutil.copytree(tiny_dir, tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
             "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
    config.update(sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    (tmp_path / "model" / "model.safetensors").unlink()  # of the small one
    model.save_pretrained(tmp_path / "model", max_shard_size="40MB")
    blocks = sum(p.numel() for p in model.model.layers.parameters()) * 4
    del model
    rows = write_rows(tmp_path / "rows.jsonl", pairs(8))
    disk = {"type": "disk", "slots": 1}
    for name, stream in (("warm", disk), ("free", "none"), ("tight", "none"), ("disk", disk)):
        write_run(
            tmp_path / name,
            tiny_dir if name == "warm" else tmp_path / "model",
            rows,
            cache_dir=tmp_path / "cache",
            method={"type": "lora", "r": 2, "lora_dropout": 0.1},
            optimizer={"learning_rate": 1e-2},
            training={"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 32, "precision": "fp32"},
            memory={"stream": stream, "gradient_checkpointing": True},
        )
    codes = tmp_path / "codes.json"

    def work() -> int:
        codes.write_text(json.dumps(limited_runs(tmp_path, blocks // 2)))
        return 0

    assert Forked(tmp_path / "warm", program=work).wait() == 0, log(tmp_path / "warm")
    ended = json.loads(codes.read_text())
    assert ended["free"] == 0, events(tmp_path / "free")[-1]
    assert ended["tight"] != 0
    death = events(tmp_path / "tight")[-1]
    assert (death["type"], death["failure"]) == ("error", "memory"), death
    assert ended["disk"] == 0, f"{events(tmp_path / 'disk')[-1]}\n{log(tmp_path / 'warm')}"
    assert weights(tmp_path / "disk") == weights(tmp_path / "free")


@pytest.mark.parametrize("options", [None, QuantOptions("nf4")], ids=["bf16", "nf4"])
def test_every_byte_is_within_embeddings_head_slots_and_activations(tmp_path: Path, options: Any) -> None:
    """The most that is there at once in a training step: what stays on the device, K blocks, and what a resident run
    with checkpointed blocks makes beside its weights."""
    folder = save(
        tmp_path / "model", torch.bfloat16, hidden_size=256, intermediate_size=512, num_hidden_layers=8,
        num_key_value_heads=4,
    )  # fmt: skip
    plain = resident(folder, options)
    plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    blocks = lay_out(plain)
    all_blocks, largest = sum(block.nbytes for block in blocks), max(block.nbytes for block in blocks)
    there, peak = _step(plain, [])
    made = peak - there
    stays = there - sum(part.nbytes for block in blocks for part in block.parts)
    peaks = []
    for slots in (1, 2, 3):
        model, stream = from_disk(folder, tmp_path / "cache", options, slots)
        files = [stream.source.rest(number) for number in range(len(stream.blocks))]
        start, peak = _step(model, [slot.buffer for slot in stream.cache.slots], but=files)
        assert start == stays + slots * largest
        bound = stays + slots * largest + made
        # A few numbers more than torch's checkpoints keep: the random state (5 KiB) and the mask of each block.
        assert peak <= bound + len(blocks) * 8192
        assert peak < 0.75 * (stays + all_blocks + made), "a bound that the resident run would keep proves nothing"
        peaks.append(peak)
        stream.close()
    # One block more, and what the scratch keeps dequantised of what was in that slot.
    dense = 0 if options is None else sum(_dense_bytes(block) for block in blocks) // len(blocks)
    assert all(largest <= more - less <= largest + dense for less, more in pairwise(peaks))


def _dense_bytes(block: StreamedBlock) -> int:
    """Of its packed weights, in bfloat16."""
    return sum(m.in_features * m.out_features * 2 for m in block.module.modules() if isinstance(m, QuantLinear))


def _step(model: Any, slots: list[torch.Tensor], but: list[torch.Tensor] | None = None) -> tuple[int, int]:
    """(bytes at the start, most at once) of a step of AdamW; the state of the optimizer is made in it."""
    clear_scratch()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=False)
    with LiveBytes([*model.parameters(), *model.buffers(), *slots], but or []) as live:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.start, live.peak
