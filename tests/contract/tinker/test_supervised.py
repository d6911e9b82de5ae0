"""The unmodified SDK of Tinker against a whole service, with a real small model."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import tinker_sdk
from tests.support.service import Service, running, wait_for

LOOP = Path(__file__).with_name("supervised.py")
STRUCK = {"child": 1, "api": 3}
"""What is killed, and at which step."""
SAME = ("losses", "norms", "logprobs", "sampled", "again", "rescored", "of_prompt", "in_place", "rank")
"""What does not differ between runs, nor between versions of the SDK."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    environment = {
        "EFT_MODEL_ROOTS": str(models),
        "EFT_RETRY_BACKOFF_SECONDS": "0.05",
        "EFT_TINKER_PRECISION": "fp32",  # in bf16, which newer CPUs have, sampler and trainer agree to about 1e-3
    }
    yield from running(tmp_path_factory.mktemp("tinker"), environment, settle=0)


def started(service: Service, models: Path, what: str, version: str | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(tinker_sdk.python(version)), str(LOOP), str(models / "tiny"), what],
        env=tinker_sdk.environment(service) | ({"PYTHONPATH": str(torch_alone(service))} if what == "whole" else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(service.folder / f"{what}.log").open("w"),
        text=True,
    )


def torch_alone(service: Service) -> Path:
    """A folder with torch, for losses of the caller's; the SDK's environment has the rest."""
    folder = service.folder / "torch"
    folder.mkdir(exist_ok=True)
    for name in ("torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            (folder / name).symlink_to(Path(found.origin).parent)
    return folder


def ended(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    told, _ = process.communicate(timeout=400)
    assert process.returncode == 0, log.read_text()[-4000:]
    return json.loads(told.splitlines()[-1])


@pytest.fixture(scope="module")
def told(service: Service, models: Path) -> dict[str, Any]:
    """What a loop came to that nothing disturbed."""
    return ended(started(service, models, "whole"), service.folder / "whole.log")


def test_a_supervised_loop_runs_to_its_end(told: dict[str, Any]) -> None:
    """Loss falls; a resumed model goes on to the bit."""
    losses = told["losses"]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert all(norm > 0 for norm in told["norms"])
    assert told["saved"].startswith("tinker://") and told["saved"].endswith("/weights/first")
    assert told["info"]["lora_rank"] == 4
    assert [len(row) for row in told["logprobs"]] == [5, 3, 19]
    assert told["resumed"] == told["logprobs"]
    assert told["next"][0] == told["next"][1] == told["in_place"][0] == told["in_place"][1]
    assert told["rank"] == 4
    assert all(math.isfinite(loss) for loss in told["rewarded"].values())
    assert told["rewarded"]["importance_sampling"] == pytest.approx(told["rewarded"]["ppo"])
    assert "99999" in told["refused"] or "target" in told["refused"]


def test_the_sampler_has_the_log_probabilities_of_training(told: dict[str, Any]) -> None:
    """Of prompts and of what it draws: KL of the two, as Tinker's cookbook estimates it, is 1e-6 at most."""
    assert told["again"] == told["sampled"] and told["sampled"][0] != told["sampled"][1]
    assert [len(tokens) for tokens, _, _ in told["sampled"]] == [5, 5]
    gaps = [
        drawn - scored
        for (_, sampled, _), rescored in zip(told["sampled"], told["rescored"], strict=True)
        for drawn, scored in zip(sampled, rescored, strict=True)
    ]
    assert abs(sum(gaps) / len(gaps)) <= 1e-6 and max(map(abs, gaps)) <= 3e-6
    for sampler, training in (("of_prompt", told["logprobs"][0]), ("from_path", told["then"])):
        assert told[sampler][0] is None
        assert told[sampler][1:] == pytest.approx(training, abs=3e-6, rel=0)


def test_the_likeliest_tokens_of_a_prompt(told: dict[str, Any]) -> None:
    """At the last places alone, as they were asked for; more than there may be are refused."""
    own, places, too_many = told["likeliest"]
    assert own[:2] == [None, None] and own[2:] == pytest.approx(told["from_path"][2:], abs=3e-6, rel=0)
    assert places[:2] == [None, None] and [len(place) for place in places[2:]] == [3] * 4
    for logprob, place in zip(own[2:], places[2:], strict=True):
        values = [value for _, value in place]
        assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1
        assert logprob <= values[0] + 1e-6
    assert "topk_prompt_logprobs" in too_many and "100" in too_many


def test_a_loss_of_the_callers_in_torch(told: dict[str, Any]) -> None:
    custom = told["custom"]
    assert custom["metrics"]["loss:sum"] == pytest.approx(custom["expected"], rel=1e-6)
    assert custom["norms"][0] == pytest.approx(custom["norms"][1], rel=1e-6) and custom["norms"][0] > 1


def test_several_targets_of_a_token(told: dict[str, Any]) -> None:
    """As distillation from the most likely tokens sends them, dense or sparse."""
    several = told["several"]
    assert several["was_sparse"] and several["shape"] == [19, 3]
    assert several["losses"][0] == pytest.approx(several["losses"][1], rel=1e-5)
    assert several["second"] == pytest.approx(several["alone"], abs=1e-5)


def test_a_base_alone_is_sampled_by_its_name(told: dict[str, Any], models: Path) -> None:
    assert told["offered"] == [path.name for path in sorted(models.iterdir()) if (path / "config.json").is_file()]
    assert told["named"] == "tiny" and told["of_base"][0] is None
    assert len(told["of_base"]) == 6 and told["of_base"] != told["of_prompt"]


def test_what_was_saved_is_listed_and_goes(told: dict[str, Any]) -> None:
    kept, run = told["kept"], told["saved"].split("/")[2]
    assert (
        kept["run"]["training_run_id"] == run and run in kept["runs"] and kept["session"][0] in (run, kept["runs"][0])
    )
    assert kept["run"]["user_metadata"] == {"renderer": "plain"} and kept["run"]["lora_rank"] == 4
    assert kept["run"]["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/sampler"
    assert kept["names"] == ["weights/away", "weights/rolling", "sampler_weights/sampler", "weights/first"]
    left = {one["checkpoint_id"]: one for one in kept["checkpoints"]}
    assert [*left] == kept["names"][1:]
    assert left["weights/rolling"]["user_metadata"] == {"batch": "3"} and left["weights/rolling"]["expires_at"]
    assert all(one["size_bytes"] > 10_000 for one in left.values())
    assert "first" in kept["taken"] and kept["gone"] == "NotFoundError"


def test_clients_of_one_sampler_and_what_a_single_box_refuses(told: dict[str, Any]) -> None:
    shared = told["shared"]
    assert len(shared["answers"]) == 16 and all(answer == shared["answers"][0] for answer in shared["answers"])
    path, rank, scored = shared["copied"]
    assert path != told["saved"] and rank == 4 and scored == told["of_prompt"]
    assert shared["public"] is True and "key" in shared["refused"]["move"]


def test_weights_are_fetched_and_answers_told_with_their_likeliest_tokens(told: dict[str, Any]) -> None:
    fetched = told["fetched"]
    assert fetched["path"].endswith("/external_weights/away")
    assert fetched["sizes"]["adapter_model.safetensors"] > 10_000
    assert sorted(fetched["sizes"]) == ["adapter_config.json", "adapter_model.safetensors"]
    tokens, logprobs = fetched["drawn"]
    for token, logprob, place in zip(tokens, logprobs, fetched["top"], strict=True):
        assert [value for _, value in place] == sorted((value for _, value in place), reverse=True)
        assert len(place) == 2 and (logprob <= place[0][1]) and dict(place).get(token, logprob) == logprob
    assert fetched["named"][0] == [0.0, 0.0]
    assert [row[1] for row in fetched["named"][1:]] == pytest.approx(fetched["own"][2:], abs=3e-6, rel=0)


def test_kills_in_the_middle_change_no_bit(service: Service, models: Path, told: dict[str, Any]) -> None:
    """kill -9 of the session's child and of the API, while steps are on their way."""
    process = started(service, models, "recipe")
    assert process.stdin is not None and process.stdout is not None
    for step in range(len(told["losses"])):
        assert process.stdout.readline() == f"sent {step}\n", (service.folder / "recipe.log").read_text()[-4000:]
        if step == STRUCK["child"]:
            (child,) = wait_for(lambda: children(service), 60, "the child of the session")
            os.kill(child, signal.SIGKILL)
        elif step == STRUCK["api"]:
            os.kill(service.pid("api"), signal.SIGKILL)
        process.stdin.write("on\n")
        process.stdin.flush()
    struck = ended(process, service.folder / "recipe.log")
    assert {name: struck[name] for name in SAME} == {name: told[name] for name in SAME}


def test_the_oldest_sdk_sees_the_same_numbers(service: Service, models: Path, told: dict[str, Any]) -> None:
    """It sends and reads JSON. `python -m bench.tinker_versions` tries those between."""
    oldest = next(iter(tinker_sdk.older()))
    old = ended(started(service, models, "steps", oldest), service.folder / "steps.log")
    assert {name: old[name] for name in SAME} == {name: told[name] for name in SAME}


def children(service: Service) -> list[int]:
    return [pid for pid, command in service.processes().items() if "-m core.train.session" in command]
