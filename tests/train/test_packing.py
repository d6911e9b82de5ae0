"""Packed rows are the same rows: logits, gradients and whole runs, whatever attention a model has; or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from core.errors import SpecError
from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW
from core.spec.run.exit_codes import EXIT_OK
from core.train.attention import packed
from core.train.attention.probe import prepare_packing
from core.train.base.rng import seed_all
from core.train.engine import Engine, build_engine
from core.train.logits import all_logits
from core.train.methods.lora import adapt_lora
from core.train.recipe import run
from tests.support.losses import by_kernels, summed
from tests.support.trainer import events, pairs, write_rows, write_run
from tests.train.test_batching import token_rows

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS: dict[str, tuple[PretrainedConfig, str]] = {
    # name: (configuration, how packed rows are kept apart)
    "llama": (LlamaConfig(**SIZES), "segments"),
    "qwen3": (Qwen3Config(**SIZES), "segments"),
    "mistral, window 8": (MistralConfig(**SIZES, sliding_window=8), "segments"),
    "gemma3, window 8": (Gemma3TextConfig(**SIZES, sliding_window=8), "segments"),
    "gemma2, soft cap": (Gemma2Config(**SIZES, sliding_window=8), "eager with a mask"),
    "gpt2": (
        GPT2Config(
            vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        ),
        "segments",
    ),
}
ROWS = (13, 5, 1, 30, 2, 9)
EXACT = {"rtol": 2e-4, "atol": 2e-5}
"""float32, one order of sums against another."""


def engine_of(config: PretrainedConfig, *, attention: str = "sdpa", lora: bool = False) -> Engine:
    seed_all(1)
    softcap = getattr(config, "attn_logit_softcapping", None)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if softcap else attention)
    with torch.no_grad():  # small random weights hardly look at other tokens: make attention count
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0 if "embed" not in name and "wte" not in name else 10.0)
    if lora:
        model = adapt_lora(model, LoRA(r=4, lora_alpha=8))
    return build_engine(model, AdamW(learning_rate=1e-3))


def compare(engine: Engine) -> None:
    """Every row alone, all side by side, and all packed in two orders: logits, loss and every gradient."""
    rows = token_rows(*ROWS, prompt=2)
    numbers = list(range(len(ROWS)))
    with engine.inference() as model:
        alone = [all_logits(model, rows.collate([row], 0))[0] for row in numbers]
        for order in (numbers, numbers[::-1]):
            together = torch.split(all_logits(model, rows.pack(order))[0], [ROWS[row] for row in order])
            for row, logits in zip(order, together, strict=True):
                torch.testing.assert_close(logits, alone[row], **EXACT)
    for loss_of in (summed, by_kernels):
        found = []
        for batches in ([rows.collate([row], 0) for row in numbers if ROWS[row] > 2], [rows.pack(numbers)]):
            engine.zero_grad()
            total = 0.0
            for batch in batches:
                loss = loss_of(engine, batch)
                engine.backward(loss.total / 60)
                total += float(loss.total.detach())
            gradients = {name: p.grad.clone() for name, p in engine.trained_parameters.items() if p.grad is not None}
            found.append((total, gradients))
        (loss_a, a), (loss_b, b) = found
        assert loss_a == pytest.approx(loss_b, rel=1e-5)
        assert a.keys() == b.keys() and a
        for name, gradient in a.items():
            largest = float(gradient.abs().max())
            torch.testing.assert_close(gradient, b[name], rtol=1e-3, atol=1e-4 * largest + 1e-7, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_gradients(name: str) -> None:
    config, kernel = MODELS[name]
    engine = engine_of(config)
    assert prepare_packing(engine)["attention"] == kernel
    compare(engine)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_by_transformers_own_mask(attention: str) -> None:
    """Where our attention cannot be set, positions that start anew make transformers build the mask."""
    engine = engine_of(LlamaConfig(**SIZES), attention=attention, lora=True)
    engine.model.get_base_model()._can_set_attn_implementation = lambda: False  # type: ignore[operator]
    assert prepare_packing(engine)["attention"] == f"{attention} with a mask"
    compare(engine)


def test_adapters_and_activation_checkpointing() -> None:
    engine = engine_of(LlamaConfig(**SIZES), lora=True)
    engine.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    assert prepare_packing(engine)["attention"] == "segments"
    compare(engine)


def test_no_mask_is_made_and_unpacked_batches_run_as_before() -> None:
    """The mask of the line is what packing is there to avoid: it must not come back unseen."""
    engine = engine_of(MistralConfig(**SIZES, sliding_window=40))
    rows = token_rows(*ROWS)
    with engine.inference() as model:
        before = all_logits(model, rows.collate([0, 3], 0))
        prepare_packing(engine)
        assert torch.equal(all_logits(model, rows.collate([0, 3], 0)), before)
        masks: list[Any] = []
        handles = [
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
            )
            for layer in model.model.layers  # type: ignore[union-attr]
        ]
        all_logits(model, rows.pack([0, 3]))
        for handle in handles:
            handle.remove()
    assert masks == [None, None]


def test_a_model_that_mixes_rows_is_refused() -> None:
    config = MambaConfig(vocab_size=260, hidden_size=64, state_size=8, num_hidden_layers=2)
    with pytest.raises(SpecError, match=r"cannot be trained on packed rows.*batching: tokens") as caught:
        prepare_packing(engine_of(config, attention="eager"))
    assert caught.value.field == "batching"


def test_the_probe_sees_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that forgets where rows end, as with a name that a model does not pass on."""
    attend = packed.attend

    def forgetful(*args: Any, segments: Any = None, **more: Any) -> Any:
        return attend(*args, **more)

    monkeypatch.setattr(packed, "attend", forgetful)
    engine = engine_of(LlamaConfig(**SIZES))
    record = prepare_packing(engine)
    assert record["attention"] == "sdpa with a mask"
    assert "differ by" in record["not"]["segments"]
    compare(engine)


def test_whole_runs_of_the_same_steps(tmp_path: Path, tiny_dir: Path) -> None:
    """One step an epoch holds all rows, however they are batched: the same trajectory."""
    train = write_rows(tmp_path / "train.jsonl", pairs(20))
    found = {}
    batchings: dict[str, Any] = {
        "rows": "rows",
        "tokens": {"type": "tokens", "tokens_per_batch": 100},
        "packed": {"type": "packed", "tokens_per_batch": 100},
    }
    for name, batching in batchings.items():
        sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 5} if name == "rows" else {}
        sizes = sizes or {"gradient_accumulation_steps": 16}
        training = {"max_steps": 5, "max_length": 64, "precision": "fp32", **sizes}
        optimizer = {"learning_rate": 5e-3}
        folder = write_run(tmp_path / name, tiny_dir, train, training=training, batching=batching, optimizer=optimizer)
        assert run(folder) == EXIT_OK, events(folder)[-1]
        found[name] = events(folder, "metrics")
    for name in ("tokens", "packed"):
        for ours, theirs in zip(found[name], found["rows"], strict=True):
            for figure in ("loss", "grad_norm", "epoch"):
                assert ours["values"][figure] == pytest.approx(theirs["values"][figure], rel=1e-4)
    assert all(event["values"]["padding_share"] == 0 for event in found["packed"])
    assert found["tokens"][0]["values"]["padding_share"] < found["rows"][0]["values"]["padding_share"]
    record = events(tmp_path / "packed", "run_record")[0]["record"]
    assert record["packing"] == {"attention": "segments"}
    saved = (tmp_path / "packed" / "artifacts" / "adapter" / "adapter_config.json").read_text()
    assert packed.NAME not in saved
