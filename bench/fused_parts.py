"""What fused parts of a block save on a CPU: `python -m bench.fused_parts [--layers 2] [--runs 7]`.

Blocks of SmolLM2-135M's shape with random weights and LoRA r 16 on all linear layers, bf16 under autocast as in a run;
forward and backward from hidden states, with a copy of the model whose norms, gated activations and (over dense
weights) adapters are those of transformers and PEFT, in turn in one process. Head, loss and optimizer are left out. The
figures are processor seconds; the difference of the adapters' gradients is that of two roundings. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.qlora import Tee, quiet
from bench.report import finish, hardware, in_turn, seconds, show
from core.spec.axes.method import LoRA
from core.train.kernels.fused.modules import fuse_parts
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


def model_of(folder: Path, packed: bool) -> Any:
    """With adapters that do something, as PEFT makes it."""
    model: Any = load_quantized(folder, torch.bfloat16)[0] if packed else load_model(folder, torch.bfloat16)
    torch.manual_seed(1)
    adapted = adapt_lora(model, LoRA(r=16, lora_alpha=32.0), autocast=True)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return adapted.train()


def step(model: Any, hidden: Tensor, grad: Tensor) -> list[Tensor]:
    """Gradients of everything that is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.autocast("cpu", torch.bfloat16):
        states = model.get_base_model().model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    return list(torch.autograd.grad(states, trained, grad))


def timed(model: Any, hidden: Tensor, grad: Tensor) -> Callable[[], float]:
    def measure() -> float:
        began = seconds("cpu")
        step(model, hidden, grad)
        return seconds("cpu") - began

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    quiet()
    report = args.report or ROOT / "bench" / "results" / f"fused-parts-cpu-{datetime.now(UTC).date()}.txt"
    results: dict[str, dict[str, Any]] = {}
    with Tee(report), tempfile.TemporaryDirectory() as folder:
        print(f"python -m bench.fused_parts {' '.join(sys.argv[1:])}".rstrip())
        print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads")
        print(f"load average {os.getloadavg()[0]:.2f} before")
        config = LlamaConfig(vocab_size=256, num_hidden_layers=args.layers, **SHAPE)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        generator = torch.Generator().manual_seed(0)
        hidden, grad = (torch.randn(args.rows, args.tokens, 576, generator=generator).bfloat16() for _ in range(2))
        for packed in (False, True):
            plain = model_of(Path(folder), packed)
            fused = copy.deepcopy(plain)
            parts = fuse_parts(fused, CPU)
            if parts.backend != "native":
                raise SystemExit("there are no C kernels here, so nothing is fused")
            fuse_adapters(fused, dense=True)
            if packed:
                fuse_adapters(plain)
            name = f"{'QLoRA (NF4)' if packed else 'LoRA'}, {args.layers} blocks, {args.rows} × {args.tokens} tokens"
            ours, theirs = step(fused, hidden, grad), step(plain, hidden, grad)
            far = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
            gap = (far / sum(float(b.square().sum()) for b in theirs)) ** 0.5
            found = in_turn(timed(fused, hidden, grad), timed(plain, hidden, grad), args.runs)
            show(name, found, "s")
            print(f"{name}: gradients differ by {gap:.2g} of their norm")
            results[name] = found | {"gradient_gap": gap}
        print(f"load average {os.getloadavg()[0]:.2f} after")
        finish(results)


if __name__ == "__main__":
    main()
