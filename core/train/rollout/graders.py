"""The reward `http`: endpoints of the user's that score answers in batches. What one has answered is kept in the run
folder before it is used, and later attempts read it, so that nothing is asked twice because a trainer was killed."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from core.base.addresses import REWARDS, NotAllowed, parse, resolve
from core.base.files import sync
from core.base.post import HttpReply, post
from core.errors import EftError, SpecError
from core.spec.axes.rollout.reward import HttpReward, RewardArm
from core.spec.run.folder import SCORES
from core.train.rollout.sandboxed.programs import AnsweredPrompt, Value, number_of
from core.train.run import Run

MOST_BYTES, BYTES_EACH = 64 << 10, 256
"""Bytes of a response at most: these, and as many for each answer."""
WAITS = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each retry; the last is that of all further ones."""
LONGEST_WAIT = 300.0
"""Seconds that an endpoint may ask for with Retry-After."""
LOOK_SECONDS = 0.2
AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class NoTokens(EftError):
    """The file of EFT_REWARD_TOKENS cannot be read."""

    code = "reward_tokens_unreadable"
    status = 422


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Answers that are asked about together."""

    places: range
    body: bytes
    key: str
    """SHA-256 of the URL and the body."""


class Graders:
    """Asks the endpoints of a run's rewards."""

    def __init__(self, run: Run, rewards: Sequence[RewardArm]) -> None:
        """SpecError where one of them must not be asked; NoTokens."""
        self.run = run
        endpoints = [reward for reward in rewards if isinstance(reward, HttpReward)]
        self._tokens = tokens_of(run.order.reward_tokens) if endpoints else {}
        for reward in endpoints:
            self._refuse_forbidden(reward)
        self._folders = [folder / SCORES for folder in (run.folder, *map(Path, run.order.resume_from))]

    def _refuse_forbidden(self, reward: HttpReward) -> None:
        try:
            resolve(parse(reward.url), self.run.order.reward_allow, setting=REWARDS)
        except NotAllowed as error:
            raise SpecError(str(error), field="stage.reward", code="reward_address_not_allowed") from error
        except OSError as error:  # it may be there when it is asked
            self.run.notice("reward_not_reached", f"the host of {parse(reward.url).origin} is not found now: {error}")

    def values_of(self, reward: HttpReward, answers: Sequence[str], asked: Sequence[AnsweredPrompt]) -> list[Value]:
        """Each answer's reward. StopRequested."""
        found: list[Value] = ["it was not asked"] * len(answers)
        waiting: deque[ScoreBatch] = deque()
        for batch in batches_of(reward, answers, asked):
            kept = self._kept(batch)
            if kept is None:
                waiting.append(batch)
            else:
                found[batch.places.start : batch.places.stop] = kept
        for batch, values in self._asked(reward, waiting):
            found[batch.places.start : batch.places.stop] = values
        return found

    def _asked(self, reward: HttpReward, waiting: deque[ScoreBatch]) -> list[tuple[ScoreBatch, list[Value]]]:
        """Ask about batches, some at the same time."""
        told: queue.SimpleQueue[tuple[ScoreBatch, HttpReply]] = queue.SimpleQueue()
        leave = threading.Event()
        count, done = len(waiting), list[tuple[ScoreBatch, list[Value]]]()

        def work() -> None:
            while not leave.is_set():
                try:
                    batch = waiting.popleft()
                except IndexError:
                    return
                told.put((batch, self._reply(reward, batch, leave)))

        for _ in range(min(reward.parallel, count)):
            threading.Thread(target=work, name="grader", daemon=True).start()
        try:
            while len(done) < count:
                self.run.check_stop()
                try:
                    batch, reply = told.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    continue
                done.append((batch, self._read(batch, reply)))
        finally:
            leave.set()
        return done

    def _reply(self, reward: HttpReward, batch: ScoreBatch, leave: threading.Event) -> HttpReply:
        """The last answer to a batch, after retries."""
        headers = {
            "content-type": "application/json",
            "user-agent": "eft",
            "idempotency-key": f"{self.run.order.job_id}-{batch.key[:32]}",
        }
        if (token := self._tokens.get(parse(reward.url).origin)) is not None:
            headers["authorization"] = f"Bearer {token}"
        tried = 0
        while True:
            reply = post(
                reward.url,
                headers,
                batch.body,
                allow=self.run.order.reward_allow,
                seconds=reward.seconds,
                setting=REWARDS,
                most_bytes=MOST_BYTES + BYTES_EACH * len(batch.places),
            )
            again = reply.status is None or reply.status in AGAIN or (reply.taken and _torn(reply.body))
            if not again or tried == reward.retries:
                return reply
            wait = reply.retry_after if reply.retry_after is not None else WAITS[min(tried, len(WAITS) - 1)]
            tried += 1
            if leave.wait(min(wait, LONGEST_WAIT)):
                return reply

    def _read(self, batch: ScoreBatch, reply: HttpReply) -> list[Value]:
        """Rewards from an answer, which is kept before they are used."""
        count = len(batch.places)
        if not reply.taken:
            return [f"the endpoint {reply.error}" if reply.status else str(reply.error)] * count
        if _torn(reply.body):
            return ["the endpoint answered no JSON, or more than is read of it"] * count
        told = json.loads(reply.body)
        values = told.get("rewards") if isinstance(told, dict) else None
        if not isinstance(values, list) or len(values) != count:
            what = f"a list of {len(values)}" if isinstance(values, list) else "no such list"
            return [f'the endpoint answered {what}; answer {{"rewards": [{count} numbers]}}'] * count
        folder = self._folders[0]
        folder.mkdir(exist_ok=True)
        path = folder / f"{batch.key}.json"
        aside = path.with_suffix(f".{self.run.ranks.rank}.new")  # two ranks may have been given the same answer
        aside.write_text(json.dumps(values))
        sync(aside)
        aside.rename(path)
        sync(folder)
        return [number_of(one) for one in values]

    def _kept(self, batch: ScoreBatch) -> list[Value] | None:
        """What an endpoint has answered before, in this attempt or an earlier one."""
        for folder in self._folders:
            path = folder / f"{batch.key}.json"
            if path.exists():
                return [number_of(one) for one in json.loads(path.read_text())]
        return None


def _torn(body: bytes) -> bool:
    """Whether a response is no JSON, which one is that broke off."""
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return True
    return False


def batches_of(reward: HttpReward, answers: Sequence[str], asked: Sequence[AnsweredPrompt]) -> list[ScoreBatch]:
    """Answers in the batches in which an endpoint is asked, the same for the same answers."""
    found = []
    for first in range(0, len(answers), reward.batch_size):
        places = range(first, min(first + reward.batch_size, len(answers)))
        document = {
            "prompts": [asked[at].prompt for at in places],
            "completions": [answers[at] for at in places],
            "rows": [dict(asked[at].columns) for at in places],
        }
        body = json.dumps(document, ensure_ascii=False, sort_keys=True, default=str).encode(errors="replace")
        found.append(ScoreBatch(places, body, sha256(reward.url.encode() + b"\n" + body).hexdigest()))
    return found


def tokens_of(path: str | None) -> Mapping[str, str]:
    """Bearer tokens by the origin that they are sent to."""
    if path is None:
        return {}
    why = f"the file of EFT_REWARD_TOKENS, {path},"
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoTokens(f"{why} cannot be read: {error}", field="stage.reward") from error
    if not isinstance(found, dict) or not all(
        isinstance(one, str) and one.isascii() and one.isprintable() for one in found.values()
    ):
        raise NoTokens(f"{why} is not a JSON object of tokens by origin", field="stage.reward")
    tokens = {}
    for url, token in found.items():
        try:
            tokens[parse(url).origin] = token
        except NotAllowed as error:
            raise NoTokens(f"{why} has a name that is not an origin: {error}", field="stage.reward") from error
    return tokens
