"""Host memory while a model is packed, by what the kernel counts for a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20

CHILD = """
import json, sys, torch
from pathlib import Path
from core.train.quant.model import load_quantized
torch.set_num_threads(1)
small, folder, cache = sys.argv[1:]
load_quantized(Path(small), torch.bfloat16)  # imports, tables, compiled kernels
def status(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is in use
before = status("VmRSS")
model, report = load_quantized(Path(folder), torch.bfloat16, None, Path(cache))
dense = sum(p.nbytes for p in model.parameters())
print(json.dumps({"peak": status("VmHWM") - before, "packed": report.packed_bytes, "kept": dense,
                  "dense": report.dense_bytes, "source": report.source}))
"""


def _load(small: Path, folder: Path, cache: Path) -> dict[str, int]:
    command = [sys.executable, "-c", CHILD, str(small), str(folder), str(cache)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts it")
def test_packing_peaks_near_the_packed_size_and_one_shard(tmp_path: Path) -> None:
    """With the cache's entry written. Stated tolerance: packed weights + what stays dense + one shard (its file is
    mapped) + 48 MiB for one tensor on its way (a piece of a million elements in float32, a few times) and the
    allocator. The dense model would take nearly four times the packed one."""
    shard = 16 * MIB
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "large", max_shard_size=shard)
    small = LlamaConfig(**{**config.to_dict(), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1})
    LlamaForCausalLM(small).to(torch.bfloat16).save_pretrained(tmp_path / "small")

    packing = _load(tmp_path / "small", tmp_path / "large", tmp_path / "cache")
    allowed = packing["packed"] + packing["kept"] + shard + 48 * MIB
    assert allowed < 0.7 * packing["dense"]  # else this could not fail
    assert packing["source"] == "quantised" and packing["peak"] < allowed
    hit = _load(tmp_path / "small", tmp_path / "large", tmp_path / "cache")  # one file, mapped as a whole
    assert hit["source"] == "cache" and hit["peak"] < 2 * hit["packed"] + hit["kept"] + 48 * MIB
