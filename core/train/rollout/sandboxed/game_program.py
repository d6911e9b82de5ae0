"""The program behind games of textarena: their openings, and what they say to moves. It is run by its source, in the
sandbox, and imports nothing of ours.

A game is a function of (name, options, number) and the moves so far: each call plays it from its beginning.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("chess", "dotenv", "nltk", "openai", "requests", "websockets")
"""What textarena imports for its games over a network, with judges or with words of corpora: not installed."""
GAMES = (
    "2048", "Bandit", "Blackjack", "Crosswords", "FifteenPuzzle", "FrozenLake", "GuessTheNumber", "LightsOut",
    "LogicPuzzle", "Mastermind", "Minesweeper", "Secretary", "Set", "Sudoku", "TowerOfHanoi",
)  # fmt: skip
"""Games for one player that need nothing but textarena. Countdown, Cryptarithm, PegJump, Slitherlink and
ThreeCardMonte fail at a move that is against their rules."""
SLOW = ("Sudoku-v0-hard",)
"""Versions that take seconds to set up, which each move would do again."""
PLAYER = 0


class StandIn:
    """Finds a module for each of UNUSED whose every name is an empty class."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in UNUSED:
            return None
        return ModuleSpec(name, StandIn(), is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def warm() -> None:
    """Import the games; every program finds them imported."""
    sys.meta_path.insert(0, StandIn)
    import textarena

    assert textarena.make


def describe() -> dict[str, Any]:
    """Every game that is offered, with its options and their defaults."""
    from textarena.envs.registration import ENV_REGISTRY

    found = {}
    for name, about in ENV_REGISTRY.items():
        if name.partition("-v0")[0] not in GAMES or name.endswith(("-raw", "-train")) or name in SLOW:
            continue
        parameters = inspect.signature(type(_made(name, {})).__init__).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        found[name] = _plain(defaults | about.kwargs)
    return found


def generate(name: str, options: dict[str, Any], first: int, count: int) -> list[str] | str:
    """What games first, first + 1, … say before the first move; or what is wrong with the options."""
    try:
        return [_said(_begun(name, options, number)) for number in range(first, first + count)]
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


def respond(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each game says to its moves so far: {value: {reply, reward}}, where a reply of None ends it; or what went
    wrong, {error}."""
    return [_respond(call["game"], call["answers"]) for call in calls]


def _respond(game: dict[str, Any], moves: list[str]) -> dict[str, Any]:
    try:
        played = _begun(game["name"], game["options"], game["number"])
        done = any(_move(played, move) for move in moves)  # up to the one that ends it
        reply = None if done else _said(played)
        return {"value": {"reply": reply, "reward": float(played.close()[0][PLAYER]) if done else _progress(played)}}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


def _made(name: str, options: dict[str, Any]) -> Any:
    import textarena

    return textarena.make(f"{name}-raw", **options)


def _begun(name: str, options: dict[str, Any], number: int) -> Any:
    random.seed(number)
    game = _made(name, options)
    game.reset(num_players=1, seed=number)
    return game


def _move(game: Any, move: str) -> bool:
    """Whether the game has ended with it. A move without brackets is one as a whole, as textarena's own players have
    it."""
    game.get_observation()
    move = move.strip()
    done, _ = game.step(move if "[" in move or "]" in move else f"[{move}]")
    return bool(done)


def _said(game: Any) -> str:
    """What the game tells its player that is new."""
    _, messages = game.get_observation()
    return "\n".join(str(text).strip() for who, text, _ in messages if who != PLAYER)


def _progress(game: Any) -> float:
    """What the game would be worth if its own limit of turns ended it here; 0 where it counts no part of the way."""
    counted = getattr(game, "_get_percentage_completion", None)
    return float(counted()) if counted is not None else 0.0


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """As JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(options))
    return found
