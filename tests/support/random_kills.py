"""Runs of reinforcement learning that are killed at random instants:
`python -m tests.support.random_kills MODEL FOLDER PROMPTS MOST STAGE:SEED…`.

An instant is a call of a function, in Python or C, inside one part of a rollout or step: the process gets SIGKILL when
so many of them have been made there. So a seed decides it on every machine, and each part is met as often as the
others, however little of the time it takes. A run is killed at most MOST times and then left to its end, or reaches it
before; attempts are forked from this process, which has imported everything and computed nothing.

For each seed a line of JSON: the parts that were killed, and what is wrong (None: nothing). Nothing is wrong when the
final weights are those of the undisturbed run to the bit, all attempts together have left the very answers that the
undisturbed run has, and each epoch has every prompt once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from core.spec.run.exit_codes import EXIT_OK
from core.train.engine import Engine
from core.train.loop.loop import Loop
from core.train.rollout.answers import Answerer
from core.train.rollout.loader import RolloutLoader, merge_rollouts
from tests.support.trainer import events, run, weights, write_rows, write_run

ENVIRONMENT_OF_TWO_TURNS: dict[str, Any] = {
    "type": "python",
    "source": "def respond(answers):\n    return str(len(answers[0])) if len(answers) < 2 else 1.0",
    "max_turn_length": 5,
}
STAGES: dict[str, dict[str, Any]] = {
    "grpo": {"num_generations": 2, "beta": 0.05, "max_resamples": 1},
    "rloo": {"num_generations": 2, "max_completion_length": 14, "environment": ENVIRONMENT_OF_TWO_TURNS},
    "ppo": {"num_generations": 1},
}
ROLLOUT: dict[str, Any] = {
    "max_completion_length": 5,
    "num_iterations": 2,
    "temperature": 1.5,
    "reward": [{"type": "regex", "pattern": "[a-m]"}, {"type": "length", "most": 3, "slack": 4}],
}
PARTS: dict[str, tuple[type, str]] = {
    "update": (Loop, "_step"),
    "optimizer": (Engine, "step"),
    "advantages and files": (RolloutLoader, "roll_out"),
    "generation": (Answerer, "sample"),
    "rewards": (Answerer, "judge"),
}
"""A part is what runs in a method, less the parts inside of it: a step asks for a rollout, and that for answers."""
PER_ROLLOUT = 40
"""Prompts of a rollout at most."""
CHECKPOINTS = 16
"""Checkpoints of a run at least, if it has so many steps; some are between the steps over the same answers."""
CALLS, ROWS = "calls.json", "rows.jsonl"


class Calls:
    """Counts calls by the part that they are made in; `then` is told each. Python tells of calls inside of parts alone:
    what a run imports and loads before is most of its calls."""

    def __init__(self, then: Callable[[str, int], None] = lambda part, count: None) -> None:
        self.made: Counter[str] = Counter()
        self._within: list[str] = []
        self._then = then

    def watch(self) -> None:
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, self._counted(part, getattr(owner, name)))

    def _counted(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*given: Any, **named: Any) -> Any:
            if not self._within:
                sys.setprofile(self._called)
            self._within.append(part)
            try:
                return method(*given, **named)
            finally:
                self._within.pop()
                if not self._within:
                    sys.setprofile(None)

        return inside

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if self._within and event in ("call", "c_call"):
            part = self._within[-1]
            self.made[part] += 1
            self._then(part, self.made[part])


def ordered(folder: Path, model: Path, stage: str, prompts: int, rows: Path, earlier: list[Path]) -> Path:
    """A run folder: one epoch over so many prompts."""
    each, group = STAGES[stage]["num_generations"], min(PER_ROLLOUT, prompts // 3)
    steps = -(-prompts // group) * ROLLOUT["num_iterations"]
    return write_run(
        folder,
        model,
        rows,
        resume_from=earlier[::-1],
        stage={"type": stage, **ROLLOUT, **STAGES[stage]},
        method={"type": "lora", "r": 4},
        optimizer={"learning_rate": 1e-2},
        training={
            "num_train_epochs": 1,
            "per_device_train_batch_size": group * each // 2,
            "gradient_accumulation_steps": 2,
            "precision": "bf16",
            "max_length": 64,
        },
        checkpoint={"type": "disk", "save_steps": max(1, steps // CHECKPOINTS)},
    )


def undisturbed(folder: Path, model: Path, stage: str, prompts: int) -> Counter[str]:
    """Run it to its end; calls of each part."""
    run_dir, calls = ordered(folder, model, stage, prompts, folder.parent / ROWS, []), Calls()

    def prepare() -> None:
        calls.watch()
        end = os._exit

        def told(code: int) -> None:
            (run_dir / CALLS).write_text(json.dumps(calls.made))
            end(code)

        os._exit = told  # type: ignore[assignment]

    if (code := run(run_dir, prepare=prepare)) != EXIT_OK:
        raise SystemExit(f"the undisturbed run ended with {code}: {(run_dir / 'log.txt').read_text()}")
    return Counter(json.loads((run_dir / CALLS).read_text()))


def killed_in(part: str, count: int) -> Callable[[], None]:
    """What an attempt does to be killed at a call of a part."""

    def kill(where: str, made: int) -> None:
        if where == part and made == count:
            os.kill(os.getpid(), signal.SIGKILL)

    return Calls(kill).watch


def disturbed(
    folder: Path, model: Path, stage: str, prompts: int, most: int, seed: int, calls: Counter[str]
) -> dict[str, Any]:
    """Kill a run as the seed says; see the module."""
    draw = random.Random(f"{stage} {seed}")
    left = draw.randint(1, most)
    share = max(2, (left + 1) // 2)  # attempts of such parts of a run leave room for the kills to come
    attempts: list[Path] = []
    killed: list[str] = []
    wrong: str | None = None
    while True:
        path = folder / f"attempt-{len(attempts) + 1}"
        attempts.append(ordered(path, model, stage, prompts, folder.parent / ROWS, attempts))
        prepare = None
        if left:
            left -= 1
            part = draw.choice(list(PARTS))
            prepare = killed_in(part, draw.randint(1, max(1, calls[part] // share)))
        code = run(attempts[-1], prepare=prepare)
        if code != -signal.SIGKILL:
            break
        killed.append(part)
    if code != EXIT_OK:
        wrong = f"attempt {len(attempts)} ended with {code}: {events(attempts[-1])[-1:]}"
    elif weights(attempts[-1]) != weights(folder.parent / "calm"):
        wrong = "the final weights differ"
    else:
        wrong = prompts_wrong(attempts, folder.parent / "calm", prompts)
    resumed = [event["step"] for path in attempts for event in events(path, "resumed")]
    return {"stage": stage, "seed": seed, "killed": killed, "resumed_at": resumed, "wrong": wrong}


def prompts_wrong(attempts: list[Path], calm: Path, prompts: int) -> str | None:
    """What is wrong with the answers that all attempts have left together."""
    texts = []
    for number, folders in enumerate(([calm], attempts[::-1])):
        merge_rollouts(folders, path := calm.parent / f"answers-{number}.jsonl")
        texts.append(path.read_text())
    if texts[0] != texts[1]:
        return "the answers differ"
    used = Counter(line["line"] for line in map(json.loads, texts[1].splitlines()) if line["sample"] == 0)
    if len(used) != prompts or set(used.values()) != {1}:
        return f"{prompts - len(used)} prompts were left out, {sum(n > 1 for n in used.values())} came twice"
    return None


def kills(model: Path, folder: Path, prompts: int, most: int, seeds: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What became of each of the seeds, `STAGE:SEED`; see the module."""
    calls: dict[str, Counter[str]] = {}
    for argument in seeds:
        stage, _, seed = argument.partition(":")
        place = folder / stage
        if stage not in calls:
            place.mkdir(parents=True)
            write_rows(place / ROWS, [{"prompt": f"say a letter, number {n}"} for n in range(prompts)])
            calls[stage] = undisturbed(place / "calm", model, stage, prompts)
        found = disturbed(place / seed, model, stage, prompts, most, int(seed), calls[stage])
        if found["wrong"] is None:
            shutil.rmtree(place / seed)
        yield found


def main() -> int:
    model, folder, prompts, most = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    bad = 0
    for found in kills(model, folder, prompts, most, sys.argv[5:]):
        print(json.dumps(found), flush=True)
        bad += found["wrong"] is not None
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
