"""Jobs of `stage: grpo`: what is learned, what stays the same to the bit, what is told and refused."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.spec.run.folder import ROLLOUTS
from core.train.attention.exact import PRODUCTS, exact_operators
from core.train.base.stop import Stop
from core.train.data.order import build_order
from core.train.engine import Engine
from tests.support.rollouts import figures, finished, rollout_run
from tests.support.trainer import events, log, notices, run, weights, write_rows

E_SHARE = {"type": "regex", "pattern": "[a-f]", "name": "early"}
SHORT = {"type": "length", "most": 2, "slack": 6}
STAGE: dict[str, Any] = {
    "type": "grpo", "num_generations": 4, "max_completion_length": 8, "reward": [E_SHARE, SHORT], "slots": 3,
    "temperature": 1.5,
}  # fmt: skip
ROOM = {"max_length": 64}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = [{"prompt": f"say a letter, number {n}", "reference": str(n)} for n in range(7)]
    return write_rows(tmp_path_factory.mktemp("rows") / "prompts.jsonl", found)


def order(folder: Path, tiny_dir: Path, rows: Path, **axes: Any) -> Path:
    stage, training = STAGE | axes.pop("stage", {}), ROOM | axes.pop("training", {})
    return rollout_run(folder, tiny_dir, rows, stage=stage, training=training, **axes)


def go(*args: Any, **axes: Any) -> Path:
    return finished(order(*args, **axes))


@pytest.fixture(scope="module")
def calm(tiny_dir: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(tmp_path_factory.mktemp("calm") / "run", tiny_dir, rows)


def test_a_job_samples_rewards_and_learns(calm: Path) -> None:
    told = figures(calm)
    assert sorted(told) == [1, 2, 3]
    for values in told.values():
        assert {"loss", "reward", "reward_std", "frac_reward_zero_std", "entropy", "clip_ratio"} <= values.keys()
        assert 0 <= values["sampler_mismatch_kl"] < 1e-6
        early, short = values["rewards/early/mean"], values["rewards/length/mean"]
        assert values["reward"] == pytest.approx(early + short)
        assert 1 <= values["completions/mean_length"] <= values["completions/max_length"] <= 8
        assert values["clip_ratio"] == 0, "the first step over answers is by the policy that drew them"
    assert any(values["grad_norm"] > 0 for values in told.values())


def test_groups_without_a_difference_are_drawn_anew(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    stage = {"num_generations": 2, "reward": [E_SHARE]}
    plain, again = (
        go(tmp_path / str(most), tiny_dir, rows, stage=stage | {"max_resamples": most}, training={"max_steps": 1})
        for most in (0, 3)
    )
    before, after = figures(plain)[1], figures(again)[1]
    alike = before["frac_reward_zero_std"]
    assert alike > 0 and after["frac_groups_resampled"] == pytest.approx(alike)
    assert after["frac_reward_zero_std"] < alike and 1 < after["draws_per_group"] <= 1 + 3 * alike
    assert "draws_per_group" not in before
    first, second = (
        list(map(json.loads, (one / "artifacts" / "rollouts.jsonl").read_text().splitlines())) for one in (plain, again)
    )
    for at in range(0, len(first), 2):
        was, now = first[at : at + 2], second[at : at + 2]
        assert [one["line"] for one in was] == [one["line"] for one in now]
        if was[0]["reward"] != was[1]["reward"] or now[0]["reward"] == now[1]["reward"]:
            assert [one["completion"] for one in was] == [one["completion"] for one in now]


def test_the_rollouts_are_an_artifact(calm: Path) -> None:
    lines = [json.loads(line) for line in (calm / "artifacts" / "rollouts.jsonl").read_text().splitlines()]
    # Seven prompts, three a step: the third step has one.
    assert [line["step"] for line in lines] == [1] * 12 + [2] * 12 + [3] * 4
    assert len({line["line"] for line in lines}) == 7
    for line in lines:
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()))
        assert line["rewards"]["early"] == any(letter in "abcdef" for letter in line["completion"])
    for at in range(0, len(lines), 4):
        group = lines[at : at + 4]
        assert len({line["line"] for line in group}) == 1 and [line["sample"] for line in group] == [0, 1, 2, 3]
        assert sum(line["advantage"] for line in group) == pytest.approx(0, abs=1e-5)
    kinds = {entry["path"]: entry["kind"] for entry in events(calm, "result")[0]["artifacts"]}
    assert kinds["rollouts.jsonl"] == "rollouts"
    for line, told in zip(lines, tokens_of(calm), strict=True):
        assert len(told["words"]) == len(told["sampler"]) == line["tokens"] and told.keys() == {"words", "sampler"}
        assert max(told["sampler"]) <= 0
        assert "\ufffd" in (text := "".join(told["words"])) or text.startswith(line["completion"]), "part of one"


def tokens_of(run_dir: Path) -> list[dict[str, Any]]:
    files = sorted((run_dir / ROLLOUTS).glob("tokens-*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_trial_is_the_first_rollouts_and_trains_nothing(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path
) -> None:
    tried = order(tmp_path / "run", tiny_dir, rows)
    path = tried / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trial_prompts": 2}))
    assert run(tried) == EXIT_OK, log(tried)
    told = events(tried, "result")[0]
    found = told["result"]
    # Two prompts are less than the three of a step, which is made whole: it is the first step of the training.
    first = list(map(json.loads, (calm / "artifacts" / "rollouts.jsonl").read_text().splitlines()))[:12]
    assert (found["prompts"], found["answers"]) == (3, 12)
    assert found["reward"]["mean"] == pytest.approx(sum(one["reward"] for one in first) / 12)
    assert {one["answer"] for one in found["examples"]} <= {one["completion"] for one in first}
    for name in ("early", "length"):
        bars = found["rewards"][name]["histogram"]
        assert sum(bar["answers"] for bar in bars) == 12
        assert {bar["from"] for bar in bars} == {one["rewards"][name] for one in first}
    assert found["share_alike"] == pytest.approx(figures(calm)[1]["frac_reward_zero_std"])
    assert found["step"]["train_seconds"] > 0 and found["tokens"]["longest_answer"] <= 8
    assert told["artifacts"] == [] and not (tried / "checkpoints").exists() and not events(tried, "metrics")


SOURCE = (
    "def reward(completions, reference):\n    return [len(c) / 10 + int(r) for c, r in zip(completions, reference)]"
)
SHAKY = "def reward(completions):\n    return [1 / (len(c) - len(c)) if c > 'm' else len(c) for c in completions]"


def test_code_of_users_rewards(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    stage = {"reward": [{"type": "python", "source": SOURCE}]}
    ran = go(tmp_path / "run", tiny_dir, rows, stage=stage, training={"max_steps": 2})
    lines = [json.loads(line) for line in (ran / "artifacts" / "rollouts.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["rewards"] == {"python": pytest.approx(len(line["completion"]) / 10 + line["line"] - 1)}


def test_a_reward_that_fails_ends_the_job_or_is_left_out(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    shaky = {"reward": [{"type": "python", "source": SHAKY}]}
    failed = order(tmp_path / "failed", tiny_dir, rows, stage=shaky)
    assert run(failed) == EXIT_FAILED
    said = events(failed)[-1]
    assert said["code"] == "reward_failed" and "ZeroDivisionError" in said["message"] and "row " in said["message"]
    skipped = go(tmp_path / "skipped", tiny_dir, rows, stage=shaky | {"reward_error": "skip"})
    assert [one["code"] for one in notices(skipped)].count("reward_failed") == 1
    lines = [json.loads(line) for line in (skipped / "artifacts" / "rollouts.jsonl").read_text().splitlines()]
    for at in range(0, len(lines), 4):
        group = lines[at : at + 4]
        if any(line["completion"] > "m" for line in group):
            assert all(line["reward"] == 0 and line["advantage"] == 0 for line in group)


# --- exact -----------------------------------------------------------------------------------------------


def test_of_a_thousand_prompts_none_is_skipped_or_repeated_by_attempts_that_end_anywhere() -> None:
    draw = random.Random(5)
    for iterations, answers in ((1, 8), (3, 12)):
        job = {
            "model": "tiny", "data": {"train": "prompts.jsonl"},
            "stage": STAGE | {"num_iterations": iterations},
            "training": {"per_device_train_batch_size": answers, "gradient_accumulation_steps": 3, "max_length": 64},
        }  # fmt: skip
        spec = resolve(parse_job(job))
        lengths = [5] * 1000
        last = build_order(spec, lengths).steps_of(0) * iterations
        ends = [*sorted(draw.sample(range(last), 50)), last]
        state: dict[str, Any] | None = None
        seen: list[int] = []
        step = 0
        for end in ends:
            order = build_order(spec, lengths)  # as each attempt makes it
            if state is not None:
                order.load_state_dict(json.loads(json.dumps(state)))
            for at in range(step, end):
                if at % iterations == 0:
                    seen += order.rows_of(at // iterations)
            state, step = order.state_dict(), end
        assert sorted(seen) == list(range(1000))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_exact_sampler_has_the_bits_of_training(tiny_dir: Path, rows: Path, tmp_path: Path, precision: str) -> None:
    stage = {"sampler": "exact", "max_completion_length": 12}
    training = {"precision": precision, "max_length": 96}
    alone, often = (
        go(tmp_path / str(slots), tiny_dir, rows, stage=stage | {"slots": slots}, training=training)
        for slots in (5, 12)
    )
    told = figures(alone)
    assert [values["sampler_mismatch_kl"] for values in told.values()] == [0.0] * 3
    assert any(values["grad_norm"] > 0 for values in told.values())
    # Answers do not depend on what is made beside them, so the number of slots changes no bit.
    assert figures(often) == told and weights(often) == weights(alone)
    record = events(alone, "run_record")[0]["record"]
    assert record["packing"]["prompts"]["computed"] == "for each answer"


def test_what_an_adapter_adds_does_not_depend_on_the_rows_beside_it() -> None:
    draw = torch.Generator().manual_seed(3)
    base, inner, b = (torch.randn(shape, generator=draw) for shape in ((70, 64), (70, 4), (64, 4)))

    def added(rows: list[int]) -> torch.Tensor:
        with exact_operators(torch.device("cpu")):
            return base[rows].addmm_(inner[rows], b.t(), alpha=1.7)

    whole = added(list(range(70)))
    assert torch.allclose(whole, base + 1.7 * inner @ b.t(), atol=1e-5)
    for rows in ([0], [33], [69], [5, 40], list(range(32)), list(range(6, 70))):
        assert torch.equal(added(rows), whole[rows])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype, threads: int) -> None:
    """torch's own does on CPUs: at the end of a tensor, or of a thread's share of it, it computes single numbers."""
    draw, before = torch.Generator().manual_seed(3), torch.get_num_threads()
    gelu, functional = partial(torch.nn.functional.gelu, approximate="tanh"), torch.nn.functional
    torch.set_num_threads(threads)
    try:
        for width in (50, 64, 577):
            values = (torch.randn((200, width), generator=draw) * 3).to(dtype)
            for activation in (functional.silu, torch.sigmoid, gelu, lambda some: torch.rsqrt(some.abs() + 1e-6)):
                with exact_operators(values.device):
                    whole = activation(values)
                    assert torch.allclose(whole.double(), activation(values.double()), rtol=1e-2, atol=1e-2)
                    for rows in (slice(0, 1), slice(3, 16), slice(1, 200), slice(7, 40)):
                        assert torch.equal(activation(values[rows]), whole[rows]), (width, activation)
                    assert torch.equal(activation(values[:, :9]), whole[:, :9])
    finally:
        torch.set_num_threads(before)


def test_an_exact_sampler_is_tried_with_adapters_that_change_something(
    tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start at 0, which would hide a product whose rounding depends on its rows."""
    monkeypatch.delitem(PRODUCTS, "addmm_")
    stage, training = {"sampler": "exact"}, {"max_length": 96}
    error = refusal(tmp_path / "refused", tiny_dir, rows, stage=stage, training=training)
    assert error["code"] == "sampler_not_exact" and "differ by up to" in error["message"]


TWICE = {"num_iterations": 2, "beta": 0.1, "loss": "grpo", "epsilon": 1e-3}


def stopped_at(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, call: int, stop: Stop) -> None:
    """Ask the run to stop in a call of a method."""
    before, calls = getattr(target, name), [0]

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            stop.requested = True
        return before(*args, **options)

    monkeypatch.setattr(target, name, counted)


@pytest.fixture(scope="module")
def twice(tiny_dir: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go(tmp_path_factory.mktemp("twice") / "run", tiny_dir, rows, stage=TWICE, training={"max_steps": 4})


@pytest.mark.parametrize(("name", "call"), [("backward", 2), ("backward", 7), ("complete", 1), ("complete", 2)])
def test_a_stopped_run_goes_on_with_the_same_bits(
    twice: Path, tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    """In the first and in the second step over the same answers, and while answers are made."""
    axes: dict[str, Any] = {"stage": TWICE, "training": {"max_steps": 4}}
    stop = Stop()
    first = order(tmp_path / "first", tiny_dir, rows, **axes)
    with monkeypatch.context() as patch:
        stopped_at(patch, Engine, name, call, stop)
        assert run(first, stop) == EXIT_CHECKPOINTED, events(first)[-1]
    second = go(tmp_path / "second", tiny_dir, rows, resume_from=[first], **axes)
    assert events(second, "resumed")
    assert weights(second) == weights(twice)
    found, expected = figures(first, second), figures(twice)
    for step, values in expected.items():
        assert {name: found[step][name] for name in values if found[step][name] != values[name]} == {}, step
    artifacts = [(one / "artifacts" / "rollouts.jsonl").read_bytes() for one in (second, twice)]
    assert artifacts[0] == artifacts[1]


def test_a_second_step_over_the_same_answers_has_ratios_and_a_divergence(twice: Path) -> None:
    told = figures(twice)
    assert told[1]["kl"] == pytest.approx(0, abs=1e-8) and told[2]["kl"] > 0
    assert told[1]["clip_ratio"] == 0 and told[2]["clip_ratio"] > 0
    assert told[1]["reward"] == told[2]["reward"] and told[1]["reward"] != told[3]["reward"]
    tokens = tokens_of(twice)
    for one in tokens:
        assert one["trainer"] == pytest.approx(one["sampler"], abs=1e-4)
    first, later = tokens[0], tokens[-1]
    assert first["reference"] == pytest.approx(first["trainer"], abs=1e-4)
    assert later["reference"] != pytest.approx(later["trainer"], abs=1e-4), "the model has learned since"


def test_half_the_batch_is_the_same_run(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a mismatch of sampler and trainer above the bound, here an impossible one, is told once."""
    smaller = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 12}
    monkeypatch.setattr("core.train.stages.rollout.sampled.MISMATCH", -1.0)
    run_dir = go(tmp_path / "run", tiny_dir, rows, training=smaller)
    found, expected = figures(run_dir), figures(calm)
    assert [notice["code"] for notice in notices(run_dir)].count("sampler_mismatch") == 1
    assert "sampler_mismatch" not in {notice["code"] for notice in notices(calm)}
    for step, values in expected.items():
        for name in ("loss", "reward", "grad_norm"):
            assert found[step][name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), (step, name)


def test_groups_without_variance_are_left_out_with_the_same_gradient(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike = [values["frac_reward_zero_std"] for values in figures(calm).values()]
    assert any(0 < share < 1 for share in alike)
    computed, before = tmp_path / "computed", Engine.forward

    def watched(engine: Engine, batch: Any, *args: Any) -> Any:
        with computed.open("a") as file:
            file.write(f"{batch.examples}\n")
        return before(engine, batch, *args)

    monkeypatch.setattr(Engine, "forward", watched)
    monkeypatch.setattr("core.train.rollout.buffer.Rollout.varied", lambda self: list(range(len(self.answers))))
    found = figures(go(tmp_path / "run", tiny_dir, rows))
    assert sum(map(int, computed.read_text().split())) == 28
    for step, values in figures(calm).items():
        assert found[step]["grad_norm"] == pytest.approx(values["grad_norm"], rel=1e-5)
        assert found[step]["loss"] == pytest.approx(values["loss"], abs=1e-6)


def test_rewards_that_are_all_alike_change_nothing_and_are_told(tiny_dir: Path, rows: Path, tmp_path: Path) -> None:
    stage = {"reward": [{"type": "regex", "pattern": "(?s).*"}]}
    run_dir = go(tmp_path / "run", tiny_dir, rows, stage=stage, training={"max_steps": 2})
    told = {notice["code"]: notice["message"] for notice in notices(run_dir)}
    assert "all answers have the same reward" in told["rewards_alike"]
    assert {values["grad_norm"] for values in figures(run_dir).values()} == {0.0}
    assert {values["frac_reward_zero_std"] for values in figures(run_dir).values()} == {1.0}
    assert {values["loss"] for values in figures(run_dir).values()} == {0.0}


def test_out_of_memory_in_a_rollout_makes_fewer_answers_at_a_time(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Engine.complete

    def full(engine: Engine, *args: Any, slots: int, **options: Any) -> Any:
        if slots > 1:
            raise torch.OutOfMemoryError("no memory for keys and values")
        return before(engine, *args, slots=slots, **options)

    monkeypatch.setattr(Engine, "complete", full)
    run_dir = go(tmp_path / "run", tiny_dir, rows)
    assert [notice["code"] for notice in notices(run_dir)].count("fewer_slots") == 1
    ours, theirs = ((one / "artifacts" / "rollouts.jsonl").read_text() for one in (run_dir, calm))
    assert [json.loads(line)["completion"] for line in ours.splitlines()[:12]] == [
        json.loads(line)["completion"] for line in theirs.splitlines()[:12]
    ]


# --- bad input -------------------------------------------------------------------------------------------


def refusal(folder: Path, tiny_dir: Path, rows: Path, **axes: Any) -> dict[str, Any]:
    run_dir = order(folder, tiny_dir, rows, **axes)
    assert run(run_dir) == EXIT_FAILED
    error = events(run_dir)[-1]
    assert (error["type"], error["failure"]) == ("error", "user"), error
    return error


def test_a_reward_without_its_column_is_told_with_the_row(tiny_dir: Path, tmp_path: Path) -> None:
    some = write_rows(tmp_path / "rows.jsonl", [{"prompt": "one", "reference": "1"}, {"prompt": "two", "answer": "2"}])
    number = {"reward": [{"type": "number"}]}
    error = refusal(tmp_path / "a", tiny_dir, some, stage=number)
    assert error["code"] == "no_reward_column" and "`reference`, which row 2 do" in error["message"]
    odd = write_rows(tmp_path / "odd.jsonl", [{"prompt": "one", "reference": "many"}])
    assert "no number in row 1" in refusal(tmp_path / "b", tiny_dir, odd, stage=number)["message"]


def test_a_prompt_without_room_is_told_with_the_row(tiny_dir: Path, tmp_path: Path) -> None:
    some = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "x" * 70, "reference": "1"}, {"prompt": "two", "reference": ""}]
    )
    error = refusal(tmp_path / "a", tiny_dir, some)
    assert "1 prompts are longer than the 56 tokens" in error["message"] and "row 1 has" in error["message"]
    told = figures(go(tmp_path / "b", tiny_dir, some, training={"truncation": "cut_left", "max_steps": 1}))
    assert told[1]["reward"] > 0


# --- held-out prompts ------------------------------------------------------------------------------------


def test_rewards_of_held_out_prompts_choose_the_best_weights(
    calm: Path, tiny_dir: Path, rows: Path, tmp_path: Path
) -> None:
    asked = [{"prompt": f"held out, number {n}", "reference": "a"} for n in range(5)]
    held = write_rows(tmp_path / "held.jsonl", asked)
    data = {
        "train": {"type": "path", "path": str(rows), "format": "prompt"},
        "eval": {"type": "path", "path": str(held), "format": "prompt"},
    }
    evaluation = {"eval_steps": 1, "load_best_model_at_end": True, "samples": {"type": "greedy", "rows": 2}}
    stage = {"eval_temperature": 1.5, "num_generations_eval": 3}
    run_dir = go(tmp_path / "run", tiny_dir, rows, data=data, evaluation=evaluation, stage=stage)
    found = {event["step"]: event["values"] for event in events(run_dir, "evaluation")}
    assert sorted(found) == [0, 1, 2, 3]
    for values in found.values():
        parts = [values["eval_rewards/early/mean"], values["eval_rewards/length/mean"]]
        assert values["eval_reward"] == pytest.approx(sum(parts)) and 0 <= values["eval_completions/truncated"] <= 1
        assert round(15 * parts[0], 6).is_integer(), "three answers to each of five prompts"
    result = events(run_dir, "result")[0]["result"]
    best = max(found, key=lambda step: (found[step]["eval_reward"], -step))
    assert result["best"] == {
        "step": best, "metric": "eval_reward", "value": found[best]["eval_reward"], "restored": True,
    }  # fmt: skip
    assert result["eval_after"] == found[best] and result["eval_before"] == found[0]
    for event in events(run_dir, "samples"):
        assert [sample["row"] for sample in event["samples"]] == [0, 2]
        assert {sample["reference"] for sample in event["samples"]} == {"a"}
    undisturbed = figures(calm)
    for step, values in figures(run_dir).items():
        assert values == undisturbed[step], "an evaluation changes nothing of the training"


def test_ppo_learns_values_and_hands_back_the_model_without_them(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    """However a step is cut; the value head is in each checkpoint."""
    stage = {"type": "ppo", "num_generations": 1, "num_iterations": 2, "beta": 0.05}
    one = go(tmp_path / "one", tiny_dir, rows, stage=stage, training={"max_steps": 4})
    whole = {"max_steps": 4, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    other = go(tmp_path / "other", tiny_dir, rows, stage=stage, training=whole)
    told, again = figures(one), figures(other)
    for step in told:
        for name in ("loss", "policy_loss", "value_loss", "explained_variance", "kl"):
            assert told[step][name] == pytest.approx(again[step][name], abs=2e-5), (step, name)
        assert told[step]["clip_ratio"] >= 0 and told[step]["value_loss"] > 0
    assert told[1]["explained_variance"] == 0.0 != told[3]["explained_variance"]
    assert told[1]["approx_kl"] == pytest.approx(0.0, abs=1e-9) and told[2]["approx_kl"] > 0
    saved = load_file(max(one.rglob("weights.safetensors")))
    assert saved["base_model.model.value_head.weight"].abs().max() > 0
    (adapter,) = one.rglob("adapter_model.safetensors")
    handed_back = load_file(adapter)
    assert handed_back and not [name for name in handed_back if "value_head" in name]
