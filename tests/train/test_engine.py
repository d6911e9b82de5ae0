"""The engine's primitives, alone: accumulation, activation checkpointing, log-probabilities, generation, state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, Trainer

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW, Linear
from core.train.base.rng import seed_all
from core.train.batch import IGNORE_INDEX, Batch
from core.train.checkpoint import engine_state
from core.train.engine import Diverged, Engine, build_engine
from core.train.evaluation.held_out import evaluate
from core.train.logits import label_logits
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora
from core.train.model.load import load_model
from core.train.optim.groups import without_decay
from core.train.optim.schedules import build_schedule
from core.train.stages.sft import SupervisedFineTuning
from tests.support.losses import summed

CPU = torch.device("cpu")
LORA = LoRA(r=4, lora_alpha=8, lora_dropout=0.0)


def make(tiny: Path, *, method: LoRA | None = LORA, autocast: bool = False, clip: float | None = 1.0) -> Engine:
    seed_all(3)
    model = load_model(tiny, torch.bfloat16 if autocast and method else torch.float32)
    model = adapt_full(model) if method is None else adapt_lora(model, method)
    return build_engine(
        model,
        AdamW(learning_rate=1e-2, weight_decay=0.1),
        build_schedule(Linear(warmup_ratio=0.1), 50),
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
            loss = summed(engine, part)
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
    ours = summed(engine, rows)
    mask = torch.arange(rows.input_ids.shape[1])[None, :] < torch.tensor(rows.lengths)[:, None]
    theirs = engine.model(input_ids=rows.input_ids, attention_mask=mask.long(), labels=rows.labels).loss
    torch.testing.assert_close(ours.total / rows.label_tokens, theirs, rtol=1e-5, atol=1e-6)


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


FAMILIES = {
    "gpt2": {"n_layer": 1, "n_embd": 32, "n_head": 2},
    "gptj": {"n_layer": 1, "n_embd": 32, "n_head": 2, "rotary_dim": 8},
    "gpt_bigcode": {"n_layer": 1, "n_embd": 32, "n_head": 2},
    "bloom": {"n_layer": 1, "hidden_size": 32, "n_head": 2},
    "falcon": {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "new_decoder_architecture": True,
               "num_kv_heads": 1},
    "mpt": {"n_layers": 1, "d_model": 32, "n_heads": 2},
    "opt": {"num_hidden_layers": 1, "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 2,
            "word_embed_proj_dim": 32},
    "llama": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    "qwen3": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                    "num_key_value_heads": 2, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_spares_what_transformers_spares(family: str) -> None:
    config = CONFIG_MAPPING[family](vocab_size=64, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config)
    decayed = Trainer.get_decay_parameter_names(object.__new__(Trainer), model)
    assert {name for name, _ in model.named_parameters()} - set(decayed) == without_decay(model)


def test_clipping_bounds_the_update_and_reports_the_norm_before(tiny_dir: Path) -> None:
    rows = batch(4)
    engine = make(tiny_dir, method=None, clip=1e-3)
    engine.optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=1.0)
    engine.schedule = lambda step: 1.0
    engine._base_learning_rates = [1.0]
    before = {name: p.detach().clone() for name, p in engine.trained_parameters.items()}
    engine.backward(summed(engine, rows).total)
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
    loss = summed(engine, batch(2))
    engine.backward(loss.total * factor)
    engine.step(watch=loss.total / (0.0 if broken == "loss" else 1.0))
    train(engine, [[batch(2, 3)]])
    assert engine.steps == 4
    for name, parameter in calm.trained_parameters.items():
        assert torch.equal(parameter, engine.trained_parameters[name]), name
        states = (each.optimizer.state[each.trained_parameters[name]] for each in (engine, calm))
        assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True)), name
    saves = (partial(save, engine, tmp_path) for save in (engine_state.save, engine_state.save_weights))
    for write in (engine.check, *saves):
        with pytest.raises(Diverged, match=r"at step 3; lower optimizer\.learning_rate"):
            write()
    assert not list(tmp_path.iterdir())
    (tmp_path / "good").mkdir()
    engine_state.save(calm, tmp_path / "good")
    engine_state.load(engine, tmp_path / "good")
    engine.check()
    assert train(engine, [[batch(2, 4)]]) == train(calm, [[batch(2, 4)]])


def test_an_optimizer_that_cannot_skip_is_asked_at_once(tiny_dir: Path) -> None:
    engine = make(tiny_dir)
    engine.optimizer = torch.optim.SGD(engine.trained_parameters.values(), lr=1.0)
    before = {name: p.detach().clone() for name, p in engine.trained_parameters.items()}
    engine.backward(summed(engine, batch(2)).total * float("inf"))
    with pytest.raises(Diverged, match="at step 1"):
        engine.step()
    assert all(torch.equal(p, before[name]) for name, p in engine.trained_parameters.items())


def test_logprobs_are_those_of_the_labels(tiny_dir: Path) -> None:
    engine, rows = make(tiny_dir), batch(3)
    values = engine.logprobs(rows)
    assert [len(v) for v in values] == [(row != IGNORE_INDEX).sum() for row in rows.labels]
    loss = summed(engine, rows)
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


OF_A_MODEL: dict[str, Any] = {
    "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "num_beams": 3, "temperature": 0.1, "top_k": 1, "min_p": 0.5,
    "typical_p": 0.2, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "min_new_tokens": 10, "min_length": 20,
    "suppress_tokens": [40], "begin_suppress_tokens": [40], "bad_words_ids": [[40]], "sequence_bias": [[[40], -50.0]],
    "exponential_decay_length_penalty": [1, 9.0], "guidance_scale": 3.0, "forced_eos_token_id": 1, "eos_token_id": 40,
    "remove_invalid_values": True, "renormalize_logits": True, "num_return_sequences": 2, "max_time": 0.0001,
    "max_length": 3, "stop_strings": ["a"], "prompt_lookup_num_tokens": 2, "output_scores": True,
    "return_dict_in_generate": True, "cache_implementation": "static", "penalty_alpha": 0.6,
}  # fmt: skip
"""What a generation_config may say that changes an answer, or makes generate raise."""


def test_the_models_own_generation_config_has_no_say(tiny_dir: Path) -> None:
    engine, prompts = make(tiny_dir), [[5, 6, 7, 8], [9, 10, 11, 12, 13]]

    def answers() -> list[list[list[int]]]:
        greedy = engine.generate(prompts, max_new_tokens=8)
        return [greedy, engine.generate(prompts, max_new_tokens=8, temperature=1.0, seed=3)]

    base: Any = engine.model.get_base_model()  # type: ignore[operator]
    base.generation_config = GenerationConfig()
    expected = answers()
    token = expected[0][0][0]
    for key, value in OF_A_MODEL.items():
        own = GenerationConfig()
        setattr(own, key, json.loads(json.dumps(value).replace("40", str(token))))
        base.generation_config = own
        assert answers() == expected, key
        assert base.generation_config is own


def test_looking_does_not_disturb(tiny_dir: Path) -> None:
    """Evaluation, log-probabilities and generation between steps leave the trajectory as it was, to the bit."""
    method = LoRA(r=4, lora_alpha=8, lora_dropout=0.2)
    quiet, watched = make(tiny_dir, method=method), make(tiny_dir, method=method)
    seed_all(5)
    expected = train(quiet, [[batch(4, seed)] for seed in range(4)])
    got = []
    seed_all(5)
    for seed in range(4):
        evaluate(watched, SupervisedFineTuning(), [batch(3, 50)])
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
    values = evaluate(engine, SupervisedFineTuning(), [Batch(ids, labels, (8, 8), 8)])
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
            engine_state.save(engine, folder)
            engine = make(tiny_dir, method=method, autocast=True)
            seed_all(999)
            engine_state.load(engine, folder)
            loss = summed(engine, part)
            engine.backward(loss.total / items)
            loss_sum += float(loss.total.detach())
        engine.step()
        losses.append(loss_sum / items)
    assert losses == expected
    for name, parameter in reference.trained_parameters.items():
        assert torch.equal(parameter, engine.trained_parameters[name]), name
    assert not any(path.suffix in (".pt", ".bin", ".pkl") for path in tmp_path.rglob("*"))


class CountsInItsGroup(torch.optim.Optimizer):
    """As some published optimizers do: the step counter, a running maximum as a tensor, and a factor that changes, in
    the parameter group; the learning rate is a tensor."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        group = {"step": 0, "betas": (0.9, 0.99), "largest": torch.tensor(1e-6), "mode": "train"}
        super().__init__(parameters, {"lr": torch.tensor(0.05), **group})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert isinstance(group["lr"], torch.Tensor)
            assert isinstance(group["betas"], tuple)
            group["step"] += 1
            for parameter in group["params"]:
                group["largest"] = torch.maximum(group["largest"], parameter.grad.abs().max())
                parameter.data -= group["lr"] / group["step"] * parameter.grad / group["largest"]


@pytest.mark.parametrize("optimizer", [CountsInItsGroup, torch.optim.SGD, torch.optim.NAdam, torch.optim.Adafactor])
def test_an_optimizer_goes_on_with_what_it_keeps_in_its_groups(
    tiny_dir: Path, tmp_path: Path, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    def fresh() -> Engine:
        engine = make(tiny_dir)
        return Engine(
            engine.model,
            optimizer(engine.trained_parameters.values()),
            build_schedule(Linear(warmup_ratio=0.1), 50),
            device=CPU,
            pad_token_id=1,
        )

    windows = [[batch(2, seed)] for seed in range(5)]
    undisturbed = fresh()
    train(undisturbed, windows)
    killed, resumed = fresh(), fresh()
    train(killed, windows[:3])
    engine_state.save(killed, tmp_path)
    train(resumed, windows[:1])
    engine_state.load(resumed, tmp_path)
    train(resumed, windows[3:])
    for name, parameter in undisturbed.trained_parameters.items():
        assert torch.equal(parameter, resumed.trained_parameters[name]), name


def test_an_optimizer_state_that_no_checkpoint_can_hold_is_refused_by_its_name(tiny_dir: Path, tmp_path: Path) -> None:
    engine = make(tiny_dir)
    train(engine, [[batch(2)]])
    next(iter(engine.optimizer.state.values()))["projector"] = object()
    with pytest.raises(TypeError, match="projector as object"):
        engine_state.save(engine, tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    engine_state.save(make(tiny_dir), tmp_path)
    with pytest.raises(ValueError, match="another model"):
        engine_state.load(make(tiny_dir, method=None), tmp_path)
    with pytest.raises(ValueError, match="another shape"):
        engine_state.load(make(tiny_dir, method=LoRA(r=8, lora_alpha=8)), tmp_path)
