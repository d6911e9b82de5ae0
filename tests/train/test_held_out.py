"""Figures of held-out rows: the same from chunks as from whole logits, and in no more memory than training takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.jobs.admission import oom_backoff
from core.plan.constants import CHUNK_BYTES
from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW
from core.spec.axes.runtime import HeldOut
from core.spec.job import JobSpec
from core.spec.run.exit_codes import EXIT_OK
from core.train.data.dataset import TokenDataset, eval_batches, spans
from core.train.engine import Engine, build_engine
from core.train.evaluation.held_out import evaluate
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.policy import PolicyModel
from core.train.recipe import run
from core.train.stages.sft import SupervisedFineTuning
from tests.support.losses import summed
from tests.support.trainer import events, write_rows, write_run

VOCABULARY = 258
WHY = "the device computes it wrongly"
METHODS: list[Any] = [None, "all-linear", ["q_proj", "lm_head"]]
NAMES = ["full", "lora", "head"]


def make(tiny: Path, targets: Any, *, autocast: bool = False) -> Engine:
    """All parameters are trained where no targets are given."""
    torch.manual_seed(0)
    model: Any = load_model(tiny, torch.float32)
    model = adapt_full(model) if targets is None else adapt_lora(model, LoRA(r=4, lora_alpha=8, target_modules=targets))
    return build_engine(model, AdamW(learning_rate=1e-2), autocast=torch.bfloat16 if autocast else None)


def token_rows(*lengths: int, prompt: int) -> TokenDataset:
    """The first `prompt` tokens of each row are not learned."""
    ends = np.cumsum(lengths)
    ids = np.arange(ends[-1], dtype=np.int32) % 7 + 3
    starts = ends - np.array(lengths)
    learned = np.ones(len(ids), dtype=np.bool_)
    learned[[start + at for start in starts for at in range(prompt)]] = False
    return TokenDataset(ids, learned, starts, ends, np.arange(len(lengths)))


class Logits(TorchDispatchMode):
    """Most rows of what is as wide as the vocabulary, the model's own weights aside."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.rows, self.weights = 0, {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[-1] != VOCABULARY:
                continue
            if leaf.untyped_storage().data_ptr() not in self.weights:
                self.rows = max(self.rows, leaf.numel() // VOCABULARY)
        return result


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("targets", METHODS[:2], ids=NAMES[:2])
def test_figures_are_those_of_whole_logits(tiny_dir: Path, targets: Any, autocast: bool) -> None:
    """Counts are equal. Stated tolerance of the loss: 1e-6 relative, in bf16 too, where both round the same logits."""
    rows = token_rows(*range(2, 40), prompt=1)
    found = []
    for veto in (None, WHY):
        engine = make(tiny_dir, targets, autocast=autocast)
        engine.policy.head(veto)
        learn(engine, rows)  # so that some tokens are right
        found.append((evaluate(engine, SupervisedFineTuning(), eval_batches(rows, 8, 0, most_tokens=128)), engine))
    (ours, chunks), (wanted, _) = found
    assert ours["eval_exact_match"] == wanted["eval_exact_match"]
    assert ours["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)
    chunks.policy.head()
    for batch in eval_batches(rows, 8, 0, most_tokens=128):
        right = [engine.evaluate(batch, PolicyModel.figures).right for _, engine in found]
        assert torch.equal(*right) and 0 < right[0].sum() < len(right[0])


def learn(engine: Engine, rows: Any) -> None:
    """A few steps from whole logits, the same for all."""
    for _ in range(6):
        batch = rows.collate(range(20, 30), 0)
        engine.backward(summed(engine, batch).total / batch.label_tokens)
        engine.step()


@pytest.mark.parametrize("targets", METHODS, ids=NAMES)
def test_whole_logits_are_made_only_for_a_head_that_is_not_known(
    tiny_dir: Path, targets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor that torch makes in an evaluation is looked at: 8 rows of 64 tokens, chunks of 32 labels."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 32 * 4 * VOCABULARY)
    engine, rows = make(tiny_dir, targets), token_rows(*[64] * 8, prompt=1)
    batches = list(eval_batches(rows, 8, 0, most_tokens=512))
    assert len(batches) == 1 and batches[0].label_tokens > 32 * 10
    engine.policy.head()  # looks at 8 tokens
    with Logits(engine.model) as seen:
        evaluate(engine, SupervisedFineTuning(), batches)
        engine.logprobs(batches[0])
    assert seen.rows == (batches[0].label_tokens if targets == METHODS[2] else 32)


# --- batches -----------------------------------------------------------------------------------------------


def test_batches_keep_to_rows_and_tokens() -> None:
    assert spans([], 8, 100) == []
    assert spans([1] * 5, 2, 100) == [(0, 2), (2, 4), (4, 5)]
    assert spans([10, 20, 30, 40, 500, 600], 8, 90) == [(0, 3), (3, 4), (4, 5), (5, 6)], "a longer row is alone"
    rows = token_rows(9, 3, 30, 12, 5, 31, 2, prompt=1)
    whole = list(eval_batches(rows, 4, 0, most_tokens=36))
    assert all(batch.slots <= 36 and len(batch.lengths) <= 4 for batch in whole)
    assert sorted(length for batch in whole for length in batch.lengths) == sorted(rows.lengths)
    shares = [list(eval_batches(rows, 4, 0, most_tokens=36, rank=rank, world=2)) for rank in range(2)]
    assert [batch.lengths for share in shares for batch in share] == [
        batch.lengths for rank in range(2) for batch in whole[rank::2]
    ]


def test_a_pass_over_held_out_rows_has_no_more_tokens_than_one_of_training(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of prompts with what is answered. 32 rows are asked for; training takes two."""
    passes: list[tuple[str, int]] = []
    evaluated, generate = Engine.evaluate, Engine.generate

    def measured(engine: Engine, batch: Any, function: Any) -> Any:
        passes.append(("figures", batch.slots))
        return evaluated(engine, batch, function)

    def answered(engine: Engine, prompts: Any, **options: Any) -> Any:
        width = max(map(len, prompts)) + options["max_new_tokens"]
        passes.append(("answers", len(prompts) * width))
        return generate(engine, prompts, **options)

    monkeypatch.setattr(Engine, "evaluate", measured)
    monkeypatch.setattr(Engine, "generate", answered)
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"count to {n}:", "completion": " x" * (n % 9 + 1)} for n in range(1, 40)]
    )
    samples = {"type": "greedy", "rows": 12, "max_new_tokens": 4}
    run_dir = write_run(
        tmp_path / "run",
        tiny_dir,
        rows,
        held_out=rows,
        evaluation={"type": "held_out", "per_device_eval_batch_size": 32, "samples": samples},
        training={"max_steps": 1, "per_device_train_batch_size": 2, "precision": "fp32", "max_length": 32},
        method={"type": "lora", "r": 4},
    )
    assert run(run_dir) == EXIT_OK, events(run_dir, "error")
    for kind in ("figures", "answers"):
        sizes = [slots for name, slots in passes if name == kind]
        assert 32 < max(sizes) <= 2 * 32, kind


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        ({}, 4),
        ({"training": {"per_device_train_batch_size": 4}}, 2),
        ({"training": {"per_device_train_batch_size": 1}}, None),
        ({"batching": {"type": "tokens", "tokens_per_batch": 512}}, 32),
        ({"training": {"per_device_train_batch_size": 1}, "samples": "greedy"}, 32),
    ],
    ids=["8 rows", "4 rows", "one row", "tokens", "answers"],
)
def test_out_of_memory_cuts_rows_that_a_pass_has(axes: dict[str, Any], wanted: int | None) -> None:
    """64 rows are asked for; a pass has no more tokens than one of training."""
    evaluation = {"per_device_eval_batch_size": 64, "samples": axes.pop("samples", "none")}
    job = {"model": "a/b", "data": {"train": "/t", "eval": "/e"}, "evaluation": {"type": "held_out", **evaluation}}
    spec = JobSpec.model_validate(job | axes)
    assert isinstance(spec.evaluation, HeldOut)
    assert oom_backoff.smaller(spec, oom_backoff.EVAL_BATCH) == (
        None if wanted is None else {oom_backoff.EVAL_BATCH: wanted}
    )


def test_a_run_with_whole_logits_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    """For an adapter on the head, which the plan counts as well (tests/unit/test_plan_memory.py)."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    for targets, told in ((["q_proj"], []), (["q_proj", "lm_head"], ["whole_logits"])):
        run_dir = write_run(
            tmp_path / targets[-1],
            tiny_dir,
            rows,
            held_out=rows,
            evaluation={"type": "held_out"},
            training={"max_steps": 1, "precision": "fp32", "max_length": 32},
            method={"type": "lora", "r": 4, "target_modules": targets},
        )
        assert run(run_dir) == EXIT_OK, events(run_dir, "error")
        found = {event["code"]: event["message"] for event in events(run_dir, "notice")}
        assert [code for code in found if code == "whole_logits"] == told
        (record,) = events(run_dir, "run_record")
        if told:
            assert "the output head has an adapter" in found["whole_logits"]
            assert record["record"]["loss"]["kernel"] == "logits"
