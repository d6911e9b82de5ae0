"""The child of a session: its verbs against torch, adapters apart, and the same bits after a kill."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from core.spec.run.exit_codes import EXIT_CHECKPOINTED
from core.spec.run.folder import ORDER_FILE
from core.train.base.stop import Stop
from core.train.generation.generator import SlotGenerator
from core.train.session.serve import serve
from tests.support import session
from tests.support.session import SessionClient, SessionRanks, examples

ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42], list(range(60, 80))]
LORA = {"type": "lora", "r": 4, "lora_alpha": 8.0}


class InThread(SessionClient):
    """A child's loop in a thread of this process, which has torch already."""

    def __init__(self, run_dir: Path, given: Any) -> None:
        run_dir.mkdir(parents=True)
        (run_dir / ORDER_FILE).write_text(given.model_dump_json())
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.stop, self.code = Stop(), -1
        self._theirs = theirs
        # A daemon: pytest ends also where a failed test has not ended its child.
        self._thread = threading.Thread(target=self._serve, args=(run_dir, theirs), daemon=True)
        self._thread.start()
        self.hello()

    def _serve(self, run_dir: Path, stream: socket.socket) -> None:
        with stream:
            self.code = serve(run_dir, stream, self.stop)

    def end(self) -> int:
        self.stop.requested = True
        self._thread.join()
        self.stream.close()
        return self.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session")


@pytest.fixture(scope="module")
def child(tiny_dir: Path, folder: Path) -> Iterator[InThread]:
    """A session over the tiny model with one trained adapter, `a`."""
    made = InThread(folder / "run", session.order(tiny_dir, folder / "session"))
    made.ask("create", model="a", method=LORA, seed=1)
    for _ in range(3):
        made.ask("forward_backward", examples(*ROWS), model="a")
        made.ask("step", model="a", learning_rate=0.02, max_grad_norm=1.0)
    yield made
    made.end()


def reference(tiny_dir: Path, adapter: Path | None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    return model if adapter is None else PeftModel.from_pretrained(model, str(adapter), is_trainable=True)


def logprobs_of(model: Any, row: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([row])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:]).unsqueeze(-1)).squeeze(-1)


def test_logprobs_are_those_of_transformers_with_the_saved_adapter_and_without(child: InThread, tiny_dir: Path) -> None:
    saved, _ = child.ask("save", model="a", name="for-peft")
    for name, adapter in (("a", Path(saved["folder"])), (None, None)):
        _, found = child.ask("logprobs", examples(*ROWS), model=name)
        model = reference(tiny_dir, adapter).eval()
        with torch.no_grad():
            expected = [np.append(logprobs_of(model, row).numpy(), 0.0) for row in ROWS]
        assert np.allclose(found["logprobs"], np.concatenate(expected), atol=2e-5)


A, OLD = [0.5, -1.0, 2.0, 0.25, -0.5, 0.0], [-5.0, -5.6, -5.4, -5.7, -5.5, 0.0]


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [
        ({"type": "cross_entropy"}, {"weights": [1.0, 0.0, 0.5, 2.0, 1.0, 1.0]}),
        ({"type": "importance_sampling"}, {"advantages": A, "logprobs": OLD}),
        ({"type": "ppo", "clip_low": 0.9, "clip_high": 1.1}, {"advantages": A, "logprobs": OLD}),
        ({"type": "cispo", "clip_high": 1.1}, {"advantages": A, "logprobs": OLD}),
        ({"type": "dro", "beta": 0.3}, {"advantages": A, "logprobs": OLD}),
        (
            {"type": "gspo", "clip_low": 0.9, "clip_high": 1.1},
            {"advantages": A, "logprobs": OLD, "sequence_ratio_mask": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]},
        ),
        ({"type": "custom"}, {"gradients": A}),
    ],
    ids=lambda value: value.get("type", "") if "type" in value else "",
)
def test_a_loss_and_its_gradient_are_those_of_the_formula_in_torch(
    child: InThread, tiny_dir: Path, folder: Path, loss: dict[str, Any], numbers: dict[str, list[float]]
) -> None:
    name = f"grad-{loss['type']}"
    row = ROWS[0]
    result, _ = child.ask("forward_backward", examples(row, **numbers), model="a", loss=loss)
    saved, _ = child.ask("save", model="a", name=name)
    child.ask("zero_grad", model="a")
    model = reference(tiny_dir, Path(saved["folder"]))
    logp = logprobs_of(model, row)
    given = {key: torch.tensor(values[: len(row) - 1]) for key, values in numbers.items()}
    ratio = torch.exp(logp - given["logprobs"]) if "logprobs" in given else logp
    match loss["type"]:
        case "cross_entropy":
            expected = -(given["weights"] * logp)
        case "importance_sampling":
            expected = -ratio * given["advantages"]
        case "ppo":
            expected = -torch.minimum(ratio * given["advantages"], ratio.clamp(0.9, 1.1) * given["advantages"])
        case "cispo":
            expected = -ratio.clamp(0.8, 1.1).detach() * given["advantages"] * logp
        case "gspo":
            mask = given["sequence_ratio_mask"]
            of_all = torch.exp(((logp.detach() - given["logprobs"]) * mask).sum() / mask.sum())
            ratio = of_all * torch.exp(logp - logp.detach())
            expected = -torch.minimum(ratio * given["advantages"], ratio.clamp(0.9, 1.1) * given["advantages"])
        case "dro":
            expected = -(given["advantages"] * logp - 0.15 * (logp - given["logprobs"]) ** 2)
        case _:
            expected = given["gradients"] * logp
    expected.sum().backward()
    assert result["loss"] == pytest.approx(float(expected.detach().sum()), rel=1e-4, abs=1e-5)
    from safetensors.torch import load_file

    state = load_file(Path(saved["folder"]) / "state.safetensors")
    gradients = {key.removeprefix("gradients/"): value for key, value in state.items() if key.startswith("gradients/")}
    theirs = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys() and len(gradients) > 10
    for key, value in gradients.items():
        assert torch.allclose(value, theirs[key], rtol=1e-3, atol=1e-5), key


def test_several_targets_of_a_token_are_as_many_passes_with_one(child: InThread) -> None:
    """Log-probabilities, loss and gradient are those of each column alone, added up."""
    arrays = examples(*ROWS)
    total = len(arrays["tokens"])
    numbers = np.random.default_rng(1)
    targets = numbers.integers(0, 200, (total, 3)).astype(np.int32)
    weights = numbers.normal(size=(total, 3)).astype(np.float32)
    result, found = child.ask("forward_backward", {**arrays, "targets": targets, "weights": weights}, model="a")
    norm = child.ask("step", model="a", learning_rate=0.0)[0]["grad_norm"]
    loss = 0.0
    for column in range(3):
        alone = {**arrays, "targets": targets[:, column].copy(), "weights": weights[:, column].copy()}
        one, logprobs = child.ask("forward_backward", alone, model="a")
        loss += one["loss"]
        assert np.allclose(found["logprobs"].reshape(total, 3)[:, column], logprobs["logprobs"], atol=1e-5)
    assert result["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-3)
    assert child.ask("step", model="a", learning_rate=0.0)[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    header, _ = child.answer("forward", {**arrays, "targets": targets}, model="a")
    assert header["error"]["field"] == "weights"


def test_pairs_of_dpo_are_those_of_the_formula(child: InThread) -> None:
    old = [-5.0] * len(ROWS[0]) + [-5.0] * len(ROWS[1])
    result, found = child.ask(
        "forward", examples(ROWS[0], ROWS[1], logprobs=old), model="a", loss={"type": "dpo", "beta": 0.2}
    )
    logp = torch.from_numpy(found["logprobs"])
    chosen, rejected = (logp[:5] + 5).sum(), (logp[6:8] + 5).sum()
    assert result["loss"] == pytest.approx(float(-functional.logsigmoid(0.2 * (chosen - rejected))), rel=1e-5)
    header, _ = child.answer("forward", examples(*ROWS, logprobs=[0.0] * 29), model="a", loss="dpo")
    assert header["error"]["field"] == "lengths"


def test_exact_answers_have_the_logprobs_of_training_to_the_bit(child: InThread) -> None:
    """Whatever else is computed beside them: prompts of other lengths, other examples of a batch, a saved adapter."""
    prompts, drawn = [[5, 6, 7], [40, 41], list(range(60, 77))], {"max_tokens": 9, "num_samples": 2, "seed": 3}
    folder = child.ask("save", model="a", name="exact")[0]["folder"]
    child.exact = True
    try:
        _, found = child.ask("generate", examples(*prompts), model="a", stop_token_ids=[], **drawn)
        _, saved = child.ask("generate", examples(*prompts), folder=folder, stop_token_ids=[], **drawn)
        answers = [one.tolist() for one in np.split(found["tokens"], 6)]
        wholes = [[*prompts[at // 2], *answer] for at, answer in enumerate(answers)]
        targets = [token for whole in wholes for token in whole[1:]]
        given = examples(*[whole[:-1] for whole in wholes]) | {"targets": np.array(targets, dtype=np.int32)}
        _, trained = child.ask("forward_backward", given, model="a")
        child.ask("zero_grad", model="a")
    finally:
        child.exact = False
    ends = np.cumsum([len(whole) - 1 for whole in wholes])
    of_answers = np.concatenate([trained["logprobs"][end - 9 : end] for end in ends])
    assert np.array_equal(of_answers, found["logprobs"]) and np.array_equal(saved["logprobs"], found["logprobs"])


def test_the_likeliest_tokens_of_answers(child: InThread) -> None:
    asked = {"model": "a", "max_tokens": 6, "seed": 5, "stop_token_ids": []}
    _, plain = child.ask("generate", examples([5, 6, 7], [40, 41]), temperature=0.7, **asked)
    _, found = child.ask("generate", examples([5, 6, 7], [40, 41]), temperature=0.7, sample_top=4, **asked)
    assert all(np.array_equal(found[name], plain[name]) for name in plain)
    places = zip(found["tokens"], found["logprobs"], found["top_tokens"], found["top_logprobs"], strict=True)
    for token, logprob, tokens, logprobs in places:
        assert list(logprobs) == sorted(logprobs, reverse=True) and np.exp(logprobs).sum() <= 1 + 1e-6
        assert logprob <= logprobs[0] and (token not in tokens or logprob == logprobs[list(tokens).index(token)])
    _, best = child.ask("generate", examples([5, 6, 7], [40, 41]), temperature=0.0, sample_top=1, **asked)
    assert np.array_equal(best["top_tokens"][:, 0], best["tokens"])
    header, _ = child.answer("generate", examples([5]), model="a", max_tokens=1, sample_top=101)
    assert header["error"]["field"] == "sample_top"


def test_named_targets_of_prompts_are_those_of_a_forward_pass(child: InThread) -> None:
    arrays = examples(*ROWS)
    targets = np.random.default_rng(2).integers(-100, 200, (len(arrays["tokens"]), 3)).astype(np.int32)
    _, found = child.ask("generate", arrays | {"targets": targets}, model="a", max_tokens=1)
    weights = np.ones(targets.shape, dtype=np.float32)
    _, seen = child.ask("forward", arrays | {"targets": targets.clip(0), "weights": weights}, model="a")
    assert found["prompt_target_logprobs"].shape == targets.shape and bool((targets < 0).any())
    expected = np.where(targets < 0, 0.0, seen["logprobs"].reshape(targets.shape))
    assert np.allclose(found["prompt_target_logprobs"], expected, atol=1e-6)
    header, _ = child.answer("generate", arrays | {"targets": targets[:, 0].copy()}, model="a", max_tokens=1)
    assert header["error"]["field"] == "targets"


def test_answers_have_the_logprobs_that_a_forward_pass_gives(child: InThread) -> None:
    prompts = [[5, 6, 7], [40, 41]]
    result, found = child.ask(
        "generate", examples(*prompts), model="a", max_tokens=8, num_samples=3, seed=7, stop_token_ids=[]
    )
    assert result["finished"] == [False] * 6 and list(found["lengths"]) == [8] * 6
    again = child.ask("generate", examples(*prompts), model="a", max_tokens=8, num_samples=3, seed=7, stop_token_ids=[])
    assert np.array_equal(again[1]["tokens"], found["tokens"])
    other = child.ask("generate", examples(*prompts), max_tokens=8, num_samples=3, seed=7, stop_token_ids=[])
    assert not np.array_equal(other[1]["logprobs"], found["logprobs"]), "the base alone answers otherwise"
    answers = np.split(found["tokens"], 6)
    rows = [[*prompts[at // 3], *answer.tolist()] for at, answer in enumerate(answers)]
    _, seen = child.ask("logprobs", examples(*rows), model="a")
    at, expected = 0, []
    for row in rows:
        expected.append(seen["logprobs"][at + len(row) - 9 : at + len(row) - 1])
        at += len(row)
    assert np.allclose(np.concatenate(expected), found["logprobs"], atol=1e-5)


def test_a_reward_rises_when_a_loop_trains_on_its_own_answers(tiny_dir: Path, tmp_path: Path) -> None:
    """An adapter learns to answer with some of eight tokens, and is then rewarded for the even ones. Answers are drawn
    from what was saved last. The reward would stay where it was with a loss of the wrong sign, with advantages one
    token off, or with a sampler of older weights."""
    sharp = tmp_path / "sharp"
    shutil.copytree(tiny_dir, sharp)
    weights = load_file(sharp / "model.safetensors")
    weights["model.norm.weight"] *= 10  # logits of the tiny model are too small for a choice of few tokens
    save_file(weights, sharp / "model.safetensors", metadata={"format": "pt"})
    given = session.order(sharp, tmp_path / "session").model_copy(update={"pass_tokens": 1024})
    child = InThread(tmp_path / "run", given)
    child.ask("create", model="a", method=LORA, seed=11)
    prompts, samples, tokens = [[5, 6, 7], [40, 41], [9]], 16, 4
    draw = np.random.default_rng(0)
    for _ in range(20):
        shown = [prompt + draw.integers(64, 72, tokens).tolist() for prompt in prompts * 4]
        child.ask("forward_backward", examples(*shown), model="a")
        child.ask("step", model="a", learning_rate=0.02)
    rewards = list[float]()
    for turn in range(7):
        saved, _ = child.ask("save", model="a", name=f"turn-{turn}")
        asked = {"max_tokens": tokens, "num_samples": samples, "seed": turn, "stop_token_ids": []}
        _, found = child.ask("generate", examples(*prompts), folder=saved["folder"], **asked)
        answers = found["tokens"].reshape(len(prompts), samples, tokens)
        reward = (answers % 2 == 0).mean(-1)
        rewards.append(float(reward.mean()))
        advantages = reward - reward.mean(-1, keepdims=True)
        drawn = found["logprobs"].reshape(answers.shape)
        rows, numbers = list[list[int]](), {"logprobs": list[float](), "advantages": list[float]()}
        for prompt, mine, told, gained in zip(prompts, answers, drawn, advantages, strict=True):
            blank = [0.0] * (len(prompt) - 1)
            for one in range(samples):
                rows.append([*prompt, *mine[one].tolist()])
                numbers["logprobs"] += [*blank, *told[one].tolist(), 0.0]
                numbers["advantages"] += [*blank, *[float(gained[one])] * tokens, 0.0]
        batch, loss = examples(*rows, **numbers), {"type": "importance_sampling"}
        before, seen = child.ask("forward_backward", batch, model="a", loss=loss)
        weighty = batch["advantages"] != 0
        assert np.allclose(seen["logprobs"][weighty], batch["logprobs"][weighty], atol=1e-4), "the sampler's weights"
        child.ask("step", model="a", learning_rate=0.01, weight_decay=0.0, betas=[0.9, 0.95], eps=1e-8)
        if turn == 0:
            after, _ = child.ask("forward", batch, model="a", loss=loss)
            assert after["loss"] < before["loss"], "answers that were rewarded are likelier"
    child.end()
    assert rewards[0] < 0.7 and rewards[-1] > 0.9, rewards


def test_the_likeliest_tokens_of_a_prompt_are_those_of_its_whole_distribution(child: InThread, tiny_dir: Path) -> None:
    saved, _ = child.ask("save", model="a", name="for-likeliest")
    model = reference(tiny_dir, Path(saved["folder"])).eval()
    asked = {"model": "a", "max_tokens": 1, "prompt_top": 5, "prompt_logprobs": True}
    _, found = child.ask("generate", examples(*ROWS, [9]), **asked)
    best, ids = found["prompt_top_logprobs"], found["prompt_top_tokens"]
    _, alone = child.ask("generate", examples(*ROWS, [9]), **{**asked, "prompt_top": 0})
    assert np.array_equal(found["prompt_logprobs"], alone["prompt_logprobs"])
    at = 0
    for row in [*ROWS, [9]]:
        with torch.no_grad():
            whole = torch.log_softmax(model(input_ids=torch.tensor([row])).logits[0].float(), -1)
        count = len(row) - 1
        mine = torch.from_numpy(best[at : at + count].copy())
        assert torch.allclose(mine, whole[:count].topk(5).values, atol=1e-5, rtol=0)
        by_id = whole[:count].gather(-1, torch.from_numpy(ids[at : at + count].copy()).long())
        assert torch.allclose(mine, by_id, atol=1e-5, rtol=0)
        at += len(row)
        assert not best[at - 1].any() and not ids[at - 1].any(), "nothing is behind the last token"
    _, last = child.ask("generate", examples(ROWS[0]), **asked, prompt_last=2)
    assert not last["prompt_top_logprobs"][:3].any() and not last["prompt_logprobs"][:3].any()
    assert np.allclose(last["prompt_top_logprobs"][3:5], best[3:5], atol=1e-6)
    header, _ = child.answer("generate", examples(ROWS[0]), model="a", max_tokens=1, prompt_top=101)
    assert "prompt_top" in header["error"]["field"] and "100" in header["error"]["message"]


def test_a_saved_adapter_answers_as_it_did_when_it_was_saved(child: InThread) -> None:
    """Read by its folder, it gives the bits of the adapter then, while that goes on as if nobody had looked."""
    child.ask("create", model="kept", method={**LORA, "lora_dropout": 0.1}, seed=9)
    folders, expected = [], []
    for turn in range(6):  # more than stay in memory
        child.ask("forward_backward", examples(ROWS[turn % 3]), model="kept")
        child.ask("step", model="kept", learning_rate=0.02)
        folders.append(child.ask("save", model="kept", name=f"kept-{turn}")[0]["folder"])
        expected.append(child.ask("logprobs", examples(*ROWS), model="kept")[1]["logprobs"])
    for turn in (0, 1, 2, 3, 4, 5, 0, 5):
        _, found = child.ask("logprobs", examples(*ROWS), folder=folders[turn])
        assert np.array_equal(found["logprobs"], expected[turn])
    assert np.array_equal(child.ask("logprobs", examples(*ROWS), model="kept")[1]["logprobs"], expected[5])
    asked = {"max_tokens": 4, "seed": 3, "stop_token_ids": [], "prompt_logprobs": True}
    _, mine = child.ask("generate", examples(*ROWS, [9]), model="kept", **asked)
    _, saved = child.ask("generate", examples(*ROWS, [9]), folder=folders[5], **asked)
    assert all(np.array_equal(saved[name], mine[name]) for name in mine)
    assert np.array_equal(mine["prompt_logprobs"], np.append(expected[5], np.float32(0.0)))
    child.ask("forward_backward", examples(ROWS[0]), model="kept")
    child.ask("step", model="kept", learning_rate=0.02)
    looked = child.ask("logprobs", examples(*ROWS), model="kept")[1]["logprobs"]
    child.ask("load", model="kept", folder=folders[5], with_optimizer=True)
    child.ask("forward_backward", examples(ROWS[0]), model="kept")
    child.ask("step", model="kept", learning_rate=0.02)
    assert np.array_equal(child.ask("logprobs", examples(*ROWS), model="kept")[1]["logprobs"], looked)


def test_adapters_know_nothing_of_each_other(child: InThread, tiny_dir: Path, folder: Path) -> None:
    """Two recipes in turns give the bits that each gives alone, with dropout and adapters of other shapes."""
    one = {**LORA, "lora_dropout": 0.2}
    other = {"type": "lora", "r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}

    def half(to: SessionClient, name: str, row: list[int]) -> np.ndarray[Any, Any]:
        to.ask("forward_backward", examples(row), model=name)
        to.ask("forward_backward", examples(ROWS[1]), model=name)
        to.ask("step", model=name, learning_rate=0.01, weight_decay=0.1, betas=[0.9, 0.95], eps=1e-8)
        return to.ask("logprobs", examples(row), model=name)[1]["logprobs"]

    child.ask("create", model="one", method=one, seed=3)
    child.ask("create", model="other", method=other, seed=4)
    mixed = [(half(child, "one", ROWS[0]), half(child, "other", ROWS[2])) for _ in range(2)]
    child.ask("drop", model="other")
    assert child.answer("zero_grad", model="other")[0]["error"]["code"] == "session_model_not_found"
    child.ask("create", model="other", method=other, seed=4)
    alone = [half(child, "other", ROWS[2]) for _ in range(2)]
    assert all(np.array_equal(both[1], single) for both, single in zip(mixed, alone, strict=True))
    child.ask("drop", model="one")
    child.ask("create", model="one", method=one, seed=3)
    assert all(np.array_equal(both[0], half(child, "one", ROWS[0])) for both in mixed)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_packed_base_trains_two_adapters(tiny_dir: Path, tmp_path: Path, quantization: str) -> None:
    given = session.order(tiny_dir, tmp_path / "session", quantization={"type": quantization})
    child = InThread(tmp_path / "run", given)
    base = child.ask("logprobs", examples(*ROWS))[1]["logprobs"]
    for name, rank in (("a", 4), ("b", 8)):
        child.ask("create", model=name, method={**LORA, "r": rank}, seed=1)
        before, _ = child.ask("forward_backward", examples(*ROWS), model=name)
        for _ in range(4):
            child.ask("step", model=name, learning_rate=0.02)
            after, _ = child.ask("forward_backward", examples(*ROWS), model=name)
        assert after["loss"] < 0.9 * before["loss"]
    assert np.array_equal(child.ask("logprobs", examples(*ROWS))[1]["logprobs"], base)
    assert child.end() == EXIT_CHECKPOINTED
    again = InThread(tmp_path / "again", given)
    seen, _ = again.ask("forward", examples(*ROWS), model="b")
    assert again.end() == EXIT_CHECKPOINTED and seen["loss"] == pytest.approx(after["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("op", "arrays", "fields", "field"),
    [
        ("forward", examples([1, 2]), {"model": "nobody"}, "model"),
        ("forward", {"tokens": np.array([1], dtype=np.int32)}, {"model": "a"}, "lengths"),
        ("forward", examples([1, 2], weights=[1.0]), {"model": "a"}, "weights"),
        ("forward", examples([1, 2], weights=[1.0, float("nan")]), {"model": "a"}, "weights"),
        ("forward", examples([1, 99_999]), {"model": "a"}, "tokens"),
        ("forward", examples([1] * 600), {"model": "a"}, "lengths"),
        ("forward", examples([1, 2], logprobs=[0.0, 0.0]), {"model": "a"}, "logprobs"),
        ("forward", examples([1, 2]), {"model": "a", "loss": "ppo"}, "advantages"),
        ("step", None, {"model": "a", "learning_rate": 0.1}, None),
        ("create", None, {"model": "a"}, "model"),
        ("create", None, {"model": "../x"}, "model"),
        ("generate", examples([1, 2]), {"model": "a", "max_tokens": 600}, "max_tokens"),
        ("load", None, {"model": "x", "folder": "/nowhere"}, "folder"),
        ("logprobs", examples([1, 2]), {"folder": "/nowhere"}, "folder"),
        ("generate", examples([1, 2]), {"folder": "/nowhere", "max_tokens": 2}, "folder"),
        ("logprobs", examples([1, 2]), {"folder": "/nowhere", "model": "a"}, "op"),
        ("sing", None, {}, "op"),
    ],
)
def test_bad_operations_are_answered_and_change_nothing(
    child: InThread, op: str, arrays: Any, fields: dict[str, Any], field: str | None
) -> None:
    header, _ = child.answer(op, arrays, **fields)
    assert not header["ok"] and header["error"]["field"] == field and header["error"]["message"]
    child.ask("forward", examples(*ROWS), model="a")


@pytest.mark.parametrize("op", ["forward", "forward_backward"])
def test_a_loss_that_is_no_number_is_an_error_and_changes_nothing(child: InThread, op: str) -> None:
    """The session goes on, the gradients that were there before with it."""
    child.ask("zero_grad", model="a")
    child.ask("forward_backward", examples(*ROWS), model="a")
    importance = {"type": "importance_sampling"}
    for old, advantage in ((-1e30, 1.0), (-200.0, 3e38)):
        batch = examples([1, 2, 3], logprobs=[old] * 3, advantages=[advantage] * 3)
        header, _ = child.answer(op, batch, model="a", loss=importance)
        assert header["error"]["code"] == "diverged" and "NaN or infinite" in header["error"]["message"]
    after = child.ask("step", model="a", learning_rate=0.0)[0]["grad_norm"]
    child.ask("forward_backward", examples(*ROWS), model="a")
    assert child.ask("step", model="a", learning_rate=0.0)[0]["grad_norm"] == after


def test_gradients_whose_norm_is_no_number_are_dropped(child: InThread) -> None:
    child.ask("zero_grad", model="a")
    batch = examples([1, 2, 3], logprobs=[-1.0] * 3, advantages=[1e30] * 3)
    child.ask("forward_backward", batch, model="a", loss={"type": "importance_sampling"})
    assert child.answer("step", model="a", learning_rate=0.0)[0]["error"]["code"] == "diverged"
    assert child.answer("step", model="a", learning_rate=0.0)[0]["error"]["code"] == "no_gradients"
    child.ask("forward_backward", examples(*ROWS), model="a")
    child.ask("step", model="a", learning_rate=0.0)


@pytest.mark.parametrize("fault", ["cut", "junk", "config", "list", "rank", "nan", "huge"])
def test_a_broken_adapter_from_elsewhere_is_told_and_ends_nothing(child: InThread, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / fault
    shutil.copytree(child.ask("save", model="a", name=f"broken-{fault}")[0]["folder"], folder)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    match fault:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-10])
        case "junk":
            weights.write_bytes(b"x")
        case "config":
            config.write_text("{")
        case "list":
            config.write_text("[]")
        case "rank":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"r": -1}))
        case _:
            value = float("nan") if fault == "nan" else 1e30
            changed = {name: torch.full_like(tensor, value) for name, tensor in load_file(weights).items()}
            save_file(changed, weights, metadata={"format": "pt"})
    before = child.ask("forward", examples(*ROWS), model="a")[0]
    for op, more in (("logprobs", {}), ("generate", {"max_tokens": 2, "sample_top": 2})):
        header, _ = child.answer(op, examples(*ROWS), folder=str(folder), **more)
        assert header["error"]["code"] in ("invalid_operation", "model_not_finite", "diverged"), header
    if fault != "huge":  # whose numbers are numbers
        into = ("new", "a") if fault in ("cut", "junk", "nan") else ("new",)
        for model in into:
            header, _ = child.answer("load", model=model, folder=str(folder))
            assert header["error"]["field"] == "folder" and header["error"]["message"], header
        assert child.answer("drop", model="new")[0]["error"]["code"] == "session_model_not_found"
    assert child.ask("forward", examples(*ROWS), model="a")[0] == before


@pytest.mark.parametrize("method", [{**LORA, "lora_dropout": 0.1}, {"type": "full"}], ids=lambda one: str(one["type"]))
def test_a_killed_child_goes_on_to_the_bit_from_its_snapshot(
    tiny_dir: Path, tmp_path: Path, method: dict[str, Any]
) -> None:
    """kill -9 within an accumulation window, behind a snapshot: replayed from there, the weights are those of a child
    that was not disturbed. Dropout takes part, and one child that starts cold."""
    log: list[tuple[str, Any, dict[str, Any]]] = [("create", None, {"model": "m", "method": method, "seed": 5})]
    for turn in range(4):
        log.append(("forward_backward", examples(ROWS[turn % 3]), {"model": "m"}))
        log.append(("forward_backward", examples(ROWS[(turn + 1) % 3]), {"model": "m"}))
        log.append(("step", None, {"model": "m", "learning_rate": 0.01, "max_grad_norm": 0.5}))
    log.append(("save", None, {"model": "m", "name": "end"}))

    def finish(child: SessionClient) -> list[bytes]:
        for op, arrays, fields in log[child.position :]:
            result, _ = child.ask(op, arrays, **fields)
        return [path.read_bytes() for path in sorted(Path(result["folder"]).glob("*.safetensors"))]

    calm = InThread(tmp_path / "calm-run", session.order(tiny_dir, tmp_path / "calm", method=method))
    expected = finish(calm)
    calm.end()
    given = session.order(tiny_dir, tmp_path / "struck", method=method)
    with SessionRanks(tmp_path / "run-1", given, 1, cold=method["type"] == "full") as child:
        for op, arrays, fields in log[:6]:
            child.ask(op, arrays, **fields)
        child.snapshot()
        for op, arrays, fields in log[6:9]:
            child.ask(op, arrays, **fields)
        child.send(log[9][0], log[9][1], **log[9][2])
        child.ranks[0].send_signal(signal.SIGKILL)
    revived = InThread(tmp_path / "run-2", given)
    assert revived.position == 6
    assert len(expected) == 2 and finish(revived) == expected
    revived.end()


def test_a_session_that_trains_the_model_itself(tiny_dir: Path, tmp_path: Path) -> None:
    """Steps are those of torch's SGD over transformers' model; what is saved is a model that transformers loads, and
    that comes back with its optimizer to the bit. There is one owner, no base beside it and no adapter."""
    child = InThread(tmp_path / "run", session.order(tiny_dir, tmp_path / "session", method={"type": "full"}))
    base = child.ask("logprobs", examples(*ROWS), model=None)[1]["logprobs"]
    assert child.answer("create", model="a", method=LORA)[0]["error"]["field"] == "method"
    child.ask("create", model="m", method={"type": "full"}, optimizer={"type": "sgd", "momentum": 0.9})
    model = reference(tiny_dir, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    for _ in range(3):
        result, _ = child.ask("forward_backward", examples(*ROWS), model="m")
        loss = -sum(logprobs_of(model, row).sum() for row in ROWS)
        loss.backward()
        assert result["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
        child.ask("step", model="m", learning_rate=0.002, weight_decay=0.0)
        optimizer.step()
        optimizer.zero_grad()
    saved = Path(child.ask("save", model="m", name="one")[0]["folder"])
    found, there = reference(saved, None), dict(model.named_parameters())
    moved = [float((tensor - there[name]).abs().max()) for name, tensor in found.named_parameters()]
    begun = dict(reference(tiny_dir, None).named_parameters())
    far = max(float((tensor - begun[name]).abs().max()) for name, tensor in there.items())
    assert max(moved) < 1e-3 * far
    _, scored = child.ask("logprobs", examples(*ROWS), model="m")
    with torch.no_grad():
        expected = [np.append(logprobs_of(found.eval(), row).numpy(), 0.0) for row in ROWS]
    assert np.allclose(scored["logprobs"], np.concatenate(expected), atol=2e-5)

    def onward() -> list[float]:
        child.ask("forward_backward", examples(*ROWS), model="m")
        child.ask("step", model="m", learning_rate=0.002)
        return [child.ask("forward", examples(*ROWS), model="m")[0]["loss"]]

    first = onward()
    child.ask("load", model="m", folder=str(saved), with_optimizer=True)
    assert np.array_equal(child.ask("logprobs", examples(*ROWS), model="m")[1]["logprobs"], scored["logprobs"])
    assert onward() == first
    for op, more in (("create", {"model": "b", "method": {"type": "full"}}), ("logprobs", {"model": None})):
        assert child.answer(op, examples(*ROWS) if op == "logprobs" else None, **more)[0]["error"]["field"] == "model"
    assert child.answer("logprobs", examples(*ROWS), folder=str(saved))[0]["error"]["field"] == "folder"
    assert child.answer("load", model="m", folder=str(tmp_path))[0]["error"]["field"] == "folder"
    child.ask("drop", model="m")
    assert np.array_equal(child.ask("logprobs", examples(*ROWS), model=None)[1]["logprobs"], base)
    child.ask("load", model="again", folder=str(saved))
    assert np.array_equal(child.ask("logprobs", examples(*ROWS), model="again")[1]["logprobs"], scored["logprobs"])
    child.end()


def test_sessions_that_share_a_child_come_to_what_each_comes_to_alone(tiny_dir: Path, tmp_path: Path) -> None:
    """Three sessions with an adapter of the same name take turns, kill -9 in the middle, one leaves and comes back:
    losses, samples and states are those of a child of its own, to the bit. Dropout takes part."""

    def log_of(number: int) -> list[tuple[str, Any, dict[str, Any]]]:
        log: list[tuple[str, Any, dict[str, Any]]] = [
            ("create", None, {"model": "m", "method": {**LORA, "r": 2 + number, "lora_dropout": 0.1}, "seed": number})
        ]
        for turn in range(3):
            at = turn + number
            log.append(("forward_backward", examples(ROWS[at % 3]), {"model": "m"}))
            log.append(("forward_backward", examples(ROWS[(at + 1) % 3]), {"model": "m"}))
            log.append(("generate", examples(ROWS[at % 3]), {"model": "m", "max_tokens": 4, "seed": turn}))
            log.append(("step", None, {"model": "m", "learning_rate": 0.01, "max_grad_norm": 0.5}))
        return [*log, ("save", None, {"model": "m", "name": "end"})]

    def told(child: SessionClient, entry: tuple[str, Any, dict[str, Any]]) -> Any:
        result, found = child.ask(entry[0], entry[1], **entry[2])
        result.pop("folder", None)
        return result, {name: values.tolist() for name, values in found.items()}

    logs = [log_of(number) for number in range(3)]
    alone, states = [], []
    for number, log in enumerate(logs):
        calm = InThread(tmp_path / f"calm-run-{number}", session.order(tiny_dir, tmp_path / f"calm-{number}"))
        alone.append([told(calm, entry) for entry in log])
        states.append((tmp_path / f"calm-{number}" / "saved" / "end" / "state.safetensors").read_bytes())
        calm.end()
    given, shared = session.order(tiny_dir, tmp_path / "s0"), dict[int, list[Any]]({0: [], 1: [], 2: []})
    with SessionRanks(tmp_path / "run-1", given, 1) as child:
        members: list[SessionClient] = [child, *(child.beside(f"s{n}", tmp_path / f"s{n}") for n in (1, 2))]
        for at in range(7):
            for number, member in enumerate(members):
                shared[number].append(told(member, logs[number][at]))
            if at == 2:
                members[1].snapshot()
            if at == 4:
                members[2].leave()
                members[2] = child.beside("s2", tmp_path / "s2")
                assert members[2].position == 5
                child.snapshot()
        child.send(logs[0][7][0], logs[0][7][1], **logs[0][7][2])
        child.ranks[0].send_signal(signal.SIGKILL)
    revived = InThread(tmp_path / "run-2", session.order(tiny_dir, tmp_path / "s1"))
    members = [revived.beside(f"s{n}", tmp_path / f"s{n}") for n in (0, 2)]
    members.insert(1, revived)
    assert [member.position for member in members] == [5, 3, 5]
    replayed = [logs[number][member.position :] for number, member in enumerate(members)]
    for number in range(3):
        del shared[number][members[number].position :]
    while any(replayed):
        for number in (2, 1, 0):
            if replayed[number]:
                shared[number].append(told(members[number], replayed[number].pop(0)))
    revived.end()
    for number in range(3):
        assert shared[number] == alone[number]
        assert (tmp_path / f"s{number}" / "saved" / "end" / "state.safetensors").read_bytes() == states[number]


def test_a_session_that_leaves_takes_its_adapters_along(child: InThread, tmp_path: Path) -> None:
    before = child.ask("forward", examples(*ROWS), model="a")[0]
    guest = child.beside("guest", tmp_path / "guest")
    assert guest.answer("forward", examples(*ROWS), model="a")[0]["error"]["code"] == "session_model_not_found"
    guest.ask("create", model="a", method=LORA, seed=3)
    guest.ask("forward_backward", examples(*ROWS), model="a")
    assert guest.ask("step", model="a", learning_rate=0.02)[0]["steps"] == 1
    guest.leave()
    assert (tmp_path / "guest" / "snapshots").is_dir()
    assert child.ask("forward", examples(*ROWS), model="a")[0] == before


DRAWS: list[dict[str, Any]] = [
    {"model": "a", "max_tokens": 9, "num_samples": 3, "seed": 1},
    {"model": "b", "max_tokens": 3, "temperature": 0.6, "top_p": 0.9, "seed": 2, "sample_top": 2},
    {"model": None, "max_tokens": 28, "temperature": 0.0},
    {"model": "dora", "max_tokens": 4, "seed": 3},
    {"model": "a", "max_tokens": 5, "seed": 4, "prompt_logprobs": True},
]


@pytest.mark.parametrize("base", [{"precision": "bf16"}, {"quantization": "nf4"}], ids=str)
def test_answers_that_are_drawn_in_one_batch_are_those_drawn_alone(
    tiny_dir: Path, tmp_path: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several adapters, of the base, and of two sessions; an adapter that has no form for it is drawn alone."""
    batches: list[int] = []
    complete = SlotGenerator.complete

    def counted(generator: SlotGenerator, prompts: Any, *given: Any, **more: Any) -> Any:
        batches.append(len(prompts))
        return complete(generator, prompts, *given, **more)

    made = InThread(tmp_path / "run", session.order(tiny_dir, tmp_path / "own", **base))
    other = made.beside("guest", tmp_path / "guest")
    for one in (made, other):
        for at, (name, more) in enumerate([("a", {}), ("b", {"r": 8}), ("dora", {"use_dora": True})]):
            one.ask("create", model=name, method={**LORA, **more}, seed=at)
            one.ask("forward_backward", examples(*ROWS), model=name)
            one.ask("step", model=name, learning_rate=0.02 if one is made else 0.05)
    prompts = examples([5, 6, 7], list(range(60, 99)), [9])
    alone = [[one.ask("generate", prompts, stop_token_ids=[], **draw) for draw in DRAWS] for one in (made, other)]
    with monkeypatch.context() as patched:
        patched.setattr(SlotGenerator, "complete", counted)
        wishes = [(one, "generate", prompts, {"stop_token_ids": [], **draw}) for draw in DRAWS for one in (made, other)]
        together = made.ask_together(wishes)
    for which, results in enumerate(alone):
        for at, (_, arrays) in enumerate(results):
            tensors = together[2 * at + which]
            assert tensors.keys() == arrays.keys()
            assert all(np.array_equal(tensors[name], arrays[name]) for name in arrays), (which, at)
    assert sorted(batches) == [3, 3, 24], "all but two operations in one batch"
    assert made.end() == EXIT_CHECKPOINTED
