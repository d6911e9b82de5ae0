"""Batches of answers that the model samples itself: a StepLoader that rolls out before the first step over its answers.

A rollout is a function of its number, the seed and the weights: which prompts, which draws and hence which answers. So
a run that was killed in one begins it anew, and ends with the same bits; once it is done it is part of each checkpoint,
since later steps change the weights it was made with.

Of several ranks each answers every so-manyth prompt and rewards its answers. All of them then have the whole rollout,
so that advantages and figures are those of one rank, and each trains on its share of the batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.base.files import sync
from core.data.rows import PromptOnly
from core.plan.constants import MOST_ALIKE
from core.plan.steps import run_steps
from core.spec.axes.rollout.reward import names_of
from core.spec.axes.rollout.stages import GRPO, RLOO, GroupStage, LearnsFromAnswers, PPOStage
from core.spec.run.folder import ROLLOUTS, rollout_file, rollout_tokens_file
from core.train.base.stop import StopRequested
from core.train.batch import Batch
from core.train.data.dataset import TokenDataset
from core.train.data.loaders import StepBatches
from core.train.data.order import build_order, dealt_evenly
from core.train.generation.sampling import Key
from core.train.model.placement import Placement
from core.train.policy import PolicyModel
from core.train.render.options import RenderOptions
from core.train.rollout.answers import Answerer, Judged, together
from core.train.rollout.buffer import Rollout, advantages_of, leave_one_out, spread_groups
from core.train.rollout.estimation import estimate, explained_variance
from core.train.rollout.sandboxed.programs import answered
from core.train.rollout.turns.episodes import Episode
from core.train.run import Run
from core.train.stages.rollout.sampled import FIGURE

TOLD = {
    "sampler": "sampler",
    "old": "trainer",
    "reference": "reference",
    "value": "value",
    "advantage": "advantage",
}
"""Numbers of tokens that are kept for people, by the names that people know them by."""
CUT_OFF = 0.5
"""Share of answers without an end of their own above which the job says so."""


class RolloutLoader:
    """See the module; a StepLoader. The engine of its `answerer` is set once it is built."""

    def __init__(
        self,
        run: Run,
        stage: LearnsFromAnswers,
        prompts: TokenDataset,
        rows: Sequence[PromptOnly],
        tokenizer: Any,
        pad_token_id: int,
        placement: Placement,
        options: RenderOptions,
    ) -> None:
        """`rows`: the row of each prompt; `options`: how it was rendered. Raises as Answerer."""
        self.run, self.stage, self.prompts, self.rows = run, stage, prompts, rows
        self.pad_token_id = pad_token_id
        self.answerer = Answerer(run, stage, tokenizer, placement, options)
        self.answerer.refuse_unreadable(prompts.lines.tolist(), rows)
        self.batch_size = self._saved_batch_size = run.spec.training.per_device_train_batch_size
        self.order = build_order(run.spec, prompts.lengths)
        self.prompts_once = False
        """Whether a prompt is computed once for all of its answers in a batch (`share_prompts` of
        core/train/attention/probe.py says where it can be)."""
        self._rollout: Rollout | None = None
        self._dataset: TokenDataset | None = None

    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return run_steps(self.run.spec, self.order.steps_of)

    # --- a StepLoader ---------------------------------------------------------------------------------

    def batches(self, step: int) -> StepBatches:
        number = step // self.stage.num_iterations
        if self._rollout is None or self._rollout.number != number:
            self._rollout, self._dataset = self.roll_out(number), None
        if self._dataset is None:
            self._dataset = self._rollout.dataset()
        return self._batches(self._rollout, self._dataset)

    def batches_of(self, rollout: Rollout) -> StepBatches:
        """A step over a rollout that is not kept."""
        return self._batches(rollout, rollout.dataset())

    def _batches(self, rollout: Rollout, dataset: TokenDataset) -> StepBatches:
        totals: dict[str, float] = {
            "tokens": sum(rollout.lengths()),
            "answers": len(rollout.answers),
        }
        totals |= {FIGURE + name: value for name, value in rollout.figures(self.stage.max_completion_length).items()}
        if isinstance(self.stage, PPOStage):
            totals[f"{FIGURE}explained_variance"] = explained_variance(rollout)
        cut, ranks = self._cut(rollout, self.batch_size), self.run.ranks
        totals["sequences"] = max(1, sum(map(len, cut)))  # what a mixture's balance of experts is a mean over
        if not cut:  # every group's rewards are alike: a step without a gradient, which momentum makes all the same
            cut = [[] for _ in range(ranks.world)]
        mine = cut[ranks.rank :: ranks.world]
        return StepBatches(totals, tuple(partial(self._batch, dataset, rows) for rows in mine))

    def _batch(self, dataset: TokenDataset, rows: Sequence[int]) -> Batch:
        if not rows:
            return dataset.blank(0, self.pad_token_id, packed=self.prompts_once)
        return dataset.pack(rows) if self.prompts_once else dataset.collate(rows, self.pad_token_id)

    def _cut(self, rollout: Rollout, batch_size: int) -> list[list[int]]:
        """The answers that have a gradient, as batches of all ranks, those of one micro-step side by side; with several
        ranks the last may be empty."""
        rows = self._rows(rollout)
        cut = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
        return dealt_evenly(cut, self.run.ranks.world)

    def _rows(self, rollout: Rollout) -> list[int]:
        """Places of the answers that have a gradient."""
        stage = self.stage
        every = stage.beta or isinstance(stage, PPOStage) or (isinstance(stage, RLOO) and stage.normalize_advantages)
        return list(range(len(rollout.answers))) if every else rollout.varied()

    def epochs_after(self, steps: int) -> float:
        return self.order.epochs_after(steps // self.stage.num_iterations)

    def translate(self, step: int, micro_steps: int) -> int | None:
        if micro_steps == 0:
            return 0
        if self._rollout is None or self._rollout.number != step // self.stage.num_iterations:
            return None
        world = self.run.ranks.world
        cut = self._cut(self._rollout, self._saved_batch_size)[: micro_steps * world]
        done = {row for rows in cut for row in rows}
        ours = self._cut(self._rollout, self.batch_size)
        if not ours:
            return micro_steps
        counts = range(len(ours) // world + 1)
        return next((n for n in counts if {row for rows in ours[: n * world] for row in rows} == done), None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self.order.state_dict(),
            "batch_size": self.batch_size,
            "slots": self.answerer.slots,
            "rollout": None if self._rollout is None else self._rollout.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError when the checkpoint was made over other prompts."""
        self.order.load_state_dict(state["order"])
        self._saved_batch_size, self.answerer.slots = int(state["batch_size"]), int(state["slots"])
        saved = state["rollout"]
        self._rollout, self._dataset = None if saved is None else Rollout.of(saved), None

    # --- a rollout ------------------------------------------------------------------------------------

    def roll_out(self, number: int) -> Rollout:
        """Sample, reward, compare. Collective. StopRequested, on all ranks."""
        stage = self.stage
        rows = list(self.order.rows_of(number))
        prompts = [self.prompts[row][0].tolist() for row in rows]
        answers, judged, draws = self._shared(number, rows)
        rollout = Rollout(
            number,
            prompts,
            rows,
            [answer.tokens for answer in answers],
            [answer.finished for answer in answers],
            judged.rewards,
            judged.total,
            [0.0] * len(answers),
            {"sampler": np.asarray([p for answer in answers for p in answer.logprobs], dtype=np.float32)},
            draws,
        )
        if self.answerer.player is not None:
            rollout.learned = [list(map(int, answer.learned)) for answer in answers]
            rollout.turns = [answer.turns for answer in answers]
        if isinstance(stage, PPOStage):
            old, value = self._of_tokens(rollout, self._with_values, count=2)
            rollout.token_values |= {"old": old, "value": value}
        elif stage.num_iterations > 1 or (stage.beta and isinstance(stage, RLOO)):
            (rollout.token_values["old"],) = self._of_tokens(rollout, self._logprobs)
        if stage.beta:
            model: Any = self.answerer.ready.model
            (rollout.token_values["reference"],) = self._of_tokens(rollout, self._logprobs, model.disable_adapter)
        rollout.advantages = advantages(rollout, stage)
        if self.run.ranks.first:
            self._keep(rollout, judged.unscored)
        self._tell(rollout)
        return rollout

    def _shared(self, number: int, rows: Sequence[int]) -> tuple[list[Episode], Judged, list[int]]:
        """Draw and reward this rank's share of the answers to the prompts of these rows; those of all ranks, and how
        often each group was drawn. Collective. StopRequested, on all ranks."""
        ranks, stage = self.run.ranks, self.stage
        mine = rows[ranks.rank :: ranks.world]
        share: tuple[list[Episode], Judged, list[int]] | None = None
        with suppress(StopRequested):
            answers, judged = self._drawn(number, mine, draw=0)
            draws: list[int] = []
            if isinstance(stage, GroupStage) and stage.max_resamples:
                draws = self._redraw(number, mine, answers, judged, stage.max_resamples)
            share = answers, judged, draws
        if ranks.any_rank(share is None):
            raise StopRequested
        assert share is not None
        self.run.share_notices()
        if ranks.world == 1:
            return share
        self.answerer.slots = min(ranks.all_gather(self.answerer.slots))
        return together(ranks, share, len(rows), stage.num_generations)

    def _drawn(self, number: int, rows: Sequence[int], *, draw: int) -> tuple[list[Episode], Judged]:
        """Answers to the prompts of these rows, side by side, and their rewards. StopRequested."""
        if not rows:
            return [], Judged({name: [] for name in names_of(self.stage.reward)}, [], {})
        each = self.stage.num_generations
        prompts = [self.prompts[row][0].tolist() for row in rows]
        keys: list[list[Key]] = [
            [(self.run.spec.training.seed, number, row, draw * each + sample) for sample in range(each)] for row in rows
        ]
        asked = [
            answered(int(self.prompts.lines[row]), self.answerer.text(prompt), self.rows[row])
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        answers = self.answerer.sample(prompts, keys, asked, self.stage.temperature)
        return answers, self.answerer.judge(answers, [one for one in asked for _ in range(each)])

    def _redraw(self, number: int, rows: Sequence[int], answers: list[Episode], judged: Judged, most: int) -> list[int]:
        """Draw groups without a difference anew, at most so often, and put those with one in their places; how often
        each group was drawn. StopRequested."""
        each, draws = self.stage.num_generations, [1] * len(rows)
        for draw in range(1, most + 1):
            spread = spread_groups(judged.total, each)
            alike = [group for group in range(len(rows)) if group not in spread]
            if not alike:
                break
            others, found = self._drawn(number, [rows[group] for group in alike], draw=draw)
            for group in alike:
                draws[group] += 1
            for at in spread_groups(found.total, each):
                start = alike[at] * each
                answers[start : start + each] = others[at * each : (at + 1) * each]
                judged.replace(start, found, at * each, each)
        return draws

    def _of_tokens(
        self,
        rollout: Rollout,
        function: Callable[[PolicyModel, Batch], tuple[Tensor, ...]],
        start: Callable[[], AbstractContextManager[Any]] = nullcontext,
        count: int = 1,
    ) -> list[npt.NDArray[np.float32]]:
        """The `count` values that a function finds of each token of all answers that are trained on, end to end, by
        the kernels and batches of training; 0 of the others. `start` makes a context in which the model is the
        reference. Collective. StopRequested, on all ranks."""
        ranks, stopped = self.run.ranks, True
        lengths, ends = rollout.lengths(), np.cumsum([len(answer) for answer in rollout.answers])
        found: list[npt.NDArray[np.float32]] = [np.zeros(int(ends[-1]), dtype=np.float32) for _ in range(count)]
        dataset = rollout.dataset()
        with suppress(StopRequested), start():
            for rows in self._cut(rollout, self.batch_size)[ranks.rank :: ranks.world]:
                self.run.check_stop()
                if not rows:
                    continue
                values = self.answerer.ready.evaluate(self._batch(dataset, rows), function)
                for into, numbers in zip(found, values, strict=True):
                    parts = torch.split(numbers.cpu(), [lengths[row] for row in rows])
                    for row, part in zip(rows, parts, strict=True):
                        into[ends[row] - len(rollout.answers[row]) : ends[row]][rollout.mask(row)] = part.numpy()
            stopped = False
        if ranks.any_rank(stopped):
            raise StopRequested
        if ranks.world == 1:
            return found
        summed = ranks.all_reduce(torch.from_numpy(np.stack(found)))  # of each token one rank has more than 0
        return list(summed.numpy())

    def _logprobs(self, policy: PolicyModel, batch: Batch) -> tuple[Tensor, ...]:
        return (policy.logprobs(batch, self.stage.temperature),)

    def _with_values(self, policy: PolicyModel, batch: Batch) -> tuple[Tensor, ...]:
        return policy.logprobs_and_values(batch, self.stage.temperature)

    # --- what people see of it ------------------------------------------------------------------------

    def _keep(self, rollout: Rollout, unscored: Mapping[int, dict[str, str]]) -> None:
        """Write the answers for people, a file a rollout, whole or not at all. `unscored`: see Judged."""
        folder = self.run.folder / ROLLOUTS
        folder.mkdir(exist_ok=True)
        path = folder / rollout_file(rollout.number)
        lines, lengths = [], rollout.lengths()
        for at, tokens in enumerate(rollout.answers):
            prompt = at // rollout.group
            turns = [{"role": who, "content": text} for who, text in rollout.turns[at]] if rollout.turns else None
            lines.append(
                {
                    "rollout": rollout.number,
                    "step": rollout.number * self.stage.num_iterations + 1,
                    "line": int(self.prompts.lines[rollout.rows[prompt]]),
                    "sample": at % rollout.group,
                    "prompt": self.answerer.text(rollout.prompts[prompt]),
                    "completion": self.answerer.text(tokens),
                    "turns": turns,
                    "tokens": lengths[at],
                    "finished": rollout.finished[at],
                    "rewards": {name: values[at] for name, values in rollout.rewards.items()},
                    "reward": rollout.total[at],
                    "unscored": unscored.get(at, {}),
                    "advantage": rollout.advantages[at],
                }
            )
        _write(folder / rollout_tokens_file(rollout.number), self._tokens(rollout))
        _write(path, lines)

    def _tokens(self, rollout: Rollout) -> Iterator[dict[str, Any]]:
        """Return the texts of the model's tokens of each answer, and what is known of each."""
        known = {TOLD[name]: values for name, values in rollout.token_values.items() if name in TOLD}
        trained = set(self._rows(rollout))
        word = cache(self.answerer.word)
        end = 0
        for at, tokens in enumerate(rollout.answers):
            start, end = end, end + len(tokens)
            mine = np.flatnonzero(rollout.mask(at))
            # of an answer that is not trained on only the draw is known
            names = [name for name in known if at in trained or name == TOLD["sampler"]]
            yield {
                "words": [word(tokens[place]) for place in mine],
                **{name: [round(float(value), 6) for value in known[name][start:end][mine]] for name in names},
            }

    def _tell(self, rollout: Rollout) -> None:
        """Say what keeps a rollout from teaching, once an attempt."""
        alike = 1 - len(rollout.varied()) / len(rollout.answers)
        if alike > MOST_ALIKE and self.answerer.untold("rewards_alike"):
            least, most = min(rollout.total), max(rollout.total)
            self.run.notice(
                "rewards_alike",
                f"in {alike:.0%} of the groups of rollout {rollout.number} all answers have the same reward (rewards "
                f"are {least:g} to {most:g}), so nothing is learned from them; use easier or harder prompts, raise "
                "stage.num_generations or stage.temperature, or add a reward that tells answers apart",
            )
        cut_off = 1 - sum(rollout.finished) / len(rollout.finished)
        if cut_off > CUT_OFF and self.answerer.untold("answers_cut_off"):
            self.run.notice(
                "answers_cut_off",
                f"{cut_off:.0%} of the answers of rollout {rollout.number} were cut off at "
                f"stage.max_completion_length = {self.stage.max_completion_length} tokens; raise it, name a string "
                "that ends answers in `stage.stop`, or fine-tune the format first",
            )


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    aside = path.with_suffix(".new")
    aside.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    sync(aside)
    aside.rename(path)


def advantages(rollout: Rollout, stage: LearnsFromAnswers) -> list[float]:
    """How much better each answer is than others to its prompt, as the stage counts it; for PPO, than its values said,
    as the mean over its tokens."""
    match stage:
        case GRPO():
            return advantages_of(rollout.total, rollout.group, scale=stage.scale_rewards == "group")
        case RLOO():
            rewards = rollout.total
            if stage.beta:
                apart = rollout.answer_sums(rollout.token_values["old"] - rollout.token_values["reference"])
                rewards = [reward - stage.beta * gap for reward, gap in zip(rewards, apart, strict=True)]
            return leave_one_out(rewards, rollout.group, normalize=stage.normalize_advantages)
        case PPOStage():
            return estimate(rollout, stage)
        case _ as never:
            assert_never(never)


def merge_rollouts(folders: Sequence[Path], to: Path) -> None:
    """Write the rollouts of all attempts, newest attempt first in `folders`, as one file; none where there are none."""
    newest: dict[str, Path] = {}
    for folder in folders:
        for path in (folder / ROLLOUTS).glob("[0-9]*.jsonl"):
            newest.setdefault(path.name, path)
    if not newest:
        return
    with to.open("wb") as merged:
        for name in sorted(newest):
            merged.write(newest[name].read_bytes())
