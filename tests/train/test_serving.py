"""The serving child: PEFT's greedy answers token for token, adapters in one batch, stop texts, seeds, and its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.spec.run.exit_codes import EXIT_CHECKPOINTED
from core.spec.run.frames import receive
from core.train.serving.answer import TextStream
from tests.support.serving import ServingChild, tokens

MESSAGES = [[{"role": "user", "content": text}] for text in ("switch on the light", "how are you?", "a")]


def make_adapter(tiny_dir: Path, folder: Path, seed: int, **config: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    wanted = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=64,
        init_lora_weights=False,
        target_modules=["q_proj", "v_proj"],
        **config,
    )
    get_peft_model(base, wanted).save_pretrained(folder)
    return {"folder": str(folder)}


@pytest.fixture(scope="module")
def adapters(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any] | None]:
    """Two that can share a pass, one that cannot, a checkpoint of the first, and none."""
    folder = tmp_path_factory.mktemp("adapters")
    a = make_adapter(tiny_dir, folder / "a", 1)
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, a["folder"])
    (folder / "checkpoint").mkdir()
    trained = {name: p.detach().contiguous() for name, p in model.named_parameters() if "lora_" in name}
    save_file(trained, folder / "checkpoint" / "weights.safetensors")
    method = {"type": "lora", "r": 4, "lora_alpha": 64.0, "target_modules": ["q_proj", "v_proj"]}
    return {
        "base": None,
        "a": a,
        "b": make_adapter(tiny_dir, folder / "b", 2),
        "dora": make_adapter(tiny_dir, folder / "dora", 3, use_dora=True),
        "checkpoint": {"folder": str(folder / "checkpoint"), "checkpoint": True, "method": method},
    }


@pytest.fixture(scope="module")
def child(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingChild]:
    made = ServingChild(tmp_path_factory.mktemp("serving") / "run", tiny_dir, slots=6, adapters=3)
    yield made
    assert made.end() == EXIT_CHECKPOINTED


def peft_answers(tiny_dir: Path, adapter: dict[str, Any] | None, max_tokens: int) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter["folder"]).eval()
    found = []
    for messages in MESSAGES:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        found.append(output[0, ids.shape[1] :].tolist())
    return found


def test_greedy_answers_are_those_of_peft_token_for_token(
    child: ServingChild, tiny_dir: Path, adapters: dict[str, dict[str, Any] | None]
) -> None:
    """All models at once: more answers than slots, and more adapters than are kept."""
    asked = [
        {"adapter": adapters[name], "messages": messages, "max_tokens": 24, "logprobs": 0}
        for name in ("base", "a", "b", "dora")
        for messages in MESSAGES
    ]
    found = child.ask(*asked)
    expected = [one for name in ("base", "a", "b", "dora") for one in peft_answers(tiny_dir, adapters[name], 24)]
    assert [list(tokens(one)) for one in found] == expected
    assert len({str(answers) for answers in expected}) > 3, "the adapters change what is answered"
    assert all(one["done"]["completion_tokens"] == len(mine) for one, mine in zip(found, expected, strict=True))
    assert found[0]["frames"] > 5, "an answer comes in pieces"
    (again,) = child.ask({"adapter": adapters["checkpoint"], "messages": MESSAGES[0], "max_tokens": 24, "logprobs": 0})
    assert tokens(again) == tokens(found[3]), "a checkpoint of the adapter answers as the adapter does"


def test_draws_follow_the_seed_alone_and_stop_texts_are_left_out(
    child: ServingChild, adapters: dict[str, dict[str, Any] | None]
) -> None:
    drawn = {"adapter": adapters["a"], "messages": MESSAGES[0], "max_tokens": 12, "temperature": 1.0, "seed": 7, "n": 3}
    (alone,) = child.ask(drawn)
    among, other, greedy = child.ask(drawn, drawn | {"seed": 8, "n": 1}, drawn | {"temperature": 0.0, "n": 1})
    assert among["texts"] == alone["texts"] and len(set(alone["texts"].values())) == 3
    assert other["texts"][0] != alone["texts"][0]
    whole = greedy["texts"][0]
    stop = whole[4:7]
    cut, both = child.ask(
        drawn | {"temperature": 0.0, "n": 1, "stop": [stop, "never said"]},
        {"prompt": "ab", "max_tokens": 2, "echo": True, "logprobs": 3},
    )
    assert cut["texts"][0] == whole[: whole.find(stop)] and cut["reasons"] == {0: "stop"}
    first, second, *drawn_ones = both["logprobs"][0]
    assert both["texts"][0].startswith("ab") and len(drawn_ones) == 2
    best = drawn_ones[0]["top"]
    assert len(best) == 3 and best[0]["logprob"] == drawn_ones[0]["logprob"], "greedy takes the likeliest"
    assert (first["token"], first["logprob"], first["top"]) == ("a", None, None), "before it there is nothing"
    assert second["token"] == "b" and second["logprob"] <= second["top"][0]["logprob"] and len(second["top"]) == 3


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"prompt": "a", "max_tokens": 500}, "context_length_exceeded"),
        ({"prompt": "a" * 900}, "context_length_exceeded"),
        ({"prompt": [10**6]}, "invalid_operation"),
        ({"prompt": "a", "adapter": {"folder": "/nonexistent"}}, "checkpoint_not_found"),
    ],
)
def test_a_bad_request_is_told_and_disturbs_no_other(child: ServingChild, request_: dict[str, Any], code: str) -> None:
    bad, good = child.ask(request_, {"prompt": "a", "max_tokens": 3})
    assert bad["error"]["code"] == code, bad
    assert good["done"]["completion_tokens"] <= 3 and good["error"] is None


def test_a_cancelled_answer_ends_and_the_child_leaves_at_once(tiny_dir: Path, tmp_path: Path) -> None:
    child = ServingChild(tmp_path / "run", tiny_dir)
    for number in ("long", "other"):
        child.send(
            {"id": number, "request": {"prompt": "a", "max_tokens": 100, "most_tokens": 128, "temperature": 0.0}}
        )
    assert child.next()["id"] in ("long", "other")
    child.send({"cancel": "long"})
    seen = []
    while "done" not in (header := child.next()):
        seen.append(header["id"])
    assert header["id"] == "other" and header["done"]["completion_tokens"] == 100
    child.send({"id": "last", "request": {"prompt": "a", "max_tokens": 100, "most_tokens": 128, "temperature": 0.0}})
    child.next()
    child.stop.requested = True
    while (frame := receive(child.stream)) is not None:
        assert "done" not in frame.header, "it leaves in the middle of the answer"
    assert child.end() == EXIT_CHECKPOINTED


class Letters:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("stops", [[], ["never"], ["🦜"], ["é🦜", "x"], ["llo é"]])
def test_text_of_pieces_is_the_text_of_the_whole_up_to_its_stop(stops: list[str]) -> None:
    whole = "hello é🦜 tail neve"
    stream = TextStream(Letters(), stops)
    text = ""
    for token in whole.encode():
        text += stream.add(token)
        if stream.stopped:
            break
    text += stream.end()
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert text == whole[: min(ends, default=len(whole))]
    assert stream.stopped is bool(ends)
