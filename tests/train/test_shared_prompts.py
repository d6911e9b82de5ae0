"""A prompt that is computed once for both answers of its pair: the same log-probabilities, gradients and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from core.spec.run.exit_codes import EXIT_OK
from core.train.attention.probe import prepare_packing, share_prompts
from core.train.data.dataset import TokenDataset
from tests.support.losses import by_kernels
from tests.support.preferences import preferences
from tests.support.trainer import PLAIN, events, run, write_rows, write_run
from tests.train.test_packing import EXACT, MODELS, SIZES, engine_of

PAIRS = ((12, 6, 9), (1, 5, 2), (20, 1, 1), (7, 10, 3))
"""Tokens of a prompt, and of its two answers."""


def pair_rows() -> TokenDataset:
    """The last pair's answers begin with the same two tokens, and the rejected one is the beginning of the other."""
    ids: list[int] = []
    learned: list[bool] = []
    ends: list[int] = []
    for number, (prompt, *answers) in enumerate(PAIRS):
        for place, answer in enumerate(answers):
            ids += [(7 * at + 31 * number) % 250 + 1 for at in range(prompt)]
            ids += [(11 * at + 17 * number + (90 * place if number < 3 else 0)) % 250 + 1 for at in range(answer)]
            learned += [False] * prompt + [True] * answer
            ends.append(len(ids))
    starts = np.array([0, *ends[:-1]])
    tokens, flags = np.array(ids, dtype=np.int32), np.array(learned)
    return TokenDataset(tokens, flags, starts, np.array(ends), np.arange(len(PAIRS)), sequences=2)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_log_probabilities_and_gradients(name: str) -> None:
    """Those of the sequences apart. What two answers have in common at their beginning is computed once, too; at least
    one token stays its own."""
    engine = engine_of(MODELS[name][0], lora=name == "llama")
    assert prepare_packing(engine)["attention"] == "segments"
    assert share_prompts(engine, longest=30) is None
    rows, numbers = pair_rows(), range(len(PAIRS))
    apart, padded = rows.pack(numbers), rows.collate(numbers, 0)
    rows.share_prompts = True
    shared = rows.pack(numbers)
    assert rows.shared_tokens() == 12 + 1 + 20 + 9
    assert shared.input_ids.shape[1] == apart.input_ids.shape[1] - rows.shared_tokens()
    assert shared.slots == shared.tokens == apart.tokens
    assert torch.equal(shared.row_ids(), apart.row_ids())
    found = []
    for batch in (apart, shared, padded):
        engine.zero_grad()
        logprobs = torch.cat(engine.logprobs(batch))
        engine.backward(by_kernels(engine, batch, 40).total)
        gradients = {at: p.grad.clone() for at, p in engine.trained_parameters.items() if p.grad is not None}
        found.append((logprobs, gradients))
    expected, wanted = found[0]
    for logprobs, gradients in found[1:]:
        torch.testing.assert_close(logprobs, expected, **EXACT)
        assert gradients.keys() == wanted.keys() and gradients
        for at, gradient in gradients.items():
            largest = float(wanted[at].abs().max())
            torch.testing.assert_close(gradient, wanted[at], rtol=1e-3, atol=1e-4 * largest + 1e-7, msg=at)


def test_a_window_decides_with_the_longest_sequence() -> None:
    engine = engine_of(MistralConfig(**SIZES, sliding_window=40))
    prepare_packing(engine)
    assert share_prompts(engine, longest=40) is None
    assert share_prompts(engine, longest=41) == "a layer looks back 40 tokens, and the longest sequence has 41"
    narrow = engine_of(MistralConfig(**SIZES, sliding_window=8))
    prepare_packing(narrow)
    assert "a layer needs a mask" in str(share_prompts(narrow, longest=8))


def test_attention_that_cannot_be_replaced() -> None:
    engine = engine_of(LlamaConfig(**SIZES), attention="eager")
    prepare_packing(engine)
    assert "cannot be replaced" in str(share_prompts(engine, longest=8))


AXES: dict[str, dict[str, Any]] = {
    "dora, checkpointed, rows streamed": {
        "method": {"type": "lora", "r": 4, "use_dora": True},
        "memory": {"gradient_checkpointing": True},
        "stage": {"type": "dpo", "loss": "kto_pair"},
    },
    "qlora, blocks streamed": {
        "method": {"type": "qlora", "r": 4},
        "memory": {"stream": {"type": "host"}},
        "stage": "orpo",
    },
}


@pytest.mark.parametrize("name", AXES)
def test_runs_with_whatever_else_a_job_asks_for(tmp_path: Path, tiny_dir: Path, name: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", preferences(12))
    source = {"type": "path", "path": str(rows), "format": "preference"}
    data = {"train": source, "rendering": PLAIN, "streaming": "rows streamed" in name}
    found = []
    for shared in (True, False):
        folder = write_run(
            tmp_path / str(shared),
            tiny_dir,
            rows,
            data=data,
            batching={"type": "packed", "tokens_per_batch": 1280, "share_prompts": shared},
            training={"max_steps": 2, "max_length": 64, "precision": "fp32"},
            optimizer={"learning_rate": 5e-3},
            **AXES[name],
        )
        assert run(folder) == EXIT_OK, events(folder)[-1]
        record = events(folder, "run_record")[0]["record"]["packing"]["prompts"]
        assert record["computed"] == ("once" if shared else "for each answer"), record
        found.append(events(folder, "metrics"))
    for ours, theirs in zip(*found, strict=True):
        for figure in ("loss", "grad_norm", "rewards/margins"):
            assert ours["values"][figure] == pytest.approx(theirs["values"][figure], rel=1e-4, abs=1e-6), figure
        assert ours["values"]["padding_share"] == 0
