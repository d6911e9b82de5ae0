"""QLoRA's step against bitsandbytes + PEFT: `python -m bench.qlora --model DIR [--runs N]`.

All of them in one process, in turn, on the same batches: rows × tokens random ids with every token labelled, rank 16
on all linear layers, activation checkpointing (non-reentrant), fused AdamW, compute in bfloat16. The memory of each
is measured in a process of its own: the peak of three steps over what the loaded model takes.

    ours         NF4 (double quantisation), base and adapter in one operator, chunked loss, float32 adapters, autocast
    bnb          bitsandbytes + PEFT as users run it: prepare_model_for_kbit_training, float32 adapters, autocast, the
                 model's own loss
    bnb-tuned    the same well set: nothing cast to float32, bfloat16 adapters, the model's own loss (on a CPU faster
                 than TRL's chunked one)
    lora         plain LoRA over a bfloat16 base, bfloat16 adapters

The machine's load is told beside the figures, and each ratio is given in wall time and in CPU time: other programs
disturb the second less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from bench.report import compare, finish, show
from core.train.loss.head import Head, head_of, hidden_states
from core.train.loss.linear_cross_entropy import linear_cross_entropy
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized

NAMES = ("ours", "bnb", "bnb-tuned", "lora")
CHECKPOINTING = {"use_reentrant": False}


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    tokens: int
    r: int
    device: torch.device


def build(name: str, folder: Path, shape: Shape) -> Callable[[Tensor], Tensor]:
    """One optimizer step on a batch of ids [rows, tokens]; answers the loss."""
    torch.manual_seed(0)
    match name:
        case "ours":
            base: Any = load_quantized(folder, torch.bfloat16)[0]
            base.to(shape.device)
            base.enable_input_require_grads()
            model = _adapt(base, shape, full=True)
            fuse_adapters(model)
            head = head_of(model)
            assert isinstance(head, Head), head
            return _step(model, lambda ids: _chunked(head, ids), autocast=True, shape=shape)
        case "bnb" | "bnb-tuned":
            ask = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            base = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16, quantization_config=ask, device_map={"": shape.device}
            )
            if name == "bnb":
                base = prepare_model_for_kbit_training(base, True, CHECKPOINTING)
            else:
                base.enable_input_require_grads()
            model = _adapt(base, shape, full=name == "bnb")
            return _step(model, lambda ids: _own(model, ids), autocast=name == "bnb", shape=shape)
        case "lora":
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(shape.device)
            base.enable_input_require_grads()
            model = _adapt(base, shape, full=False)
            return _step(model, lambda ids: _own(model, ids), autocast=False, shape=shape)
        case _:
            raise ValueError(name)


def _adapt(base: Any, shape: Shape, *, full: bool) -> Any:
    config = LoraConfig(task_type="CAUSAL_LM", r=shape.r, lora_alpha=2 * shape.r, target_modules="all-linear")
    torch.manual_seed(1)
    model = get_peft_model(base, config, autocast_adapter_dtype=full)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
    return model.train()


def _own(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _chunked(head: Head, ids: Tensor) -> Tensor:
    hidden = hidden_states(head, ids)[:, :-1].flatten(0, 1)
    labels = ids[:, 1:].flatten()
    return linear_cross_entropy(hidden, head.weight, labels, bias=head.bias, options=head.options, count=labels.numel())


def _step(
    model: Any, loss_of: Callable[[Tensor], Tensor], *, autocast: bool, shape: Shape
) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(shape.device.type, dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def batches(shape: Shape, count: int, vocabulary: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(100, vocabulary, (shape.rows, shape.tokens), generator=generator).to(shape.device)
        for _ in range(count)
    ]


# --- memory, in a process of its own ---------------------------------------------------------------


def memory_of(name: str, folder: Path, shape: Shape, vocabulary: int) -> dict[str, float]:
    """MiB: the loaded model with adapters and optimizer, and the peak of three steps over it."""
    step = build(name, folder, shape)
    ids = batches(shape, 3, vocabulary)
    gc.collect()
    on_gpu = shape.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is in use
    loaded = torch.cuda.memory_allocated() if on_gpu else _status("VmRSS")
    for batch in ids:
        step(batch)
    peak = torch.cuda.max_memory_allocated() if on_gpu else _status("VmHWM")
    return {"loaded": loaded / 2**20, "over_load": (peak - loaded) / 2**20}


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def _memory_in_child(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.qlora", "--model", str(arguments.model), "--memory-of", name,
               "--rows", str(arguments.rows), "--tokens", str(arguments.tokens), "--r", str(arguments.r),
               "--device", arguments.device, "--threads", str(arguments.threads)]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


# --- time ------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face format")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that others use")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--memory-of", choices=NAMES)
    parser.add_argument("--no-memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shape = Shape(arguments.rows, arguments.tokens, arguments.r, torch.device(arguments.device))
    vocabulary = int(json.loads((arguments.model / "config.json").read_text())["vocab_size"])
    if arguments.memory_of:
        print(json.dumps(memory_of(arguments.memory_of, arguments.model, shape, vocabulary)))
        return

    names = [name for name in NAMES if name in arguments.only]
    memory = {} if arguments.no_memory else {name: _memory_in_child(name, arguments) for name in names}
    load_before = os.getloadavg()[0]
    steps = {name: build(name, arguments.model, shape) for name in names}
    first, *rest = batches(shape, arguments.runs + 1, vocabulary)
    losses = {name: float(step(first)) for name, step in steps.items()}  # also the warm-up
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for run, ids in enumerate(rest):
        order = names if run % 2 == 0 else names[::-1]
        for name in order:
            seconds, processor = _timed(steps[name], ids, shape.device)
            wall[name].append(seconds)
            cpu[name].append(processor)

    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"{shape.rows} × {shape.tokens} tokens, r {shape.r}"
    )
    print(f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after")
    tokens = shape.rows * shape.tokens
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        print(
            f"{name:<10} {tokens / sorted(wall[name])[len(rest) // 2]:8.1f} tokens/s, first loss {losses[name]:.5f}",
            end="",
        )
        print(f", memory {memory[name]['over_load']:.0f} MiB over {memory[name]['loaded']:.0f}" if memory else "")
        if name == "ours" or "ours" not in names:
            continue
        for kind, series in (("step", wall), ("step, CPU time", cpu)):
            figures = compare(series["ours"], series[name])
            results[f"{kind}, against {name}"] = figures
            show(f"{kind}, against {name}", figures, "s")
        if memory:
            ours, peer = memory["ours"]["over_load"], memory[name]["over_load"]
            figures = {**figures, "ours": ours, "peer": peer, "runs": 1}
            figures |= dict.fromkeys(("ratio", "ratio_min", "ratio_max"), ours / peer)
            results[f"peak over load, against {name}"] = figures
            show(f"peak over load, against {name}", figures, "MiB")
        results[f"step, against {name}"]["first_loss_difference"] = abs(losses["ours"] - losses[name])
    finish(results)


def _timed(step: Callable[[Tensor], Tensor], ids: Tensor, device: torch.device) -> tuple[float, float]:
    started, processor = time.perf_counter(), time.process_time()
    step(ids)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - processor


if __name__ == "__main__":
    main()
