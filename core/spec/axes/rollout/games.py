"""The games of textarena by name: what a job may ask of each (games.json, which `python -m tests.support.tasks` writes
from the library itself)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from core.spec.axes.rollout.tasks import near, shown_options, wrong_options

GAMES_TABLE: Final = Path(__file__).with_name("games.json")


@cache
def games() -> Mapping[str, Mapping[str, Any]]:
    """The options of every game with their defaults, by its name."""
    found: Mapping[str, Mapping[str, Any]] = json.loads(GAMES_TABLE.read_text(encoding="utf-8"))
    return found


def wrong_game(name: str) -> str | None:
    """Why there is no such game, with those of a similar name."""
    if name in games():
        return None
    return f"there is no game `{name[:60]}`{near(name, list(games()))}; docs/games.md lists them all"


def wrong_game_options(name: str, options: Mapping[str, Any]) -> str | None:
    """Why a game cannot be had with these options, as far as the table says."""
    return wrong_options(f"game `{name}`", games()[name], options)


def page() -> str:
    """docs/games.md."""
    lines = [
        "# Games",
        "",
        "Generated from `core/spec/axes/rollout/games.json` by `make docs`. The games are those of",
        "[textarena](https://github.com/LeonGuertler/TextArena) (MIT) for one player that need no network, judge or",
        "corpus. [rollouts.md](rollouts.md#games) says how a job plays one.",
        "",
        "| not offered | because |",
        "|---|---|",
        "| games for several players | a job has no opponents for them |",
        "| `GuessWho`, `TwentyQuestions` | a model of OpenRouter judges them |",
        "| `Hangman`, `Wordle`, `WordLadder`, `WordSearch` | they need the words of NLTK's corpora |",
        "| `RushHour`, `Sokoban`, `Sudoku-v0-hard` | they take seconds to set up, which each move would do again |",
        "| `Countdown`, `Cryptarithm`, `PegJump`, `Slitherlink`, `ThreeCardMonte` | a move against the rules raises |",
        "| `Klondike` | its source needs Python 3.12 |",
        "",
        "`options`: names and defaults of `options`.",
        "",
        "| game | options |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {shown_options(options)} |" for name, options in sorted(games().items())]
    return "\n".join(lines) + "\n"
