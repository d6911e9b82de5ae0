"""`generate` of a session: what it asks, and what its caller is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from core.spec.session.verbs import Generate
from core.train.batch import Batch
from core.train.engine import Engine
from core.train.generation.sampling import Completion, SamplingParams
from core.train.session.adapter import SessionAdapter
from core.train.session.examples import CHOICES, SessionExample, last_targets, read_rows, spread
from core.train.session.faults import BadOperation, check_finite
from core.train.session.losses import logprobs_and_likeliest, logprobs_of
from core.train.session.ranks.crew import Crew
from core.train.session.resident import ResidentBase
from core.train.session.sampling import Draw, SharedSampler

Answer = tuple[dict[str, Any], dict[str, Tensor]]
"""What an operation came to: a result and its tensors."""


@dataclass(frozen=True, slots=True)
class PlannedDraw:
    """An operation that has been checked."""

    asked: Generate
    tensors: dict[str, Tensor]
    draw: Draw
    exact: bool
    mixes: bool
    """Whether it is drawn in a batch with others."""


class SessionPasses(Protocol):
    """What the adapters of a session are asked for beside answers: see SessionVerbs."""

    base: ResidentBase
    crew: Crew
    exact: bool
    between: Callable[[], None]

    def adapter_of(self, asked: Generate) -> SessionAdapter | None: ...

    def reading(self, asked: Generate) -> Any: ...

    def examples(self, tensors: dict[str, Tensor]) -> list[SessionExample]: ...

    def over(
        self, examples: list[SessionExample], compute: Callable[[Batch], tuple[float, tuple[Tensor, ...]]]
    ) -> tuple[float, list[list[Tensor]]]: ...

    def logprobs(self, engine: Engine, examples: list[SessionExample]) -> list[Tensor]: ...


class Answers:
    """`generate` on the adapters of one session."""

    def __init__(self, verbs: SessionPasses, sampler: SharedSampler) -> None:
        self._verbs, self._base, self.sampler = verbs, verbs.base, sampler

    def plan(self, asked: Generate, tensors: dict[str, Tensor]) -> PlannedDraw:
        """Check an operation. BadOperation where it cannot be computed."""
        plan, mixes = self._verbs.crew.agreed(lambda: self._plan(asked, tensors), lambda plan: plan.mixes)
        return replace(plan, mixes=all(mixes))

    def _plan(self, asked: Generate, tensors: dict[str, Tensor]) -> PlannedDraw:
        if odd := sorted(tensors.keys() - {"tokens", "lengths", "targets"}):
            words = f"there is no array `{odd[0]}`; a prompt is `tokens` and `lengths`, and may have `targets`"
            raise BadOperation(words, field=odd[0])
        longest = None if self._base.longest is None else self._base.longest - asked.max_tokens
        if longest is not None and longest < 1:
            words = f"the model has {self._base.longest} positions, prompt and answer together"
            raise BadOperation(words, field="max_tokens", code="beyond_positions")
        for field, most in {"prompt_top": asked.prompt_top, "sample_top": asked.sample_top}.items():
            if most > self._base.vocabulary:
                words = f"the model has {self._base.vocabulary} tokens, and {most} of them are asked for"
                raise BadOperation(words, field=field)
        prompts = [row.tolist() for row in read_rows(tensors, self._base.vocabulary, longest)]
        end = self._base.tokenizer.eos_token_id
        stops = ([] if end is None else [int(end)]) if asked.stop_token_ids is None else asked.stop_token_ids
        params = SamplingParams(
            asked.max_tokens,
            asked.temperature,
            asked.top_p,
            asked.top_k,
            asked.min_p,
            tuple(stops),
            tuple(asked.stop),
            likeliest=asked.sample_top,
        )
        keys = [[(asked.seed, at, sample) for sample in range(asked.num_samples)] for at in range(len(prompts))]
        draw = Draw(prompts, keys, params, self._verbs.adapter_of(asked))
        return PlannedDraw(asked, tensors, draw, self._verbs.exact, self.sampler.mixes(draw))

    def one(self, plan: PlannedDraw) -> Answer:
        """Compute an operation by itself. BadOperation."""
        if plan.mixes:
            return self.told(plan, self.together([plan])[0])
        with self._verbs.reading(plan.asked) as engine:

            def complete(draws: Sequence[Draw]) -> list[list[list[Completion]]]:
                return [
                    engine.complete(
                        draw.prompts,
                        draw.keys,
                        draw.params,
                        slots=self.sampler.slots,
                        decode=self._base.tokenizer.decode,
                        between=self._verbs.between,
                    )
                    for draw in draws
                ]

            (answers,) = self._verbs.crew.drawn([plan.draw], complete)
        return self.told(plan, answers)

    def together(self, plans: Sequence[PlannedDraw]) -> list[list[list[Completion]]]:
        """The answers to several operations, of any sessions, of which each `mixes`."""
        return self._verbs.crew.drawn([plan.draw for plan in plans], self.sampler.answer)

    def told(self, plan: PlannedDraw, answers: list[list[Completion]]) -> Answer:
        """What the caller is told of the answers to an operation: all that the model is asked for beside them is
        computed here. BadOperation."""
        asked, tensors, of_prompts = plan.asked, plan.tensors, dict[str, Tensor]()
        looked, exact = asked.prompt_logprobs or asked.prompt_top, plan.exact and asked.temperature in (0.0, 1.0)
        if looked or exact or "targets" in tensors:
            with self._verbs.reading(asked) as engine:
                of_prompts = self._of_prompts(engine, asked, tensors) if looked else {}
                if "targets" in tensors:
                    of_prompts["prompt_target_logprobs"] = self._of_targets(engine, tensors)
                    of_prompts["prompt_targets"] = tensors["targets"]
                if exact:
                    answers = self._as_forward(engine, plan.draw.prompts, answers)
        flat = [one for mine in answers for one in mine]
        result = {"num_samples": asked.num_samples, "finished": [one.finished for one in flat]}
        if most := asked.sample_top:
            told = [place for one in flat for place in one.likeliest]
            ids = torch.tensor([which for which, _ in told], dtype=torch.int32).view(-1, most)
            values = torch.tensor([best for _, best in told], dtype=torch.float32).view(-1, most)
            of_prompts |= {"top_tokens": ids, "top_logprobs": values}
        found = of_prompts | {
            "tokens": torch.tensor([token for one in flat for token in one.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(one.tokens) for one in flat], dtype=torch.int32),
            "logprobs": torch.tensor([value for one in flat for value in one.logprobs], dtype=torch.float32),
        }
        check_finite([*found.values()])
        return result, found

    def _as_forward(
        self, engine: Engine, prompts: Sequence[Sequence[int]], answers: list[list[Completion]]
    ) -> list[list[Completion]]:
        """The same answers with the log-probabilities that `forward` finds, each example by itself, for the tokens of
        prompt and answer."""
        found = []
        for prompt, mine in zip(prompts, answers, strict=True):
            wholes = [torch.tensor([*prompt, *one.tokens]) for one in mine]
            examples = [SessionExample(whole[:-1], whole[1:], {}) for whole in wholes]
            seen = self._verbs.logprobs(engine, examples)
            found.append(
                [
                    replace(one, logprobs=values[len(prompt) - 1 :].tolist())
                    for one, values in zip(mine, seen, strict=True)
                ]
            )
        return found

    def _of_targets(self, engine: Engine, tensors: dict[str, Tensor]) -> Tensor:
        """Log-probabilities of targets that the caller names for the places of prompts, 0 for targets below 0: float32
        [tokens, choices]."""
        targets = tensors["targets"]
        given = {name: tensors[name] for name in ("tokens", "lengths")} | {"targets": targets.clamp(min=0)}
        examples = self._verbs.examples(
            given | {"weights": torch.ones(targets.shape)}
        )  # several targets come with weights
        if CHOICES not in examples[0].values:
            raise BadOperation("`targets` of prompts are of shape [tokens, choices]", field="targets")
        _, (found,) = self._verbs.over(examples, lambda batch: (0.0, (engine.evaluate(batch, logprobs_of),)))
        return spread(examples, found).view(targets.shape).masked_fill(targets < 0, 0.0)

    def _of_prompts(self, engine: Engine, asked: Generate, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Log-probabilities of the prompts' tokens, and the likeliest tokens in their places: a token's are at the
        place of the one before it, 0 where nothing is asked."""
        examples = self._verbs.examples({name: tensors[name] for name in ("tokens", "lengths")})
        if asked.prompt_last is not None:
            examples = [last_targets(example, asked.prompt_last) for example in examples]
        places = [at for at, example in enumerate(examples) if bool(example.asked.any())]
        chosen, most = [examples[at] for at in places], asked.prompt_top
        own = [torch.zeros(0) for _ in examples]
        likeliest = [torch.zeros(0, most) for _ in examples]
        ids = [torch.zeros(0, most, dtype=torch.int32) for _ in examples]
        if most:

            def compute(batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
                looked = engine.evaluate(batch, lambda policy, batch: logprobs_and_likeliest(policy, batch, most))
                return 0.0, tuple(each.cpu() for each in looked)

            _, seen = self._verbs.over(chosen, compute) if chosen else (0.0, [])
            for at, mine, best, which in zip(places, *seen, strict=bool(chosen)):
                own[at], likeliest[at], ids[at] = mine, best, which.to(torch.int32)
        else:
            for at, mine in zip(places, self._verbs.logprobs(engine, chosen), strict=True):
                own[at] = mine
        found = {"prompt_logprobs": spread(examples, own)} if asked.prompt_logprobs else {}
        if not most:
            return found
        tops = {"prompt_top_logprobs": spread(examples, likeliest), "prompt_top_tokens": spread(examples, ids)}
        return found | {name: flat.view(-1, most) for name, flat in tops.items()}
