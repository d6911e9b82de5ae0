"""KTO's answers of other rows, which go through the model behind the prompts of the step's own rows: the same
log-probabilities, gradients and runs as in a pass of their own before the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.attention.probe import prepare_packing
from core.train.batch import Batch, continue_prompts
from core.train.examples.mismatched import with_mismatched_answers
from core.train.policy import PolicyModel
from core.train.stage import Loss, Totals
from tests.support.preferences import judged
from tests.support.trainer import PLAIN, events, run, weights, write_rows, write_run
from tests.train.test_activations import InWindow
from tests.train.test_batching import token_rows
from tests.train.test_packing import EXACT, MODELS, engine_of

LENGTHS = (14, 9, 20, 6)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_log_probabilities_and_gradients(name: str) -> None:
    engine = engine_of(MODELS[name][0], lora=name == "llama")
    assert prepare_packing(engine)["attention"] == "segments"
    rows, numbers = with_mismatched_answers(token_rows(*LENGTHS, prompt=4), 0), range(len(LENGTHS))
    own, others = rows.pack(numbers), rows.pack(numbers, (1,))
    both = continue_prompts(own, others)
    assert both.beside is not None
    assert both.beside.input_ids.shape[1] == others.input_ids.shape[1] - 3 * len(LENGTHS), (
        "3 of 4 tokens of each prompt"
    )
    assert both.beside.lengths == others.lengths and both.beside.label_counts() == others.label_counts()
    beside: list[Tensor] = []

    def loss(policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        if batch.beside is None:
            logps = policy.sequence_logprobs(batch)
        else:
            logps, found = policy.continued(batch, policy.logprobs)
            beside.append(found)
        return Loss(logps.sum() / 40, {"loss": logps.detach().double().sum()})

    gradients = []
    for batch in (own, both):
        engine.zero_grad()
        engine.backward(engine.forward(batch, loss, {}).total)
        gradients.append({at: p.grad.clone() for at, p in engine.trained_parameters.items() if p.grad is not None})
    assert engine.model.training
    assert not beside[0].requires_grad
    torch.testing.assert_close(beside[0], torch.cat(engine.logprobs(others)), **EXACT)
    assert gradients[0] and gradients[0].keys() == gradients[1].keys()
    for at, gradient in gradients[1].items():
        assert torch.equal(gradient, gradients[0][at]), at


def write(folder: Path, model: Path, **axes: Any) -> Path:
    rows = write_rows(folder.with_suffix(".jsonl"), judged(12))
    return write_run(
        folder,
        model,
        rows,
        data={"train": {"type": "path", "path": str(rows), "format": "kto"}, "rendering": PLAIN},
        stage={"type": "kto", "undesirable_weight": 0.01},
        method={"type": "lora", "r": 4},
        training={"max_steps": 4, "max_length": 64, "precision": "fp32", "seed": 3},
        optimizer={"learning_rate": 2e-2},
        **axes,
    )


def test_a_run_is_the_same_and_resumes_to_the_bit(tmp_path: Path, tiny_dir: Path) -> None:
    found = {}
    for name, shared in {"continued": True, "before": False}.items():
        batching = {"type": "packed", "tokens_per_batch": 400, "share_prompts": shared}
        folder = write(tmp_path / name, tiny_dir, batching=batching)
        assert run(folder) == EXIT_OK, events(folder)[-1]
        prompts = events(folder, "run_record")[0]["record"]["packing"]["prompts"]
        assert prompts["computed"] == ("once, where a step is one batch" if shared else "for each answer"), prompts
        found[name] = events(folder, "metrics")
    assert max(event["values"]["kl"] for event in found["before"]) > 0.01
    for ours, theirs in zip(*found.values(), strict=True):
        for figure in ("loss", "grad_norm", "kl", "rewards/margins", "total_tokens"):
            assert ours["values"][figure] == pytest.approx(theirs["values"][figure], rel=1e-3, abs=1e-6), figure
    batching = {"type": "packed", "tokens_per_batch": 400}
    attempts: list[Path] = []
    codes: list[int] = []
    while not codes or codes[-1] == EXIT_CHECKPOINTED:
        folder = write(tmp_path / f"{len(attempts)}", tiny_dir, batching=batching, resume_from=attempts[::-1])
        codes.append(run(folder, InWindow(folder, 1 + len(attempts) % 2)))
        attempts.append(folder)
        assert len(attempts) < 12
    assert codes[-1] == EXIT_OK and len(codes) > 2, codes
    assert 1 in {event["micro_step"] for folder in attempts for event in events(folder, "checkpoint")}
    steps = {event["step"]: event["values"] for folder in attempts for event in events(folder, "metrics")}
    for event in found["continued"]:
        for figure in ("loss", "kl", "grad_norm"):
            assert steps[event["step"]][figure] == event["values"][figure], figure
    assert weights(attempts[-1]) == weights(tmp_path / "continued")
