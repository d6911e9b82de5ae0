"""A shape larger than the card: `python -m bench.memory_limit FOLDER …`, one run in a process of its own under a limit.

The limit is a real one: on a CPU the kernel's, on private writable memory (RLIMIT_DATA, setrlimit(2)); on a GPU the
allocator's (torch.cuda.set_per_process_memory_fraction). It leaves room for what is outside of the blocks, what is
trained, and half of the blocks. Prints one JSON object: the losses of its steps, or how it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.memory_contenders import contender
from bench.memory_ids import ids_of
from bench.qlora_models import SHAPES, vocabulary_of
from core.plan.models.headers import read_header
from core.train.failures import is_out_of_memory
from tests.support.status import status_bytes

STEPS, TOKENS, RANK = 2, 64, 4


def three_runs(folder: Path, device: str, cache: Path, share: float = 0.5) -> dict[str, Any]:
    """bfloat16: resident without a limit, then resident and streamed from disk where `share` of the blocks' bytes has
    room. `holds`: the resident run died and the streamed one gave the losses of the free one, to the bit."""
    blocks, rest = _bytes_of(folder)
    limit = rest + int(share * blocks)
    found: dict[str, Any] = {"block_bytes": blocks, "limit_bytes": limit}
    runs = {"resident, no limit": ("resident", 0), "resident": ("resident", limit), "disk": ("disk", limit)}
    for name, (how, most) in runs.items():
        command = [
            sys.executable, "-m", "bench.memory_limit", str(folder), "--how", how, "--device", device,
            "--limit", str(most), "--cache", str(cache),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        died = {"ended": f"exit code {done.returncode}: {done.stderr[-300:]}"}
        found[name] = json.loads(lines[-1]) if done.returncode == 0 else died
    found["holds"] = (
        "ended" in found["resident"]
        and "losses" in found["disk"]
        and found["disk"]["losses"] == found["resident, no limit"].get("losses")
    )
    return found


def _bytes_of(folder: Path) -> tuple[int, int]:
    """(frozen bytes of all blocks, of the rest with what is trained and a tenth of the blocks to compute with)."""
    tensors = {n: t for file in folder.glob("*.safetensors") for n, t in read_header(file, field="model").items()}
    inside = {name: t for name, t in tensors.items() if ".layers." in name}
    blocks = sum(t.numel for t in inside.values()) * 2
    outside = sum(t.numel for name, t in tensors.items() if name not in inside) * 2
    trained = sum(sum(t.shape) for t in inside.values() if len(t.shape) == 2) * RANK * 16
    return blocks, outside + trained + blocks // 10


def _run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    _warm(device)
    if args.limit and device.type == "cuda":
        torch.cuda.empty_cache()
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.limit / whole), device)
    elif args.limit:
        most = status_bytes("VmData") + args.limit
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        each = contender(args.how, args.folder, device, None, args.cache, slots=2, r=RANK)
        vocabulary = vocabulary_of(args.folder)
        losses = [each.step(ids_of(TOKENS, vocabulary, seed))[1] for seed in range(STEPS)]
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"ended": f"{type(error).__name__}: out of memory"}
    return {"losses": losses}


def _warm(device: torch.device) -> None:
    """Whatever is loaded late is loaded before the limit counts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "model")
        shape = SHAPES["llama-10m"] | {"num_hidden_layers": 2}
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
        model.to(torch.bfloat16).save_pretrained(small)
        for how in ("resident", "disk"):
            each = contender(how, small, device, None, Path(folder), slots=2, r=RANK)
            each.step(ids_of(TOKENS, 2048, 0))
            if each.streamed is not None:
                each.streamed.close()


def main() -> None:
    from bench.qlora import quiet

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--how", choices=["resident", "disk"], required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=0, help="bytes; 0: none")
    parser.add_argument("--cache", type=Path, required=True)
    quiet()
    print(json.dumps(_run(parser.parse_args())), flush=True)
    os._exit(0)  # under a limit on memory an interpreter's end may need what it cannot have


if __name__ == "__main__":
    main()
