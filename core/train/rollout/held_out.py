"""The mean reward of answers to held-out prompts, as an evaluation of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.data.rows import PromptOnly
from core.errors import SpecError
from core.spec.axes.rollout.reward import names_of
from core.spec.axes.runtime import Generated, HeldOut
from core.train.data.dataset import TokenDataset
from core.train.evaluation.held_out import Found, Share
from core.train.evaluation.samples import Answering, Sample, Sampler, shown, spread
from core.train.feed import RunData
from core.train.generation.sampling import Key
from core.train.rollout.answers import Answerer
from core.train.rollout.sandboxed.programs import answered
from core.train.rollout.turns.episodes import Episode
from core.train.run import Run
from core.train.stage import Totals

EVALUATION = -1
"""Number of the rollout in the keys of draws: no rollout of training has it, so every evaluation draws by the same
numbers, and training by others."""


@dataclass(frozen=True, slots=True)
class RewardEvaluator:
    """A HeldOutMeasure (core/train/evaluation/held_out.py). The figures are sums over answers, and rows are dealt out
    to ranks in turn."""

    answerer: Answerer
    prompts: TokenDataset
    rows: Sequence[PromptOnly]
    """The row of each prompt."""
    sampler: Sampler
    """Answers the prompts of `evaluation.samples`."""
    shown_rows: frozenset[int]
    """Held-out rows whose answers are among the samples."""
    seed: int

    def totals(self) -> Totals:
        return {}

    def share(self, totals: Totals) -> Share:
        """Answer this rank's prompts and reward the answers. StopRequested."""
        answerer, stage = self.answerer, self.answerer.stage
        ranks = answerer.ready.ranks
        rows = list(range(len(self.prompts)))[ranks.rank :: ranks.world]
        if not rows:
            return Share({}, {}, {})
        count = stage.num_generations_eval
        prompts = [self.prompts[row][0].tolist() for row in rows]
        keys: list[list[Key]] = [[(self.seed, EVALUATION, row, sample) for sample in range(count)] for row in rows]
        asked = [
            answered(int(self.prompts.lines[row]), answerer.text(prompt), self.rows[row])
            for row, prompt in zip(rows, prompts, strict=True)
        ]
        answers = answerer.sample(prompts, keys, asked, stage.eval_temperature)
        judged = answerer.judge(answers, [one for one in asked for _ in range(count)])
        sums = {
            "answers": float(len(answers)),
            "reward": float(np.sum(judged.total)),
            "tokens": float(sum(sum(answer.learned) for answer in answers)),
            "cut_off": float(sum(not answer.finished for answer in answers)),
            **{f"rewards/{name}": float(np.sum(values)) for name, values in judged.rewards.items()},
        }
        samples = {
            row: self._sample(row, prompts[at], answers[at * count])
            for at, row in enumerate(rows)
            if row in self.shown_rows
        }
        behind = len(self.prompts)
        return Share(sums, samples | {behind + at: one for at, one in self.sampler.answers().items()}, {})

    def together(self, share: Share, totals: Totals) -> Found:
        """Put the shares of all ranks together. Collective."""
        shares = self.answerer.ready.ranks.all_gather((dict(share.sums), list(share.samples.items())))
        samples = {at: sample for _, found in shares for at, sample in found}

        def mean(name: str) -> float:
            return sum(sums.get(name, 0.0) for sums, _ in shares) / sum(sums.get("answers", 0.0) for sums, _ in shares)

        names = names_of(self.answerer.stage.reward)
        figures = {
            "eval_reward": mean("reward"),
            **{f"eval_rewards/{name}/mean": mean(f"rewards/{name}") for name in names},
            "eval_completions/mean_length": mean("tokens"),
            "eval_completions/truncated": mean("cut_off"),
        }
        return Found(figures, [samples[at] for at in sorted(samples)], [])

    def _sample(self, row: int, prompt: Sequence[int], answer: Episode) -> Sample:
        reference = self.rows[row].reference
        return {
            "row": row,
            "prompt": shown(self.answerer.text(prompt), end=True),
            "reference": None if reference is None else shown(str(reference)),
            "completion": self.answerer.text(answer.tokens),
            "new_tokens": sum(answer.learned),
            "finished": answer.finished,
        }


def build_reward_evaluator(run: Run, answerer: Answerer, data: RunData) -> RewardEvaluator | None:
    """Build the evaluation of a stage that learns from answers, if the job asks for one. SpecError when it has nothing
    to work on."""
    spec = run.spec.evaluation
    if not isinstance(spec, HeldOut):
        return None
    if data.eval is None or data.eval_prompts is None:
        raise SpecError("evaluation `held_out` needs `data.eval`", field="data.eval")
    answerer.refuse_unreadable(data.eval.lines.tolist(), data.eval_prompts)
    wanted, rows = spec.samples, frozenset[int]()
    if isinstance(wanted, Generated):
        rows = frozenset(spread(wanted.rows, len(data.eval)))
        wanted = wanted.model_copy(update={"rows": 0})
    answering = Answering(
        answerer.ready, answerer.tokenizer, spec.per_device_eval_batch_size, data.longest, run.check_stop
    )
    sampler = Sampler(answering, data.eval, wanted, data.options)
    return RewardEvaluator(answerer, data.eval, data.eval_prompts, sampler, rows, run.spec.training.seed)
