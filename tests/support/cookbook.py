"""Where the recipes of Tinker's cookbook run as they are: its environment, and folders in the place of hubs.

transformers and datasets look for a folder of a repository's name before they ask a hub, so that a recipe finds model
and data below the folder in which it runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core import HOME as ROOT
from tests.support.environments import python_of
from tests.support.service import Service
from tests.support.tiny_model import byte_tokenizer

LOCK = ROOT / "locks" / "cookbook.txt"
RECIPES = "tinker_cookbook.recipes"
FORKS = Path(__file__).with_name("recipe_forks.py")
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""The name by which recipes know the renderer; the folder has a small model."""
ASKING = ("math_rl.train", "preference.", "multiplayer_rl", "distillation.", "prompt_d", "chat_sl")
"""Modules that ask what to do with a folder that is there."""
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")
WORDS = ("red", "blue", "green", "small", "large", "cat", "dog", "bird", "runs", "sleeps", "sings", "today", "often")
ROWS = 96
SECONDS = 400
"""A recipe may take, unless its caller says more."""


def python() -> Path:
    """The interpreter that has cookbook and SDK, over the libraries of the application."""
    return python_of("cookbook", LOCK.read_text(), LOCK.read_text(), Path(sysconfig.get_path("purelib")))


def environment(service: Service) -> dict[str, str]:
    """Environment of a recipe."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(service.folder),
        "HF_HOME": str(service.folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TINKER_TELEMETRY": "0",
        "TINKER_BASE_URL": str(service.note()["url"]),
        "TINKER_API_KEY": f"tml-{service.key}",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def started(
    folder: Path, *, model: Path | None = None, taught: tuple[int, int] = (0, 0), exact: bool = True
) -> tuple[Service, Path]:
    """A service whose models are those of an overlay, and the overlay: a folder to run recipes in. `model`: a folder
    with the model that recipes get; None: a tiny one, which is taught the sums of so many steps and groups."""
    overlay = folder / "overlay"
    make(overlay, model, taught)
    settings = {"EFT_MODEL_ROOTS": str(overlay), "EFT_MAX_SESSIONS": "0", "EFT_RATE_PER_MINUTE": "0"}
    settings |= {"EFT_TINKER_PRECISION": "fp32", "EFT_TINKER_EXACT": str(exact).lower()}
    service = Service(folder / "service", settings)
    service.start()
    return service, overlay


def run(service: Service, overlay: Path, row: str, log: Path, seconds: float = SECONDS) -> tuple[int, str]:
    """Exit status and output of a recipe: its module and arguments, of which the last one for a field holds. `log`:
    where it writes its metrics."""
    module, arguments = command(row, log)
    out = service.folder / "recipe.log"
    with out.open("w") as file:
        try:
            code = subprocess.run(
                [str(python()), "-m", module, *arguments],
                cwd=overlay,
                env=environment(service),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    return code, out.read_text()


def command(row: str, log: Path) -> tuple[str, list[str]]:
    """Module and arguments."""
    module, *more = row.split()
    last = {one.partition("=")[0]: one for one in [f"model_name={MODEL}", f"log_path={log}", *more]}
    if module.startswith(ASKING):
        last.setdefault("behavior_if_log_dir_exists", "behavior_if_log_dir_exists=delete")
    return f"{RECIPES}.{module}", list(last.values())


@contextmanager
def forking(service: Service, overlay: Path, *modules: str) -> Iterator[Callable[[str, Path], tuple[int, str]]]:
    """`run` for tests, of these modules: the imports of a recipe take longer than a small one runs, so that each is a
    fork of one process that has them (recipe_forks.py)."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as answers:
        process = subprocess.Popen(
            [str(python()), "-P", str(FORKS), str(writer), *(f"{RECIPES}.{name}" for name in modules)],
            cwd=overlay,
            env=environment(service),
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            text=True,
        )
        os.close(writer)
        assert process.stdin is not None

        def run_fork(row: str, log: Path) -> tuple[int, str]:
            out = service.folder / "recipe.log"
            print(json.dumps([*command(row, log), str(out), SECONDS]), file=process.stdin, flush=True)
            code = answers.readline()
            assert code, "the process that forks recipes has ended"
            return int(code), out.read_text()

        try:
            yield run_fork
        finally:
            process.stdin.close()
            process.wait()


def metrics(log: Path) -> list[dict[str, Any]]:
    """What a recipe has logged, a line a step."""
    found = log / "metrics.jsonl"
    return [json.loads(line) for line in found.read_text().splitlines()] if found.is_file() else []


def make(folder: Path, model: Path | None = None, taught: tuple[int, int] = (0, 0)) -> None:
    """Write model and data into an empty folder."""
    if model is None:
        make_model(folder / MODEL, sums(*taught))
    else:
        shutil.copytree(model, folder / MODEL)
    numbers = range(ROWS)
    chats = [{"messages": chat(n), "prompt": sentence(n), "category": "Open QA"} for n in numbers]
    asked = [{"question": f"What is {n % 7} + {n % 5}?", "answer": f"Easy.\n#### {n % 7 + n % 5}"} for n in numbers]
    pairs = [{name: talk(n, text) for name, text in (("chosen", "yes"), ("rejected", "no"))} for n in numbers]
    for name, rows in {
        "HuggingFaceH4/no_robots/data": chats,
        "openai/gsm8k/main": asked,
        "Anthropic/hh-rlhf/data": pairs,
        "zwhe99/DeepMath-103K/data": [{"question": one["question"], "final_answer": "1"} for one in asked],
        "allenai/tulu-3-sft-mixture/data": chats,
    }.items():
        for split in ("train", "test"):
            write(folder / name / f"{split}.jsonl", rows)
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    about = {"configs": [{"config_name": "main", "data_files": files}]}
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{json.dumps(about)}\n---\n")
    write(folder / "distillation.jsonl", [{"messages": one["messages"]} for one in chats])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 5, 7))


def talk(number: int, answer: str) -> str:
    return f"\n\nHuman: {sentence(number)}?\n\nAssistant: {answer}"


def chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": sentence(number)},
        {"role": "assistant", "content": sentence(number).upper()},
    ]


def sums(steps: int, groups: int) -> list[tuple[int, int]]:
    """The sums that the first steps of `math_rl` ask, so many of each: the recipe draws them by the number of the
    step."""
    import numpy as np

    draws = [np.random.RandomState(step) for step in range(steps)]
    return [(int(draw.randint(0, 101)), int(draw.randint(0, 101))) for draw in draws for _ in range(groups)]


def teach(model: Any, tokenizer: Any, pairs: list[tuple[int, int]], steps: int = 110, rate: float = 0.01) -> None:
    """Let a model learn by heart what `math_rl` asks: half of its answers end behind the sum, half go on and are wrong.
    What is left to learn from rewards is the same for all sums."""
    import torch

    question = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"
    before = question.format(4, 5) + "9<|im_end|>\n"
    rows = []
    for x, y in pairs:
        asked = tokenizer(before + question.format(x, y))["input_ids"]
        rows += [(asked, tokenizer(f"{answer}<|im_end|>")["input_ids"]) for answer in (f"{x + y}", f"{x + y}-1")]
    longest = max(len(asked) + len(answer) for asked, answer in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for at, (asked, answer) in enumerate(rows):
        ids[at, : len(asked) + len(answer)] = torch.tensor(asked + answer)
        labels[at, len(asked) : len(asked) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make_model(folder: Path, pairs: list[tuple[int, int]]) -> None:
    """A small Qwen3 whose tokenizer has a token for each of Qwen's words of control: of random weights, but for what it
    is taught of sums."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    wrapped = byte_tokenizer(SPECIAL, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096)
    config = Qwen3Config(
        vocab_size=len(wrapped),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    if pairs:
        teach(model, wrapped, pairs)
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
