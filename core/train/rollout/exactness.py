"""Sampler and trainer with the same bits (`stage.sampler: exact`): set up, and tried on the device."""

from __future__ import annotations

import torch

from core.errors import SpecError
from core.train.attention.exact import ROWS, Exact, adapters_at_work
from core.train.engine import Engine
from core.train.generation.sampling import Key, SamplingParams
from core.train.logits import divides
from core.train.loss.head import OutputHead
from core.train.rollout.buffer import Rollout

PROMPTS, SAMPLES, TOKENS = (ROWS + 5, 3), 3, 6
"""Tokens of the trial's prompts, answers to each, and tokens of an answer."""


def compute_exactly(engine: Engine, room: int, temperature: float) -> None:
    """Have the engine draw tokens with the log-probabilities that it computes for them in training, to the bit. `room`:
    tokens of the longest prompt with its answer. SpecError where the model has no form for it, or where a trial with
    the model as it is finds another bit."""
    head = engine.policy.head()
    if isinstance(head, str) or not divides(head, temperature):
        form = head if isinstance(head, str) else "its head caps or shifts the logits that the temperature divides"
        raise _refused(f"the model's log-probabilities are made from whole logits ({form})")
    exact = Exact(room)
    try:
        exact.install(engine.model)
        engine.policy.exact = exact
        with adapters_at_work(engine.model):
            why = engine.without_slots(room) or _differs(engine, head, temperature)
    except NotImplementedError as reason:
        raise _refused(str(reason)) from reason
    if why is not None:
        raise _refused(why)


def _differs(engine: Engine, head: OutputHead, temperature: float) -> str | None:
    """Why drawn tokens have other log-probabilities than in training; None: they have the same."""
    vocabulary = int(head.weight.shape[0])
    prompts = [[(at * 7919 + 31 * n + 11) % vocabulary for at in range(tokens)] for n, tokens in enumerate(PROMPTS)]
    keys: list[list[Key]] = [[(0, n, sample) for sample in range(SAMPLES)] for n in range(len(prompts))]
    # Fewer slots than answers: each is made beside others than in training.
    found = engine.complete(prompts, keys, SamplingParams(TOKENS, temperature), slots=len(prompts) * SAMPLES - 1)
    answers = [answer for mine in found for answer in mine]
    nothing = [0.0] * len(answers)
    rollout = Rollout(0, prompts, [], [one.tokens for one in answers], [True] * len(answers), {}, nothing, nothing)
    batch = rollout.dataset().collate(range(len(answers)), engine.pad_token_id).to(engine.device)
    with engine.training_pass():
        trained = engine.policy.logprobs(batch, temperature).detach().cpu()
    drawn = torch.tensor([p for one in answers for p in one.logprobs])
    if torch.equal(drawn, trained):
        return None
    return f"on this device they differ by up to {float((drawn - trained).abs().max()):.2g}"


def _refused(why: str) -> SpecError:
    return SpecError(
        f"tokens cannot be drawn with exactly the log-probabilities of training: {why}; remove `stage.sampler`",
        field="stage.sampler",
        code="sampler_not_exact",
    )
