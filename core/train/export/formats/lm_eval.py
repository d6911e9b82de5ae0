"""`export: lm_eval`: a task of EleutherAI's lm-evaluation-harness, scored by the harness over what was trained."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from core.spec.axes.export import LMEval
from core.spec.axes.method import Full
from core.tools import pinned
from core.train.export.formats.subject import Subject, Withheld
from core.train.model.load import count_parameters, saved_dtype
from core.train.tools.install import ToolFailed, find

PROGRAM = Path(__file__).with_name("lm_eval_program.py")
RESULTS, SAMPLES = "results.json", "samples.jsonl"
BATCH_SIZE = 8
ROOM = 1.5
"""Bytes of GPU memory that are wanted for each byte of weights: what a batch computes lies there too."""


def write_lm_eval(item: LMEval, subject: Subject, folder: Path) -> dict[str, Any]:
    """Write the scores and what each row was answered into `folder`; the scores. Withheld where the harness fails."""
    tools = find("lm_eval", subject.cache_dir)
    if tools is None:
        raise Withheld("lm-eval is not on this machine, although the model was prepared; submit the job again")
    whole = isinstance(subject.method, Full)
    device, dtype = place_of_score(subject)
    order = {
        "task": item.task,
        "num_fewshot": item.num_fewshot,
        "limit": item.limit,
        "apply_chat_template": item.apply_chat_template,
        "folder": None if subject.task_folder is None else str(subject.task_folder),
        "model": str(subject.trained_dir if whole else subject.model_dir),
        "adapter": None if whole else str(subject.trained_dir),
        "tokenizer": str(subject.trained_dir),
        "device": device,
        "dtype": dtype,
        "batch_size": BATCH_SIZE,
    }
    with tempfile.TemporaryDirectory(dir=subject.artifacts, prefix=".lm-eval-") as work:
        asked, answered = Path(work) / "order.json", Path(work) / RESULTS
        asked.write_text(json.dumps(order), encoding="utf-8")
        try:
            tools.run(PROGRAM, "score", str(asked), str(answered), between=subject.between)
        except ToolFailed as error:
            raise Withheld(f"lm-eval could not score it: {error}") from error
        found: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    samples = found.pop("samples")
    found |= {"dtype": dtype, "scored_by": f"lm-eval {pinned('lm_eval', 'lm-eval')}"}
    folder.mkdir(parents=True)
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in samples)
    (folder / SAMPLES).write_text(text, encoding="utf-8")
    told = item.model_dump() | found
    (folder / RESULTS).write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return found


def place_of_score(subject: Subject) -> tuple[str, str]:
    """The device and dtype that the harness computes in: those of the model's files on a GPU with room beside the
    trained model, float32 on a CPU."""
    saved = saved_dtype(subject.model_dir)
    if subject.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(subject.device)
        if free > ROOM * count_parameters(subject.model) * saved.itemsize:
            return str(subject.device), str(saved).removeprefix("torch.")
        print("notice: no room beside the trained model on its GPU; lm-eval runs on the CPU", flush=True)
    return "cpu", "float32"
