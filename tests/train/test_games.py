"""Games of textarena: the table, the openings that a job gets, and how they are played."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.data.rows import PromptOnly
from core.errors import DataError, SpecError
from core.plan.compatibility import check
from core.sandbox.sandbox import ProgramSandbox
from core.spec.axes.data import GameRows
from core.spec.axes.rollout.environment import GameEnvironment
from core.spec.axes.rollout.games import games
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.train.generation.sampling import Completion
from core.train.hub.model_cache import ModelCache
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.rollout.sandboxed.programs import answered, open_sandbox
from core.train.rollout.sandboxed.tasks import GAMES, prepare_problems
from core.train.rollout.turns.episodes import Episode, Player
from core.train.rollout.turns.replies import Replies
from tests.support.tasks import described
from tests.support.tools import CACHE, game_tools
from worker.orders import tools_of

GUESS = {"name": "GuessTheNumber-v0", "options": {"max_number": 5, "max_turns": 9}, "number": 3}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[ProgramSandbox]:
    game_tools()
    opened = open_sandbox([], CACHE, GameEnvironment())
    assert opened is not None
    with opened:
        yield opened


def said(sandbox: ProgramSandbox, *calls: tuple[dict[str, Any], list[str]]) -> list[dict[str, Any]]:
    asked = [{"game": game, "answers": moves} for game, moves in calls]
    outcome = sandbox.run_function(GAMES, "respond", {"calls": asked}, seconds=60)
    assert outcome.error is None, outcome.error
    assert not [one for one in outcome.value if "error" in one]
    return [one["value"] for one in outcome.value]


def test_the_table_is_what_the_library_has(sandbox: ProgramSandbox) -> None:
    assert described(sandbox, GAMES) == games()


def test_every_game_opens_and_plays_the_same_way_again(sandbox: ProgramSandbox) -> None:
    calls = [({"name": name, "options": {}, "number": 7}, moves) for name in games() for moves in (["[1]"], ["x", "y"])]
    first = said(sandbox, *calls)
    assert first == said(sandbox, *calls)
    assert all(one["reply"] is None or one["reply"] for one in first), "a reply says something"


def test_a_number_is_guessed_by_what_the_game_says(sandbox: ProgramSandbox) -> None:
    told = said(sandbox, *((GUESS, [f"I say [{guess}]"]) for guess in range(1, 6)))
    (right,) = (guess for guess, one in enumerate(told, 1) if one["reply"] is None)
    assert told[right - 1]["reward"] == 1
    for guess, one in enumerate(told, 1):
        if guess != right:
            assert ("higher" if guess < right else "lower") in one["reply"]
            assert one["reward"] == pytest.approx(1 - abs(guess - right) / 4), "where it is cut off: how near it is"
    plain, again, ended = said(sandbox, (GUESS, [f" {right}\n"]), (GUESS, ["who knows"]), (GUESS, ["who", "knows"]))
    assert plain["reply"] is None and "invalid move" in again["reply"]
    assert ended == {"reply": None, "reward": 0.0}, "the second move in a row against the rules ends it"


def test_an_episode_is_a_game(sandbox: ProgramSandbox, tiny_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)

    def complete(prompts: Any, keys: Any, most: Any) -> list[Completion]:
        """The first sample counts, the other one says the same number each time."""
        turns = [(sample, turn[0] if turn else 0) for mine in keys for _, sample, *turn in mine]
        texts = ["[5]" if sample else f"[{turn + 1}]" for sample, turn in turns]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return [Completion(one, [-1.0] * len(one), True) for one in ids]

    player = Player(
        GameEnvironment(max_turns=5), None, sandbox,
        Replies(Renderer(tokenizer, RenderOptions(row_format="prompt")), "user"), 2000,
        text=tokenizer.decode, notice=lambda code, words: None, between=lambda: None,
    )  # fmt: skip
    row = answered(1, "?", PromptOnly("?", None, {"game": GUESS}))
    counted, stubborn = player.play([[5]], [[(0, 0), (0, 1)]], [row], complete)

    def spoken(episode: Episode) -> list[str]:
        return [text for who, text in episode.turns if who == "assistant"]

    assert counted.finished and counted.reward == 1
    assert spoken(counted) == [f"[{n}]" for n in range(1, 1 + len(spoken(counted)))]
    assert stubborn.finished and stubborn.reward < 1 and spoken(stubborn) == ["[5]"] * 3, "one warning, then the end"


def test_openings_are_a_function_of_their_fields(sandbox: ProgramSandbox, tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)

    def rows(**fields: Any) -> list[dict[str, Any]]:
        source = GameRows(name="FrozenLake-v0", size=3, instruction="Move.", **fields)
        (path,), origin = prepare_problems(source, "data.train", cache, CACHE, offline=True, told=lambda *_: None)
        assert origin["name"] == "FrozenLake-v0"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    first, other = rows(), rows(seed=1)
    assert first == rows() and len({row["prompt"] for row in first + other}) > 1
    assert [row["game"]["number"] for row in first + other] == [0, 1, 2, *(2**20 + n for n in range(3))]
    assert all(row["prompt"].endswith("\n\nMove.") for row in first)
    with pytest.raises(DataError, match="makes no games with these options") as refused:
        rows(options={"size": -1})
    assert refused.value.code == "task_refused" and refused.value.field == "data.train.options"


def job(data: dict[str, Any], **stage: Any) -> dict[str, Any]:
    return {"model": "a/b", "data": {"train": data}, "stage": {"type": "grpo", "reward": ["environment"]} | stage}


def test_a_job_needs_no_file_and_asks_for_the_library() -> None:
    spec = resolve(parse_job(job({"type": "game", "name": "Bandit-v0"}, environment="game")))
    assert spec.data.train == GameRows(name="Bandit-v0") and tools_of(spec) == ["games"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "GuesTheNumber-v0"}, "no game `GuesTheNumber-v0`; did you mean `GuessTheNumber-v0`"),
        ({"name": "Wordle-v0"}, "docs/games.md lists them all"),
        ({"options": {"max_numbers": 3}}, "no option `max_numbers`; did you mean `max_number`"),
        ({"options": {"max_number": "3"}}, "is a number, as in its default 20"),
    ],
)
def test_what_a_game_cannot_do_is_told_at_submit(data: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve(parse_job(job({"type": "game", "name": "GuessTheNumber-v0"} | data, environment="game")))
    assert words in " ".join(fault.message for fault in refused.value.faults)


def test_games_and_the_environment_that_plays_them_need_each_other() -> None:
    game, task = {"type": "game", "name": "Bandit-v0"}, {"type": "task", "name": "chain_sum"}
    python = {"type": "python", "source": "def respond(): return 1"}
    for data, environment in ((game, python), (game, None), (task, "game"), ([game, task], "game")):
        reward = ["environment" if environment else {"type": "length", "most": 5}]
        (fault,) = check(resolve(parse_job(job(data, environment=environment, reward=reward))))
        assert fault.code == "no_environment" and "set both, or neither" in fault.message
    assert not check(resolve(parse_job(job(game, environment="game"))))
