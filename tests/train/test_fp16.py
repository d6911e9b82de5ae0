"""fp16 with a loss scale: the rules of torch's own scaler, losses beside float32's, skipped steps, exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW, Linear
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.train.base.rng import seed_all
from core.train.base.stop import Stop
from core.train.batch import IGNORE_INDEX, Batch
from core.train.checkpoint import engine_state
from core.train.engine import Diverged, Engine, build_engine
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.model.scaler import LOWEST_SCALE, PATIENCE, LossScaler
from core.train.optim.schedules import build_schedule
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.losses import summed
from tests.support.preferences import preferences
from tests.support.trainer import events, pairs, run, weights, write_rows, write_run

STEPS, LABELS = 12, 30
SCHEDULE = build_schedule(Linear(warmup_ratio=0.1), 30)


def make(tiny: Path, *, scale: float | None = None, interval: int = 2000) -> Engine:
    """fp16 under a loss scale, or with None float32."""
    seed_all(3)
    model = load_model(tiny, torch.float32 if scale is None else torch.float16)
    model = adapt_lora(model, LoRA(r=4, lora_alpha=8, lora_dropout=0.0), autocast=scale is not None)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    return build_engine(
        model,
        AdamW(learning_rate=1e-2),
        SCHEDULE,
        autocast=None if scale is None else torch.float16,
        pad_token_id=1,
        scaler=None if scale is None else LossScaler(scale, growth_interval=interval),
    )


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 250, (3, 16), generator=generator)
    labels = ids.clone()
    labels[:, :6] = IGNORE_INDEX
    return Batch(ids, labels, (16, 16, 16), LABELS)


def step(engine: Engine, seed: int) -> tuple[float, Any]:
    loss = summed(engine, batch(seed))
    engine.backward(loss.total / LABELS)
    return float(loss.total.detach()) / LABELS, engine.step(watch=loss.total)


def trained(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.trained_parameters.items()}


def test_the_scale_takes_the_way_of_torchs_scaler() -> None:
    ours = LossScaler(1024.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for overflowed in (False, False, True, False, False, False, True, True, False, False, False, False, False, False):
        theirs.scale(parameter.sum()).backward()
        if overflowed:
            parameter.grad.fill_(float("inf"))  # type: ignore[union-attr]
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflowed=overflowed)
        assert ours.scale == theirs.get_scale()
    assert ours.skipped == 3


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_fp16_takes_the_way_of_float32(tiny_dir: Path, scale: float) -> None:
    """Stated tolerance: 1 % of each loss (fp16 has 11 bits, and twelve steps go from 5.6 to 5.0)."""
    exact, half = make(tiny_dir), make(tiny_dir, scale=scale)
    wanted = [step(exact, seed % 3)[0] for seed in range(STEPS)]
    found = [step(half, seed % 3)[0] for seed in range(STEPS)]
    assert wanted[-1] < 0.97 * wanted[0]
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)


def test_a_power_of_two_more_on_the_scale_changes_no_step(tiny_dir: Path) -> None:
    """Scaling rounds nothing as long as nothing under- or overflows: norms agree to fp16's rounding of the smallest."""
    norms = [[float(step(engine, seed)[1].grad_norm) for seed in range(4)] for engine in (
        make(tiny_dir, scale=1024.0), make(tiny_dir, scale=2048.0))]  # fmt: skip
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-3, atol=0)


def test_an_overflow_is_skipped_and_recovered_from(tiny_dir: Path) -> None:
    engine = make(tiny_dir, scale=2.0**40)
    before, skipped = trained(engine), 0
    while True:
        _, result = step(engine, skipped)
        if not result.skipped:
            break
        skipped += 1
        assert engine.steps == skipped and engine.micro_steps == 0
        assert all(torch.equal(p, before[name]) for name, p in trained(engine).items())
        assert not engine.optimizer.state
        assert result.learning_rate == 1e-2 * SCHEDULE(0), "the schedule waits"
        assert engine.scaler is not None and engine.scaler.scale == 2.0 ** (40 - skipped)
    assert 10 < skipped < 40
    assert engine.scaler is not None and engine.scaler.skipped == skipped
    _, result = step(engine, 50)
    assert result.learning_rate == 1e-2 * SCHEDULE(1)
    assert any(not torch.equal(p, before[name]) for name, p in trained(engine).items())


def test_what_no_scale_helps_is_told(tiny_dir: Path) -> None:
    engine = make(tiny_dir, scale=LOWEST_SCALE)
    for grad in (float("inf"), float("inf")):
        loss = summed(engine, batch(0))
        engine.backward(loss.total)
        next(iter(engine.trained_parameters.values())).grad.fill_(grad)  # type: ignore[union-attr]
        engine.step()
    with pytest.raises(Diverged, match="step 2"):
        engine.check()


def lose(engine: Engine, loss: float) -> Any:
    """A step whose loss is this, as of a forward pass beyond fp16's numbers."""
    found = summed(engine, batch(0))
    engine.backward(found.total * loss)
    return engine.step(watch=found.total.detach() * loss)


@pytest.mark.parametrize("loss", [float("inf"), float("nan")])
def test_a_loss_that_is_no_number_is_skipped_until_it_comes_again_and_again(tiny_dir: Path, loss: float) -> None:
    engine = make(tiny_dir, scale=1024.0)
    before = trained(engine)
    assert engine.scaler is not None
    for row in range(1, PATIENCE):
        assert lose(engine, loss).skipped
        assert (engine.scaler.scale, engine.scaler.lost, engine.steps) == (1024.0 / 2**row, row, row)
    assert all(torch.equal(p, before[name]) for name, p in trained(engine).items())
    assert not step(engine, 1)[1].skipped
    assert engine.scaler.lost == 0, "one that goes well begins the count anew"
    for _ in range(1, PATIENCE):
        assert lose(engine, loss).skipped
    engine.check()
    kept = trained(engine)
    assert not lose(engine, loss).skipped
    with pytest.raises(Diverged, match=f"step {2 * PATIENCE}"):
        engine.check()
    assert all(torch.equal(p, kept[name]) for name, p in trained(engine).items())


def test_without_a_scaler_one_such_loss_is_the_end(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    lose(engine, float("inf"))
    with pytest.raises(Diverged, match="step 1"):
        engine.check()


def test_the_scaler_goes_into_the_checkpoint_in_mid_window(tiny_dir: Path, tmp_path: Path) -> None:
    """Saved between two micro-steps of a window after a skip: the rest is the same to the bit."""
    undisturbed = make(tiny_dir, scale=2.0**30, interval=4)
    for seed in range(17):
        step(undisturbed, seed)
    undisturbed.backward(summed(undisturbed, batch(80)).total / 60)
    folder = tmp_path / "saved"
    folder.mkdir()
    engine_state.save(undisturbed, folder)
    resumed = make(tiny_dir, scale=1024.0, interval=4)
    engine_state.load(resumed, folder)
    assert resumed.scaler is not None and undisturbed.scaler is not None
    assert resumed.scaler.state_dict() == undisturbed.scaler.state_dict()
    assert resumed.scaler.skipped > 0
    for engine in (undisturbed, resumed):
        engine.backward(summed(engine, batch(81)).total / 60)
        engine.step()
        for seed in range(90, 100):
            step(engine, seed)
    assert resumed.scaler.state_dict() == undisturbed.scaler.state_dict()
    assert all(torch.equal(p, trained(undisturbed)[name]) for name, p in trained(resumed).items())


@pytest.mark.parametrize("to", [None, 256.0], ids=["float32", "fp16"])
def test_gradients_of_a_window_are_rescaled_for_another_precision(
    tiny_dir: Path, tmp_path: Path, to: float | None
) -> None:
    engine = make(tiny_dir, scale=1024.0) if to is None else make(tiny_dir)
    engine.backward(summed(engine, batch(0)).total / 30)
    (tmp_path / "saved").mkdir()
    engine_state.save(engine, tmp_path / "saved")
    other = make(tiny_dir, scale=to)
    engine_state.load(other, tmp_path / "saved")
    factor = 1 / 1024.0 if to is None else to
    for name, parameter in other.trained_parameters.items():
        saved = engine.trained_parameters[name].grad
        assert saved is not None and parameter.grad is not None
        assert torch.equal(parameter.grad, saved * factor)


# --- whole runs ------------------------------------------------------------------------------------------


class AtMicroStep(Stop):
    """Asked to leave at the n-th place of the training phase where the run looks."""

    def __init__(self, run_dir: Path, place: int) -> None:
        self.run_dir, self.left = run_dir, place

    @property  # type: ignore[override]
    def requested(self) -> bool:
        if any(event["phase"] == "training" for event in events(self.run_dir, "phase")):
            self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(("method", "stage"), [("qlora", "sft"), ("full", "sft"), ("lora", "dpo")])
def test_a_run_in_fp16_and_its_resume_to_the_bit(tiny_dir: Path, tmp_path: Path, method: str, stage: str) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", pairs(20) if stage == "sft" else preferences(20))
    axes: dict[str, Any] = {
        "stage": stage,
        "method": "full" if method == "full" else {"type": method, "r": 4},
        "optimizer": {"learning_rate": 1e-3 if method == "full" else 1e-2},
        "training": {
            "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "precision": "fp16",
            "max_length": 64,
        },
    }  # fmt: skip
    calm = write_run(tmp_path / "calm", tiny_dir, rows, **axes)
    assert run(calm) == EXIT_OK
    record = events(calm, "run_record")[0]["record"]
    assert record["precision"]["compute"] == "fp16"
    assert record["precision"]["weights"] == ("float32" if method == "full" else "float16")
    assert record["precision"]["loss_scaler"]["initial_scale"] == 1024.0
    last = events(calm, "metrics")[-1]["values"]
    assert last["loss_scale"] == 1024.0 and last["skipped_steps"] == 0
    assert last["loss"] < events(calm, "metrics")[0]["values"]["loss"]
    first = write_run(tmp_path / "first", tiny_dir, rows, **axes)
    assert run(first, AtMicroStep(first, 5)) == EXIT_CHECKPOINTED
    (saved,) = events(first, "checkpoint")
    assert saved["micro_step"] > 0
    second = write_run(tmp_path / "second", tiny_dir, rows, resume_from=[first], **axes)
    assert run(second) == EXIT_OK
    assert weights(second) == weights(calm)
    state = json.loads((first / saved["path"] / "state.json").read_text())
    assert state["scaler"] == {"scale": 1024.0, "steps_since_change": saved["step"], "skipped": 0, "lost": 0}


LOUD = "~"
"""Its embedding is beyond fp16's numbers in `loud_dir`."""


@pytest.fixture(scope="module")
def loud_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loud") / "model"
    model: Any = load_model(tiny_dir, torch.float32)
    tokenizer = load_tokenizer(tiny_dir)
    model.config.tie_word_embeddings = False  # the head stays quiet
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(LOUD)] = 1e5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_forward_pass_that_overflows_costs_a_step_and_no_run(loud_dir: Path, tmp_path: Path) -> None:
    """One row of twenty overflows. Stopped between it and the end of its window, the rest is the same to the bit."""
    rows = [*pairs(19), {"prompt": f"count {LOUD}:", "completion": " x"}]
    axes: dict[str, Any] = {
        "method": {"type": "lora", "r": 4},
        "optimizer": {"learning_rate": 1e-2},
        "training": {
            "max_steps": 5, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "precision": "fp16",
            "max_length": 64,
        },
    }  # fmt: skip
    train = write_rows(tmp_path / "rows.jsonl", rows)
    calm = write_run(tmp_path / "calm", loud_dir, train, **axes)
    assert run(calm) == EXIT_OK, events(calm)[-1]
    told = [event["values"] for event in events(calm, "metrics")]
    (lost,) = (number for number, values in enumerate(told) if "loss" not in values)
    assert [values["skipped_steps"] for values in told] == [0] * lost + [1] * (5 - lost)
    assert told[-1]["loss_scale"] == 512.0
    (notice,) = (event for event in events(calm, "notice") if event["code"] == "step_skipped")
    assert f"at step {lost + 1}:" in notice["message"]
    (result,) = events(calm, "result")
    losses = [values["loss"] for values in told if "loss" in values]
    assert result["result"]["train_loss"] == pytest.approx(sum(losses) / 4)
    first = write_run(tmp_path / "first", loud_dir, train, **axes)
    assert run(first, AtMicroStep(first, 3 * lost + 2)) == EXIT_CHECKPOINTED  # it looks three times a step
    (saved,) = events(first, "checkpoint")
    state = json.loads((first / saved["path"] / "state.json").read_text())
    assert (saved["step"], saved["micro_step"], state["parts"]["ledger"]["window_loss"]) == (lost, 2, None)
    second = write_run(tmp_path / "second", loud_dir, train, resume_from=[first], **axes)
    assert run(second) == EXIT_OK
    assert weights(second) == weights(calm)
    assert "loss" not in events(second, "metrics")[0]["values"]


def test_a_run_that_has_only_lost_steps_has_diverged(loud_dir: Path, tmp_path: Path) -> None:
    """Fewer than would have ended it on the way: nothing was learnt, and there is no loss to tell."""
    axes: dict[str, Any] = {
        "method": {"type": "lora", "r": 4},
        "training": {"max_steps": PATIENCE - 1, "precision": "fp16", "max_length": 64},
    }
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"count {LOUD}:", "completion": " x"}] * PATIENCE)
    run_dir = write_run(tmp_path / "run", loud_dir, rows, **axes)
    assert run(run_dir) == EXIT_FAILED
    error = events(run_dir)[-1]
    assert (error["code"], error["failure"]) == ("diverged", "user"), error
    assert f"in none of {PATIENCE - 1} step(s)" in error["message"]
    assert len(events(run_dir, "metrics")) == PATIENCE - 1
