"""The reward `model`: scores are those of plain transformers, whatever is scored beside an answer, and what no reward
model can score is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from core.data.rows import Message, PromptOnly
from core.errors import ModelError
from core.spec.axes.rollout.reward import ModelReward
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RewardModelFolder, RewardModelOrder, RunOrder
from core.spec.settled import method_of
from core.train.base.events import NullEventWriter
from core.train.model.placement import place
from core.train.prepare.chains import prepare_reward_model
from core.train.rollout.sandboxed.programs import answered
from core.train.rollout.scorers import Scorer
from core.train.run import Run
from tests.support.rewards import margins
from tests.support.trainer import events, log, run, write_rows, write_run

METHODS: dict[str, dict[str, Any]] = {"lora": {"type": "lora", "r": 4}, "full": {"type": "full"}}
TRAINING = {"precision": "fp32", "max_length": 96, "per_device_train_batch_size": 4}


def reward_run(folder: Path, tiny_dir: Path, method: dict[str, Any]) -> Path:
    """A reward model that chats were trained on."""
    rows = write_rows(folder.parent / "margins.jsonl", margins(8))
    made = write_run(
        folder,
        tiny_dir,
        rows,
        data={"train": str(rows)},
        stage="reward",
        method=method,
        optimizer={"learning_rate": 5e-3},
        training=TRAINING | {"max_steps": 3},
    )
    assert run(made) == EXIT_OK, (events(made)[-1], log(made))
    return made


@pytest.fixture(scope="module", params=METHODS)
def reward_model(request: pytest.FixtureRequest, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folders of a reward model: of a job's adapter, or of a whole model that no job is known of."""
    made = reward_run(tmp_path_factory.mktemp(request.param) / "run", tiny_dir, METHODS[request.param])
    artifacts = made / "artifacts"
    if request.param == "full":
        return RewardModelFolder(reward="model", model_dir=str(artifacts / "model"))
    spec = RunOrder.model_validate_json((made / ORDER_FILE).read_bytes()).spec
    return RewardModelFolder(reward="model", model_dir=str(tiny_dir), adapter_dir=str(artifacts / "adapter"), spec=spec)


def plain(folder: RewardModelFolder, prompts: list[Any], answers: list[str]) -> list[float]:
    """Scores as a user of transformers and PEFT computes them, one at a time."""
    where = folder.adapter_dir or folder.model_dir
    tokenizer: Any = AutoTokenizer.from_pretrained(where)
    if folder.adapter_dir is None:
        model: Any = AutoModelForSequenceClassification.from_pretrained(where, dtype=torch.float32)
    else:
        base: Any = AutoModelForSequenceClassification.from_pretrained(
            folder.model_dir, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
        )
        model = PeftModel.from_pretrained(base, where)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": answer}], tokenize=False)
        batch = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            found.append(float(model.eval()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits))
    return found


def job(folder: Path, tiny_dir: Path, reward_model: RewardModelFolder, stage: str, **fields: Any) -> Path:
    rows: list[Any] = [{"prompt": f"say a letter, number {n}"} for n in range(3)]
    rows.append({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]})
    path = write_rows(folder.parent / "prompts.jsonl", rows)
    made = write_run(
        folder,
        tiny_dir,
        path,
        data={"train": {"type": "path", "path": str(path), "format": "prompt"}},
        stage={
            "type": stage,
            "num_generations": 2,
            "num_iterations": 1,
            "max_completion_length": 8,
            "temperature": 1.5,
            "reward": [{"type": "model", "model": {"type": "local", "path": "/reward-model"}, "batch_size": 3}],
        }
        | fields,
        method={"type": "lora", "r": 4},
        training=TRAINING | {"max_steps": 2, "gradient_accumulation_steps": 2},
    )
    order = RunOrder.model_validate_json((made / ORDER_FILE).read_bytes())
    (made / ORDER_FILE).write_text(order.model_copy(update={"reward_models": [reward_model]}).model_dump_json())
    return made


@pytest.mark.parametrize("stage", ["grpo", "rloo"])
def test_answers_are_scored_as_plain_transformers_scores_them(
    tiny_dir: Path, reward_model: RewardModelFolder, tmp_path: Path, stage: str
) -> None:
    made = job(tmp_path / "run", tiny_dir, reward_model, stage)
    assert run(made) == EXIT_OK, (events(made)[-1], log(made))
    answers = [json.loads(line) for line in (made / "artifacts" / "rollouts.jsonl").read_text().splitlines()]
    assert len(answers) == 16
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    prompts = [rows[one["line"] - 1].get("prompt") or rows[one["line"] - 1]["messages"] for one in answers]
    expected = plain(reward_model, prompts, [one["completion"] for one in answers])
    assert [one["rewards"]["model"] for one in answers] == pytest.approx(expected, abs=1e-4)
    assert len(set(expected)) > 4
    (record,) = [event["record"] for event in events(made, "run_record")]
    assert record["reward_models"][0]["reward"] == "model"


SAYS = "def respond(prompt, answers):\n    return {'reply': 'Say more.' if len(answers) < 2 else None, 'reward': 0.0}"


def test_an_episode_is_scored_as_the_conversation_it_is(
    tiny_dir: Path, reward_model: RewardModelFolder, tmp_path: Path
) -> None:
    environment = {"type": "python", "source": SAYS, "max_turns": 2, "max_turn_length": 4}
    made = job(tmp_path / "run", tiny_dir, reward_model, "grpo", environment=environment, max_completion_length=50)
    assert run(made) == EXIT_OK, (events(made)[-1], log(made))
    told = [json.loads(line) for line in (made / "artifacts" / "rollouts.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    before, last = [], []
    for one in told:
        row, (first, reply, second) = rows[one["line"] - 1], [turn["content"] for turn in one["turns"]]
        asked = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        said = [{"role": "assistant", "content": first}, {"role": "user", "content": reply}]
        before.append([*asked, *said])
        last.append(second)
    expected = plain(reward_model, before, last)
    assert [one["rewards"]["model"] for one in told] == pytest.approx(expected, abs=1e-4) and len(set(expected)) > 4


def scorer(folder: Path, tiny_dir: Path, reward_model: RewardModelFolder, **fields: Any) -> Scorer:
    made = job(folder, tiny_dir, reward_model, "grpo")
    order = RunOrder.model_validate_json((made / ORDER_FILE).read_bytes())
    spec = order.spec
    reward = ModelReward.model_validate({"type": "model", "model": {"type": "local", "path": "/reward-model"}} | fields)
    placement = place(spec.resources, spec.training, method_of(spec))
    return Scorer(Run(order, made, NullEventWriter()), reward, reward_model, placement)


def test_a_score_does_not_depend_on_what_is_scored_beside_it(
    tiny_dir: Path, reward_model: RewardModelFolder, tmp_path: Path
) -> None:
    before = torch.get_rng_state()
    alone = scorer(tmp_path / "alone", tiny_dir, reward_model, batch_size=1)
    together = scorer(tmp_path / "together", tiny_dir, reward_model, batch_size=64)
    assert torch.equal(torch.get_rng_state(), before), "loading draws none of the run's numbers"
    answers = ["", "yes", "x" * 40, "yes", "<|im_end|>", "no\n\n", "maybe so"]
    asked = [answered(n + 1, "", PromptOnly("Is it?" if n % 2 else (Message("user", "Is it?"),))) for n in range(7)]
    one, many = alone.values_of(answers, asked), together.values_of(answers, asked)
    assert all(isinstance(value, float) for value in one), one
    assert many == pytest.approx(one, abs=1e-5)
    assert many[1] == many[3], "the same answer is scored once"
    assert many == together.values_of(answers, asked)
    short = scorer(tmp_path / "short", tiny_dir, reward_model, max_length=60)
    assert [isinstance(value, str) for value in short.values_of(answers, asked)].count(True) == 1
    (why,) = [value for value in short.values_of(answers, asked) if isinstance(value, str)]
    assert "tokens as the reward model counts them, more than 60" in why


def test_out_of_memory_scores_fewer_answers_at_once(
    tiny_dir: Path, reward_model: RewardModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Scorer._pass

    def full(one: Scorer, rows: Any) -> list[float]:
        if len(rows) > 2:
            raise torch.OutOfMemoryError("no memory for so many answers")
        return before(one, rows)

    made = scorer(tmp_path / "run", tiny_dir, reward_model, batch_size=8)
    answers = [str(n) for n in range(5)]
    asked = [answered(1, "", PromptOnly("Is it?"))] * 5
    calm = made.values_of(answers, asked)
    monkeypatch.setattr(Scorer, "_pass", full)
    assert made.values_of(answers, asked) == pytest.approx(calm, abs=1e-5)
    assert made.batch_size == 2
    monkeypatch.setattr(made, "batch_size", 1)
    monkeypatch.setattr(Scorer, "_pass", lambda one, rows: full(one, [*rows] * 3))
    with pytest.raises(torch.OutOfMemoryError):
        made.values_of(answers, asked)


def test_a_language_model_is_no_reward_model(tiny_dir: Path, tmp_path: Path) -> None:
    asked = RewardModelOrder.model_validate(
        {"reward": "style", "field": "stage.reward.1.model", "model": {"type": "local", "path": str(tiny_dir)}}
    )
    with pytest.raises(ModelError, match=r"the reward model `style`: .*LlamaForCausalLM") as refused:
        prepare_reward_model(asked, tmp_path / "models", None, None, True, lambda *_: None)
    assert (refused.value.code, refused.value.field) == ("not_a_reward_model", "stage.reward.1.model")
