"""The reward `http`: what is sent, what is kept, what is tried again, and what is told where nothing comes of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from core.errors import SpecError
from core.spec.axes.rollout.reward import RewardArm
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE, SCORES
from core.spec.run.orders import RunOrder
from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines
from core.train.base.stop import StopRequested
from core.train.rollout.graders import Graders, NoTokens
from core.train.rollout.sandboxed.programs import AnsweredPrompt
from core.train.run import Run
from tests.support.grader import Grader, grader, score
from tests.support.trainer import write_rows, write_run

ANSWERS = ["abc", "xyz", "az", "m", ""]
ASKED = [AnsweredPrompt(line, f"row {line}", {"reference": "é", "level": line}) for line in range(5)]


def reward(url: str, **fields: Any) -> Any:
    return TypeAdapter(RewardArm).validate_python({"type": "http", "url": url} | fields)


def make_run(folder: Path, *earlier: Path, **fields: Any) -> Run:
    rows = write_rows(folder.parent / "rows.jsonl", [{"prompt": "a"}])
    made = write_run(folder, folder.parent, rows, resume_from=list(earlier))
    written = RunOrder.model_validate_json((made / ORDER_FILE).read_bytes())
    order = written.model_copy(update={"reward_allow": ["127.0.0.0/8"]} | fields)
    return Run(order, made, EventWriter(made / EVENTS_FILE, LogLines(sys.stdout)))


@contextmanager
def answering(*replies: Any) -> Iterator[Grader]:
    """A grader that makes these replies in turn, then scores."""
    left = list(replies)

    def answer(asked: dict[str, Any]) -> Any:
        reply = left.pop(0) if left else score
        return reply(asked) if callable(reply) else reply

    server = Grader(answer)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def test_batches_are_sent_once_and_a_later_attempt_reads_what_was_answered(tmp_path: Path) -> None:
    with answering() as server:
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps({server.url.partition("/score")[0]: "s3cret", "https://other.example": "no"}))
        one = reward(server.url, batch_size=2, parallel=1)
        first = make_run(tmp_path / "first", reward_tokens=str(tokens))
        values = Graders(first, [one]).values_of(one, ANSWERS, ASKED)
        assert values == [1.0, 0.0, 0.5, 1.0, 0.0]
        assert [len(body["completions"]) for _, body in server.asked] == [2, 2, 1]
        headers, body = server.asked[0]
        assert body == {
            "prompts": ["row 0", "row 1"],
            "completions": ["abc", "xyz"],
            "rows": [{"reference": "é", "level": 0}, {"reference": "é", "level": 1}],
        }
        assert headers["authorization"] == "Bearer s3cret" and headers["idempotency-key"].startswith("job-test-")
        (tmp_path / "first" / SCORES / f"{'0' * 64}.new").write_text("torn")  # of a process that was killed
        second = Graders(make_run(tmp_path / "second", tmp_path / "first"), [one])
        assert second.values_of(one, ANSWERS, ASKED) == values and len(server.asked) == 3
        assert second.values_of(one, ["abz"], ASKED[:1]) == [2 / 3] and len(server.asked) == 4


def test_a_request_is_tried_again_with_its_key(tmp_path: Path) -> None:
    now = {"retry-after": "0"}
    with answering((503, now, b""), (429, now, b""), (200, now, b'{"rewards": [1')) as server:
        one = reward(server.url)
        assert Graders(make_run(tmp_path / "run"), [one]).values_of(one, ["a"], ASKED[:1]) == [1.0]
        assert list(server.keys.values()) == [4]


def slow(asked: dict[str, Any]) -> Any:
    time.sleep(2)
    return score(asked)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((404, {}, b""), "the endpoint answered 404"),
        ((302, {"location": "http://127.0.0.1:1/"}, b""), "redirects are not followed"),
        ((500, {}, b""), "the endpoint answered 500"),
        ((200, {}, b"oops"), "the endpoint answered no JSON"),
        ((200, {}, b"[1]"), "answered no such list; answer"),
        ((200, {}, b'{"rewards": [1, 2]}'), 'a list of 2; answer {"rewards": [1 numbers]}'),
        ((200, {}, b'{"rewards": [null]}'), "NoneType"),
        ((200, {}, b'{"rewards": [NaN]}'), "finite"),
        ((200, {}, b'{"rewards": ["1"]}'), "a str"),
        ((200, {}, b'{"rewards": [1], "why": "' + b"x" * 100_000 + b'"}'), "more than is read of it"),
        (slow, "no answer within 0.5 s"),
    ],
)
def test_what_is_no_reward_is_told(tmp_path: Path, reply: Any, said: str) -> None:
    with answering(reply) as server:
        one = reward(server.url, retries=0, seconds=0.5)
        (value,) = Graders(make_run(tmp_path / "run"), [one]).values_of(one, ["a"], ASKED[:1])
        assert isinstance(value, str) and said in value and len(server.asked) == 1


def test_a_stop_does_not_wait_for_an_answer(tmp_path: Path) -> None:
    with answering(slow) as server:
        run, one = make_run(tmp_path / "run"), reward(server.url)
        run.stop.requested = True
        with pytest.raises(StopRequested):
            Graders(run, [one]).values_of(one, ["a"], ASKED[:1])


def test_private_addresses_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reward_allow=[])
    for url in (grader().url, "http://169.254.169.254/x", "http://[::1]/", "http://10.0.0.7:8080/"):
        with pytest.raises(SpecError, match=r"not a public address; .*EFT_REWARD_ALLOW") as refused:
            Graders(run, [reward(url)])
        assert (refused.value.field, refused.value.code) == ("stage.reward", "reward_address_not_allowed")


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "cannot be read"), ("{", "cannot be read"), ("[]", "not a JSON object"), ('{"x": "y"}', "not an origin")],
)
def test_a_file_of_tokens_that_cannot_be_read_is_told(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NoTokens, match=said):
        Graders(make_run(tmp_path / "run", reward_tokens=str(path)), [reward(grader().url)])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://a.example/", "must begin with `http://` or `https://`"),
        ("https://user:word@a.example/", "leave user and password out"),
        ("https://a.example/#x", "leave the part behind `#` out"),
        ("https:///x", "names no host"),
        ("https://a.example:99999/", "not a URL"),
    ],
)
def test_wrong_urls_are_refused_at_submit(url: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        reward(url)
