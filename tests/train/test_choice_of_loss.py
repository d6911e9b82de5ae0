"""Which form of the loss a run takes, and a batch of it: by what is trained, and by size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW
from core.train import policy
from core.train.batch import IGNORE_INDEX, Batch
from core.train.engine import Engine, build_engine
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model

VOCABULARY = 258


def engine(tiny: Path, targets: Any = "all-linear") -> Engine:
    """All parameters are trained where no targets are given."""
    torch.manual_seed(0)
    model: Any = load_model(tiny, torch.float32)
    lora = None if targets is None else LoRA(r=4, lora_alpha=8, target_modules=targets)
    model = adapt_full(model) if lora is None else adapt_lora(model, lora)
    return build_engine(model, AdamW(learning_rate=1e-3))


def batch(labels: int) -> Batch:
    ids = torch.randint(2, 250, (2, 12), generator=torch.Generator().manual_seed(1))
    learned = torch.full_like(ids, IGNORE_INDEX)
    learned.view(-1)[1 : 1 + labels] = ids.view(-1)[1 : 1 + labels]
    return Batch(ids, learned, (12, 12), labels)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The forms that were computed, in order."""
    found: list[str] = []
    for name in ("label_logits", "linear_cross_entropy"):
        real = getattr(policy, name)
        monkeypatch.setattr(policy, name, lambda *a, name=name, real=real, **k: (found.append(name), real(*a, **k))[1])
    return found


def test_a_frozen_head_always_takes_the_chunked_form(tiny_dir: Path, taken: list[str]) -> None:
    here = engine(tiny_dir)
    assert here.policy.about()["loss"] == {"kernel": "chunked", "backend": "portable"}  # the C kernels are for bfloat16
    here.policy.cross_entropy(batch(3))
    assert taken == ["linear_cross_entropy"]


def test_a_trained_head_takes_it_for_large_batches_with_the_same_result(
    tiny_dir: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stated tolerance: 1e-5, float32. At the bound whole logits, one label token above it chunks."""
    here = engine(tiny_dir, None)
    record = here.policy.about()["loss"]
    bound = 2**28 // (4 * VOCABULARY)
    assert record == {"kernel": "by size", "backend": "portable", "chunked_above_tokens": bound}
    results: list[list[Tensor]] = []
    for bound, wanted in ((9, "label_logits"), (8, "linear_cross_entropy")):
        monkeypatch.setattr(policy, "WHOLE_LOGITS_BYTES", bound * VOCABULARY * 4)
        record = here.policy.about()["loss"]
        assert record["chunked_above_tokens"] == bound
        taken.clear()
        here.zero_grad()
        total = here.policy.cross_entropy(batch(9))
        total.backward()  # type: ignore[no-untyped-call]
        assert taken == [wanted]
        results.append([total.detach(), *(p.grad.clone() for p in here.model.parameters() if p.grad is not None)])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)


def test_a_head_of_another_kind_takes_the_models_logits_and_the_record_says_why(
    tiny_dir: Path, taken: list[str]
) -> None:
    adapted = engine(tiny_dir, ["q_proj", "lm_head"])
    assert adapted.policy.about()["loss"] == {"kernel": "logits", "reason": "the output head has an adapter"}
    adapted.policy.cross_entropy(batch(3))
    assert taken == ["label_logits"]


def test_a_trained_bias_of_the_head_takes_the_models_logits(tiny_dir: Path) -> None:
    """The chunked form has no gradient for it: it would stay what it was, in silence."""
    here = engine(tiny_dir, None)
    head: Any = here.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    assert here.policy.about()["loss"] == {"kernel": "logits", "reason": "the output head's bias is trained"}
    head.bias.requires_grad_(False)
    assert here.policy.about()["loss"]["kernel"] == "by size"
