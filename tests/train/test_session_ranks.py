"""A session over two ranks: what one does, within sums of float32 in another order, and the same bits after a kill."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from core.spec.run.exit_codes import EXIT_CHECKPOINTED
from core.spec.run.frames import receive
from core.train.generation.sampling import SamplingParams
from core.train.session import serve
from core.train.session.ranks.crew import part_of, shares
from core.train.session.sampling import Draw
from tests.support import session
from tests.support.session import Arrays, SessionClient, SessionRanks, examples

ROWS = [[5, 6, 7, 8, 9, 10], [40, 41, 42], list(range(60, 80)), [1, 2], [90, 91, 92, 93]]
LORA = {"type": "lora", "r": 4, "lora_alpha": 8.0}
WEIGHTS, FIGURES = 5e-5, 2e-6
"""How far two ranks may be from one, of the largest value (docs/sessions.md); as for jobs."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("weights", [[1], [5, 1, 1], [1, 1, 1, 100], [7] * 9, list(range(1, 40))], ids=len)
def test_every_place_is_one_ranks_and_they_have_about_as_much(weights: list[int], ranks: int) -> None:
    found = shares(weights, ranks)
    assert [place for mine in found for place in mine] == list(range(len(weights))) and len(found) == ranks
    for mine in found:
        assert sum(weights[place] for place in mine) <= sum(weights) / ranks + max(weights)


def test_answers_of_operations_are_divided_in_their_order() -> None:
    def draw(prompts: list[list[int]], counts: list[int]) -> Draw:
        keys = [[(0, at, one) for one in range(count)] for at, count in enumerate(counts)]
        return Draw(prompts, keys, SamplingParams(3), None)

    whole = [draw([[1], [2, 3]], [3, 1]), draw([[4]], [2])]
    first, second = part_of(whole, range(4)), part_of(whole, range(4, 6))
    assert first == whole[:1] and second == whole[1:]
    split = part_of(whole, range(2, 5))
    assert split[0] == replace(whole[0], prompts=[[1], [2, 3]], keys=[[(0, 0, 2)], [(0, 1, 0)]])
    assert split[1] == replace(whole[1], keys=[[(0, 0, 0)]])
    assert part_of(whole, range(6, 6)) == []


Log = list[tuple[str, Any, dict[str, Any]]]
NUMBERS = {"advantages": [0.5 - 0.25 * (at % 5) for at in range(35)], "logprobs": [-5.0 - at % 3 for at in range(35)]}
CUSTOM = {"gradients": [0.1 * (at % 4) - 0.2 for at in range(35)]}


def log_of(turns: int) -> Log:
    """A recipe with a window of several operations, and one example alone among them."""
    log: Log = [("create", None, {"model": "m", "method": LORA, "seed": 5})]
    for turn in range(turns):
        log += [
            ("forward_backward", examples(*ROWS), {"model": "m"}),
            ("forward_backward", examples(ROWS[turn]), {"model": "m"}),
            ("forward_backward", examples(*ROWS, **NUMBERS), {"model": "m", "loss": "ppo"}),
            ("forward_backward", examples(*ROWS, **CUSTOM), {"model": "m", "loss": "custom"}),
            ("step", None, {"model": "m", "learning_rate": 0.01, "max_grad_norm": 0.5}),
            ("forward", examples(*ROWS[:4], logprobs=NUMBERS["logprobs"][:31]), {"model": "m", "loss": "dpo"}),
            ("generate", examples(*ROWS[:3]), {"model": "m", "max_tokens": 4, "num_samples": 3, "sample_top": 2,
                                               "prompt_logprobs": True, "prompt_top": 2, "seed": turn}),
            ("logprobs", examples(*ROWS), {"model": "m"}),
        ]  # fmt: skip
    return log


SAVE: Log = [("save", None, {"model": "m", "name": "end"})]
DROPOUT: Log = [
    ("create", None, {"model": "d", "method": LORA | {"lora_dropout": 0.2}, "seed": 6}),
    ("forward_backward", examples(*ROWS), {"model": "d"}),
    ("forward_backward", examples(*ROWS[1:]), {"model": "d"}),
    ("step", None, {"model": "d", "learning_rate": 0.01}),
    ("logprobs", examples(*ROWS), {"model": "d"}),
]


def told(child: SessionClient, log: Log, until: int | None = None) -> list[tuple[dict[str, Any], Arrays]]:
    found = [child.ask(op, arrays, **fields) for op, arrays, fields in log[child.position : until]]
    for result, _ in found:
        result.pop("folder", None)
    return found


def bits(found: list[tuple[dict[str, Any], Arrays]]) -> list[tuple[dict[str, Any], dict[str, bytes]]]:
    return [(result, {name: each.tobytes() for name, each in arrays.items()}) for result, arrays in found]


def assert_close(found: Any, expected: Any, within: float) -> None:
    """Within a part of the largest value."""
    most = max(1e-30, float(np.abs(expected).max(initial=0.0)))
    assert np.shape(found) == np.shape(expected)
    assert float(np.abs(np.asarray(found) - expected).max(initial=0.0)) <= within * most


@pytest.fixture(scope="module")
def calm(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[dict[str, Any], Arrays]], Path]:
    """What two ranks that nothing disturbs tell, and the folder of their session."""
    folder = tmp_path_factory.mktemp("calm")
    with SessionRanks(folder / "run", session.order(tiny_dir, folder / "session"), 2) as gang:
        return told(gang, [*log_of(2), *SAVE, *DROPOUT]), folder / "session"


def test_two_ranks_compute_what_one_does(
    calm: tuple[list[tuple[dict[str, Any], Arrays]], Path], tiny_dir: Path, tmp_path: Path
) -> None:
    log = [*log_of(2), *SAVE]
    with SessionRanks(tmp_path / "run", session.order(tiny_dir, tmp_path / "session"), 1) as child:
        expected = told(child, log)
    for (op, _, _), (result, arrays), (one, there) in zip(log, calm[0], expected, strict=False):
        assert result.keys() == one.keys() and arrays.keys() == there.keys()
        for name in one.keys() - {"loss", "grad_norm", "micro_steps"}:
            assert result[name] == one[name], (op, name)
        for name in one.keys() & {"loss", "grad_norm"}:
            assert result[name] == pytest.approx(one[name], rel=FIGURES)
        for name, values in there.items():
            assert_close(arrays[name], values, FIGURES)
    state = load_file(tmp_path / "session" / "saved" / "end" / "state.safetensors")
    for name, values in load_file(calm[1] / "saved" / "end" / "state.safetensors").items():
        assert_close(values, state[name], WEIGHTS)


def test_a_kill_of_a_rank_and_a_pause_and_faults_change_no_bit(
    calm: tuple[list[tuple[dict[str, Any], Arrays]], Path], tiny_dir: Path, tmp_path: Path
) -> None:
    """kill -9 within a window, behind a snapshot; a pause within another; examples that one rank alone cannot compute,
    in a window too. Dropout takes part."""
    log = [*log_of(2), *SAVE, *DROPOUT]
    given = session.order(tiny_dir, tmp_path / "session")
    with SessionRanks(tmp_path / "run-1", given, 2) as gang:
        found = told(gang, log, 3)
        for bad in (3e38, -3e38):
            for at in (0, 1):
                weights = [1.0] * 3 + [1.0] * 3
                weights[3 * at] = weights[3 * at + 1] = bad
                gang.position -= 1  # it is no operation of the log
                header, _ = gang.answer("forward_backward", examples([1, 2, 3], [4, 5, 6], weights=weights), model="m")
                assert header["error"]["code"] == "diverged", header
        gang.snapshot()
        told(gang, log, 5)
        gang.send(log[5][0], log[5][1], **log[5][2])
        gang.ranks[1].send_signal(signal.SIGKILL)
    with SessionRanks(tmp_path / "run-2", given, 2) as gang:
        assert gang.position == 3
        found += told(gang, log, 11)
        assert gang.park() == [EXIT_CHECKPOINTED] * 2
    with SessionRanks(tmp_path / "run-3", given, 2) as gang:
        assert gang.position == 11
        found += told(gang, log)
    assert bits(found) == bits(calm[0])
    one, other = (folder / "saved" / "end" / "state.safetensors" for folder in (tmp_path / "session", calm[1]))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    "spec", [{"method": {"type": "full"}}, {"quantization": "nf4", "exact": True}], ids=["full", "nf4, exact"]
)
def test_a_whole_model_and_packed_weights_over_two_ranks(tiny_dir: Path, tmp_path: Path, spec: dict[str, Any]) -> None:
    log = [(op, arrays, dict(fields)) for op, arrays, fields in log_of(1)]
    log[0][2]["method"] = spec.get("method", LORA)
    found = []
    for count in (1, 2):
        given = session.order(tiny_dir, tmp_path / f"session-{count}", **spec)
        with SessionRanks(tmp_path / f"run-{count}", given, count) as child:
            child.exact = spec.get("exact", False)
            found.append(told(child, [*log, *SAVE]))
    for (op, _, _), (_, arrays), (_, there) in zip(log, *found, strict=False):
        for name, values in there.items():
            assert_close(arrays[name], values, 10 * FIGURES if op == "generate" else FIGURES)
    if "exact" in spec:  # before the step, since each example goes alone
        assert bits([(found[0][1])])[0][1] == bits([(found[1][1])])[0][1]
    one, two = (load_file(tmp_path / f"session-{count}" / "saved" / "end" / "state.safetensors") for count in (1, 2))
    for name, values in two.items():
        assert_close(values, one[name], WEIGHTS)


@pytest.mark.parametrize("recorded", [True, False])
def test_an_answer_that_nobody_has_written_down_is_in_no_snapshot(
    recorded: bool, tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may die between a child's last answer and its record. The next one computes the operation again."""
    monkeypatch.setattr(serve, "RECORD_SECONDS", 0.2)
    given = session.order(tiny_dir, tmp_path / "session")
    with SessionRanks(tmp_path / "run-1", given, 1) as child:
        child.ask("create", model="m", method=LORA, seed=5)
        child.snapshot()
        child.send("forward_backward", examples(*ROWS), model="m")
        first = receive(child.stream)
        if recorded:
            child.record()
        assert child.park() == [EXIT_CHECKPOINTED]
    with SessionRanks(tmp_path / "run-2", given, 1) as child:
        assert child.position == (2 if recorded else 1)
        if not recorded:
            child.send("forward_backward", examples(*ROWS), model="m")
            assert receive(child.stream) == first
