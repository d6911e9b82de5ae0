"""The engine's primitives, alone: accumulation, activation checkpointing, log-probabilities, generation, state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from core.spec.training import AdamW, Linear, LoRA
from core.train.batch import IGNORE_INDEX, Batch
from core.train.checkpoint.rng import seed_all
from core.train.engine import Diverged, Engine
from core.train.evaluate import evaluate
from core.train.load import load_model
from core.train.logits import label_logits
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.optim.optimizers import build_optimizer
from core.train.optim.schedules import build_schedule
from core.train.stages.sft import sft_loss

CPU = torch.device("cpu")
LORA = LoRA(r=4, lora_alpha=8, lora_dropout=0.0)


def make(tiny: Path, *, method: LoRA | None = LORA, autocast: bool = False, clip: float | None = 1.0) -> Engine:
    seed_all(3)
    model = load_model(tiny, torch.bfloat16 if autocast and method else torch.float32)
    model = adapt_full(model) if method is None else adapt_lora(model, method)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Engine(
        model,
        build_optimizer(AdamW(learning_rate=1e-2, weight_decay=0.1), trained),
        build_schedule(Linear(warmup_ratio=0.1), 50),
        device=CPU,
        autocast=torch.bfloat16 if autocast else None,
        max_grad_norm=clip,
        pad_token_id=1,
    )


def batch(rows: int, seed: int = 0, longest: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(6, longest, (1,), generator=generator)) for _ in range(rows)]
    ids = torch.full((rows, max(lengths)), 1)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(2, 250, (length,), generator=generator)
        labels[row, length // 2 : length] = ids[row, length // 2 : length]
    return Batch(ids, labels, tuple(lengths), int((labels != IGNORE_INDEX).sum()))


def cut(whole: Batch, parts: int) -> list[Batch]:
    size = len(whole.lengths) // parts
    return [
        Batch(
            whole.input_ids[at : at + size],
            whole.labels[at : at + size],
            whole.lengths[at : at + size],
            int((whole.labels[at : at + size] != IGNORE_INDEX).sum()),
        )
        for at in range(0, len(whole.lengths), size)
    ]


def train(engine: Engine, windows: list[list[Batch]]) -> list[float]:
    losses = []
    for window in windows:
        items = sum(part.label_tokens for part in window)
        loss_sum = 0.0
        for part in window:
            loss = engine.forward(part, sft_loss)
            engine.backward(loss.total / items)
            loss_sum += float(loss.total.detach())
        engine.step()
        losses.append(loss_sum / items)
    return losses


@pytest.mark.parametrize("method", [None, LORA], ids=["full", "lora"])
def test_eight_rows_at_once_or_one_by_one_are_the_same_step(tiny_dir: Path, method: LoRA | None) -> None:
    """Rows differ in length and in label tokens, so that a mean of means would fail."""
    whole = [batch(8, seed) for seed in range(6)]
    at_once = train(make(tiny_dir, method=method), [[b] for b in whole])
    one_by_one = train(make(tiny_dir, method=method), [cut(b, 8) for b in whole])
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-5, atol=1e-5)


def test_activation_checkpointing_changes_no_bit(tiny_dir: Path) -> None:
    whole = [[batch(4, seed)] for seed in range(4)]
    method = LoRA(r=4, lora_alpha=8, lora_dropout=0.1)
    plain = make(tiny_dir, method=method)
    thrifty = make(tiny_dir, method=method)
    thrifty.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    losses = []
    for engine in (plain, thrifty):
        seed_all(5)
        losses.append(train(engine, whole))
    assert losses[0] == losses[1]


def test_the_head_on_label_positions_gives_the_loss_of_the_whole_model(tiny_dir: Path) -> None:
    engine, rows = make(tiny_dir), batch(5)
    ours = engine.forward(rows, sft_loss)
    mask = torch.arange(rows.input_ids.shape[1])[None, :] < torch.tensor(rows.lengths)[:, None]
    theirs = engine.model(input_ids=rows.input_ids, attention_mask=mask.long(), labels=rows.labels).loss
    torch.testing.assert_close(ours.total / ours.items, theirs, rtol=1e-5, atol=1e-6)


def test_the_schedule_scales_every_group_and_decay_spares_norms(tiny_dir: Path) -> None:
    engine = make(tiny_dir, method=None)
    decay = [group["weight_decay"] for group in engine.optimizer.param_groups]
    assert decay == [0.1, 0.0]
    assert all(p.dim() == 1 for p in engine.optimizer.param_groups[1]["params"])
    losses = train(engine, [[batch(4)] for _ in range(12)])
    assert losses[-1] < losses[0]
    assert engine.steps == 12
    rates = {group["lr"] for group in engine.optimizer.param_groups}
    assert rates == {1e-2 * build_schedule(Linear(warmup_ratio=0.1), 50)(11)}


def test_clipping_bounds_the_update_and_reports_the_norm_before(tiny_dir: Path) -> None:
    rows = batch(4)
    engine = make(tiny_dir, method=None, clip=1e-3)
    engine.optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=1.0)
    engine.schedule = lambda step: 1.0
    engine._base_learning_rates = [1.0]
    before = {name: p.detach().clone() for name, p in engine.trained_parameters.items()}
    engine.backward(engine.forward(rows, sft_loss).total)
    assert engine.step().grad_norm > 1.0
    moved = torch.stack([(p.detach() - before[name]).norm() for name, p in engine.trained_parameters.items()]).norm()
    assert float(moved) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("broken", ["gradient", "loss"])
def test_from_the_first_broken_step_on_nothing_changes(tiny_dir: Path, tmp_path: Path, broken: str) -> None:
    """Nobody looks at the figures in between: the optimizer itself skips this update and all that follow."""
    engine, calm = make(tiny_dir), make(tiny_dir)
    for each in (engine, calm):
        train(each, [[batch(2)], [batch(2, 1)]])
    factor = float("nan") if broken == "gradient" else 1.0
    loss = engine.forward(batch(2), sft_loss)
    engine.backward(loss.total * factor)
    engine.step(watch=loss.total / (0.0 if broken == "loss" else 1.0))
    train(engine, [[batch(2, 3)]])
    assert engine.steps == 4
    for name, parameter in calm.trained_parameters.items():
        assert torch.equal(parameter, engine.trained_parameters[name]), name
        states = (each.optimizer.state[each.trained_parameters[name]] for each in (engine, calm))
        assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True)), name
    for write in (engine.check, lambda: engine.save(tmp_path), lambda: engine.save_weights(tmp_path)):
        with pytest.raises(Diverged, match=r"at step 3; lower optimizer\.learning_rate"):
            write()
    assert not list(tmp_path.iterdir())
    (tmp_path / "good").mkdir()
    calm.save(tmp_path / "good")
    engine.load(tmp_path / "good")
    engine.check()
    assert train(engine, [[batch(2, 4)]]) == train(calm, [[batch(2, 4)]])


def test_an_optimizer_that_cannot_skip_is_asked_at_once(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    engine.optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=1.0)
    before = {name: p.detach().clone() for name, p in engine.trained_parameters.items()}
    engine.backward(engine.forward(batch(2), sft_loss).total * float("inf"))
    with pytest.raises(Diverged, match="at step 1"):
        engine.step()
    assert all(torch.equal(p, before[name]) for name, p in engine.trained_parameters.items())


def test_logprobs_are_those_of_the_labels(tiny_dir: Path) -> None:
    engine, rows = make(tiny_dir), batch(3)
    values = engine.logprobs(rows)
    assert [len(v) for v in values] == [(row != IGNORE_INDEX).sum() for row in rows.labels]
    loss = engine.forward(rows, sft_loss)
    torch.testing.assert_close(-torch.cat(values).sum(), loss.total.detach(), rtol=1e-5, atol=1e-4)


def test_generation_is_greedy_and_padding_does_not_matter(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    prompts = [[5, 6, 7], [9, 10, 11, 12, 13, 14]]
    together = engine.generate(prompts, max_new_tokens=5)
    alone = [engine.generate([prompt], max_new_tokens=5)[0] for prompt in prompts]
    assert together == alone
    assert engine.generate(prompts, max_new_tokens=5, temperature=1.0, seed=4) == engine.generate(
        prompts, max_new_tokens=5, temperature=1.0, seed=4
    )
    with engine.inference() as model:
        logits = model(input_ids=torch.tensor([prompts[1]])).logits
    assert int(logits[0, -1].argmax()) == together[1][0]


def test_looking_does_not_disturb(tiny_dir: Path) -> None:
    """Evaluation, log-probabilities and generation between steps leave the trajectory as it was, to the bit."""
    method = LoRA(r=4, lora_alpha=8, lora_dropout=0.2)
    quiet, watched = make(tiny_dir, method=method), make(tiny_dir, method=method)
    seed_all(5)
    expected = train(quiet, [[batch(4, seed)] for seed in range(4)])
    got = []
    seed_all(5)
    for seed in range(4):
        evaluate(watched, [batch(3, 50)], exact_match=True)
        watched.logprobs(batch(2))
        watched.generate([[5, 6]], max_new_tokens=3, temperature=1.0, seed=seed)
        got += train(watched, [[batch(4, seed)]])
    assert got == expected


def test_exact_match_is_greedy_decoding(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    prompts = [[5, 6, 7, 8], [20, 30, 40, 50]]
    answers = [engine.generate([prompt], max_new_tokens=4)[0] for prompt in prompts]
    answers[1][2] = (answers[1][2] + 1) % 250
    ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
    labels = ids.clone()
    labels[:, :4] = IGNORE_INDEX
    values = evaluate(engine, [Batch(ids, labels, (8, 8), 8)], exact_match=True)
    assert values["eval_exact_match"] == 0.5
    logits, targets = label_logits(engine.model.eval(), Batch(ids, labels, (8, 8), 8))
    assert values["eval_loss"] == pytest.approx(float(functional.cross_entropy(logits, targets)), rel=1e-5)


@pytest.mark.parametrize("method", [None, LoRA(r=4, lora_alpha=8, lora_dropout=0.1)], ids=["full", "lora"])
def test_state_at_any_micro_step(tiny_dir: Path, tmp_path: Path, method: LoRA | None) -> None:
    """Saved after every single backward pass and loaded into a fresh engine with other random numbers: same bits."""
    windows = [cut(batch(4, seed), 4) for seed in range(3)]
    reference = make(tiny_dir, method=method, autocast=True)
    expected = train(reference, windows)
    engine, losses = make(tiny_dir, method=method, autocast=True), []
    for number, window in enumerate(windows):
        items, loss_sum = sum(part.label_tokens for part in window), 0.0
        for part in window:
            folder = tmp_path / f"{number}-{engine.micro_steps}"
            folder.mkdir()
            engine.save(folder)
            engine = make(tiny_dir, method=method, autocast=True)
            seed_all(999)
            engine.load(folder)
            loss = engine.forward(part, sft_loss)
            engine.backward(loss.total / items)
            loss_sum += float(loss.total.detach())
        engine.step()
        losses.append(loss_sum / items)
    assert losses == expected
    for name, parameter in reference.trained_parameters.items():
        assert torch.equal(parameter, engine.trained_parameters[name]), name
    assert not any(path.suffix in (".pt", ".bin", ".pkl") for path in tmp_path.rglob("*"))


def test_a_checkpoint_of_another_model_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    make(tiny_dir).save(tmp_path)
    with pytest.raises(ValueError, match="another model"):
        make(tiny_dir, method=None).load(tmp_path)
    with pytest.raises(ValueError, match="another shape"):
        make(tiny_dir, method=LoRA(r=8, lora_alpha=8)).load(tmp_path)
