"""Streamed blocks against resident ones: `python -m bench.memory [--device cuda] [--model smollm2|llama-8b|DIR]`.

One model, held resident (with and without torch's checkpoints) and streamed, in one process, in turn, over the same
batches: seconds of a step (forward, backward, AdamW; LoRA r 16 on all linear layers) at each number of tokens a batch,
and the ratio streamed / resident. Beside it the share of the blocks' bytes that is on the device, what was copied, and
what the process waited for copies. On a GPU also the allocator's peak, and what a resident model cannot do is null.

On a CPU device and host are one memory, so that a copy saves nothing and the ratio is what units and copies cost; 1k
tokens a batch is the default there. On a GPU: 1k, 4k and 16k.

    python -m bench.memory --device cuda --model llama-8b --quantization nf4
    python -m bench.memory --device cuda --model llama-8b --quantization none
    python -m bench.memory --device cuda --model llama-8b --layers 320 --streamed-only     # larger than the card

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.qlora import quiet
from bench.qlora_models import folder_of, vocabulary_of
from bench.report import compare, finish, hardware, show
from core.spec.training import AdamW, LoRA
from core.train.batch import Batch
from core.train.engine import Engine
from core.train.load import load_model
from core.train.memory.image import load_from_disk
from core.train.memory.stream import Streamed, stream_from_files, stream_from_host
from core.train.methods.lora import adapt_lora
from core.train.optim.optimizers import build_optimizer
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import QuantOptions, load_quantized
from core.train.stages.sft import choose_sft_loss

ROW = 512
SHARE = 0.15
"""Of all blocks' bytes, at most so much may be on the device."""


@dataclass
class Contender:
    engine: Engine
    loss: Any
    streamed: Streamed | None

    def step(self, batch: Batch) -> float:
        device = self.engine.device
        _wait(device)
        began = time.perf_counter()
        self.engine.backward(self.engine.forward(batch, self.loss).total / batch.label_tokens)
        self.engine.step()
        _wait(device)
        return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def contender(
    folder: Path, device: torch.device, options: QuantOptions | None, how: str, slots: int, cache: Path
) -> Contender:
    """`how`: resident, checkpointed, host or disk."""
    files: tuple[Any, Any] | None = None
    model: Any
    if how == "disk":
        model, _, *found = load_from_disk(folder, torch.bfloat16, options, cache)
        files = found[0], found[1]
    elif options is None:
        model = load_model(folder, torch.bfloat16)
    else:
        model, _ = load_quantized(folder, torch.bfloat16, options, cache)
    torch.manual_seed(0)
    model = adapt_lora(model, LoRA(r=16, lora_alpha=32.0), autocast=True)
    if options is not None:
        fuse_adapters(model)
    streamed = None
    match how:
        case "host":
            streamed = stream_from_host(model, device, slots=slots)
        case "disk":
            assert files is not None
            streamed = stream_from_files(model, *files, device, slots=slots)
        case _:
            model.to(device)
    if how == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: dict[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(AdamW(learning_rate=1e-4), trained)
    engine = Engine(model, optimizer, lambda step: 1.0, device=device, autocast=torch.bfloat16)
    return Contender(engine, choose_sft_loss(engine)[0], streamed)


def batch_of(tokens: int, vocabulary: int, seed: int) -> Batch:
    rows = max(1, tokens // ROW)
    length = min(tokens, ROW)
    ids = torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids, labels, (length,) * rows, rows * (length - 1))


def peak(device: torch.device, work: Callable[[], object]) -> int | None:
    """Bytes that the allocator had out at once; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return torch.cuda.max_memory_allocated(device)


def measure(args: argparse.Namespace, folder: Path, cache: Path) -> dict[str, Any]:
    device = torch.device(args.device)
    options = None if args.quantization == "none" else QuantOptions(args.quantization)
    ways = [args.stream] if args.streamed_only else [args.stream, "resident", "checkpointed"]
    here: dict[str, Contender | None] = {}
    for how in ways:
        try:
            here[how] = contender(folder, device, options, how, args.slots, cache)
        except torch.OutOfMemoryError:
            here[how] = None
            gc.collect()
            torch.cuda.empty_cache()
    ours = here[args.stream]
    assert ours is not None and ours.streamed is not None
    about = ours.streamed.about()
    share = about["slots"] * about["slot_bytes"] / about["block_bytes"]
    results: dict[str, Any] = {
        "stream": args.stream, "quantization": args.quantization, **about, "resident_block_share": share,
        "resident_block_share_wanted": SHARE, "hardware": _hardware(device), "steps": {},
    }  # fmt: skip
    vocabulary = vocabulary_of(folder)
    for tokens in args.tokens:
        results["steps"][str(tokens)] = at(tokens, here, args, vocabulary)
    ours.streamed.close()
    return results


def at(tokens: int, here: dict[str, Contender | None], args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    device, found, times = torch.device(args.device), dict[str, Any](), dict[str, list[float]]()
    for how, each in here.items():
        if each is None:
            continue
        try:
            warm = batch_of(tokens, vocabulary, 0)
            found[f"peak_bytes_{how}"] = peak(device, lambda each=each, warm=warm: each.step(warm))  # type: ignore[misc]
            times[how] = []
        except torch.OutOfMemoryError:
            each.engine.zero_grad()
            torch.cuda.empty_cache()
    ours = here[args.stream]
    assert ours is not None and ours.streamed is not None
    before = (ours.streamed.counts.bytes, ours.streamed.counts.waited)
    for run in range(args.runs):
        batch = batch_of(tokens, vocabulary, run + 1)
        for how in list(times) if run % 2 == 0 else list(reversed(times)):
            contestant = here[how]
            assert contestant is not None
            times[how].append(contestant.step(batch))
    found["copied_bytes_a_step"] = (ours.streamed.counts.bytes - before[0]) / args.runs
    found["waited_seconds_a_step"] = (ours.streamed.counts.waited - before[1]) / args.runs
    found["seconds"] = sorted(times[args.stream])[args.runs // 2]
    for how in ("resident", "checkpointed"):
        found[f"to_{how}"] = compare(times[args.stream], times[how]) if how in times else None
        if how in times:
            show(f"{tokens} tokens a batch, streamed against {how}", found[f"to_{how}"], "s")
    return found


def _hardware(device: torch.device) -> str:
    return f"{torch.cuda.get_device_name(device)}; {hardware()}" if device.type == "cuda" else hardware()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="smollm2", help="smollm2, llama-1b, llama-8b, mud-puppy, or a folder")
    parser.add_argument("--layers", type=int, help="of a random shape; default: all")
    parser.add_argument("--quantization", default="nf4", choices=["none", "nf4", "int8"])
    parser.add_argument("--stream", default="host", choices=["host", "disk"])
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--tokens", help="a batch, e.g. 1024,4096; default: 1024, on a GPU 1024,4096,16384")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streamed-only", action="store_true", help="for shapes that no card holds")
    args = parser.parse_args()
    tokens = args.tokens or ("1024,4096,16384" if args.device == "cuda" else "1024")
    args.tokens = [int(number) for number in tokens.split(",")]
    quiet()
    folder = folder_of(args.model, args.layers)
    with tempfile.TemporaryDirectory() as cache:
        results = measure(args, folder, Path(cache))
    print(
        f"{results['slots']} of {results['blocks']} blocks on the device: {results['resident_block_share']:.1%} of "
        f"their bytes ({SHARE:.0%} at most is asked for)"
    )
    finish({"memory": results})


if __name__ == "__main__":
    main()
