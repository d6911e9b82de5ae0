"""What llama.cpp's engine makes of a GGUF file, held against transformers: tokens, chat template, special tokens,
logits."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from core.tools import requirements
from core.train.export.formats.subject import SENTENCEPIECE, Subject
from core.train.tools.install import Tools

PROGRAM = Path(__file__).with_name("read_program.py")
CHATS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "What is 12 + 30? Answer in one word."),),
    (("user", "Hello"), ("assistant", "Good day — how can I help?"), ("user", "Tell me a story.\nA short one.")),
    (("system", "You are terse."), ("user", "  Ünïcödé and 你好 "), ("assistant", "Yes.")),
)
"""Chats that both template engines render. A template may refuse some of them, in both engines."""
SHOWN = 60


@dataclass
class Proof:
    """What was found."""

    reader: str
    logits: Tensor
    """[positions, vocabulary] of the rows, float32."""
    about: dict[str, Any]
    """What was compared, for the job's result."""
    faults: list[str] = field(default_factory=list)
    """Where the engine differs, for users."""


def prove(file: Path, whole: Path, subject: Subject, tools: Tools) -> Proof:
    """Read `file` with llama.cpp's engine and compare. `whole`: the folder it was made of. ToolFailed where the engine
    cannot read it."""
    tokenizer = subject.tokenizer
    texts = [tokenizer.decode(row, skip_special_tokens=False) for row in subject.rows]
    ends = _ends(whole, tokenizer)
    chats = _chats(tokenizer)
    questions = {
        "file": str(file),
        "rows": [row.tolist() for row in subject.rows],
        "texts": texts,
        "ends": ends,
        "chats": [chat for chat, _ in chats],
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory(dir=subject.artifacts, prefix=".proof-") as work:
        asked, answered, logits = (Path(work) / name for name in ("asked.json", "answered.json", "logits.npy"))
        asked.write_text(json.dumps(questions), encoding="utf-8")
        tools.run(PROGRAM, str(asked), str(answered), str(logits), between=subject.between)
        answers = json.loads(answered.read_text(encoding="utf-8"))
        found = torch.from_numpy(np.load(logits))
    faults = [
        *_of_tokens(tokenizer, texts, answers),
        *_of_chats(tokenizer, chats, answers["chats"]),
        *_of_special(tokenizer, ends, answers),
    ]
    rendered = sum("text" in answer for answer in answers["chats"])
    about = {"texts": len(texts), "chats": rendered, "ends": ends}
    return Proof(_reader(), found, about, faults)


@contextmanager
def saved_for_converter(tokenizer: Any, whole: Path) -> Iterator[None]:
    """Let tokenizer_config.json in `whole` say what the converter reads there: whether BOS comes before a text, and, of
    a Phi, that its tokenizer is not SentencePiece's, which transformers forgets when it saves one. A chat template that
    writes no BOS decides, since llama.cpp puts BOS before chats as well."""
    path = whole / "tokenizer_config.json"
    before = path.read_bytes()
    about = json.loads(before)
    begins = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None
    rendered = [text for _, text in _chats(tokenizer) if text is not None]
    if begins and rendered:
        begins = all(text.startswith(tokenizer.bos_token) for text in rendered)
    told: dict[str, Any] = {"add_bos_token": begins}
    classes = json.loads((whole / "config.json").read_bytes()).get("architectures") or []
    if "Phi3ForCausalLM" in classes and not (whole / SENTENCEPIECE).exists():
        told["tokenizer_class"] = "GPT2Tokenizer"
    path.write_text(json.dumps(about | told), encoding="utf-8")
    try:
        yield
    finally:
        path.write_bytes(before)


def _reader() -> str:
    pins = [line.split()[0] for line in requirements("gguf").read_text().splitlines() if "==" in line]
    name, _, version = next(pin for pin in pins if pin.startswith("xllamacpp")).partition("==")
    return f"llama.cpp ({name} {version})"


def _ends(whole: Path, tokenizer: Any) -> list[int]:
    """Tokens with which an answer ends: the tokenizer's EOS, and those of the generation config."""
    ends = [tokenizer.eos_token_id]
    if (whole / "generation_config.json").is_file():
        told = GenerationConfig.from_pretrained(whole, local_files_only=True).eos_token_id
        ends += told if isinstance(told, list) else [told]
    return sorted({end for end in ends if end is not None})


def _chats(tokenizer: Any) -> list[tuple[dict[str, Any], str | None]]:
    """Chats as the engine takes them, each with the text that transformers renders; None where the template refuses.
    None at all without a template, or with one that writes today's date, which each engine takes from its own clock."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or "strftime_now" in template:
        return []
    special = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    found: list[tuple[dict[str, Any], str | None]] = []
    for turns in CHATS:
        messages = [{"role": role, "content": content} for role, content in turns]
        prompt = turns[-1][0] == "user"
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception:  # a template is somebody else's program: whatever it raises is its refusal
            text = None
        found.append((special | {"messages": messages, "add_generation_prompt": prompt}, text))
    return found


def _of_tokens(tokenizer: Any, texts: list[str], answers: dict[str, Any]) -> list[str]:
    if answers["tokens"] < len(tokenizer):
        return [f"it has {answers['tokens']} tokens, and the tokenizer has {len(tokenizer)}"]
    for text, found in zip(texts, answers["texts"], strict=True):
        wanted = tokenizer(text, add_special_tokens=False).input_ids
        if found != wanted:
            return [f"llama.cpp reads {_first_difference(text, wanted, found)}"]
    return []


def _first_difference(text: str, wanted: list[int], found: list[int]) -> str:
    pairs = zip(wanted, found, strict=False)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(found)))
    return f"the text {text[:SHOWN]!r} as other tokens than transformers, from token {place} on"


def _of_chats(
    tokenizer: Any, chats: list[tuple[dict[str, Any], str | None]], answers: list[dict[str, Any]]
) -> list[str]:
    for (chat, text), answer in zip(chats, answers, strict=True):
        first = ", ".join(message["role"] for message in chat["messages"])
        if text is None and "text" in answer:
            return [f"llama.cpp renders a chat that the template refuses in transformers ({first})"]
        if text is not None and "text" not in answer:
            return [f"llama.cpp's template engine refuses a chat ({first}): {answer['refused']}"]
        if text is not None and answer["text"] != text:
            return [f"llama.cpp's template engine renders a chat differently ({first})"]
        if text is not None and answer["tokens"] != tokenizer(text, add_special_tokens=False).input_ids:
            return [f"llama.cpp reads a rendered chat as other tokens than transformers ({first})"]
    return []


def _of_special(tokenizer: Any, ends: list[int], answers: dict[str, Any]) -> list[str]:
    faults = []
    if missing := sorted(set(ends) - set(answers["ends"])):
        names = ", ".join(tokenizer.convert_ids_to_tokens(missing))
        faults.append(f"llama.cpp does not end an answer at {names}, which the model's generation config does")
    for name in ("bos", "eos", "pad"):
        wanted, found = getattr(tokenizer, f"{name}_token_id"), answers["special"][name]
        if wanted is not None and found != wanted:
            faults.append(f"its {name.upper()} token is {found}, and the tokenizer's is {wanted}")
    return faults
