"""The slot generator: transformers' greedy answers, draws that know nothing of their company, log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    MistralConfig,
    MistralForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.spec.axes.method import LoRA
from core.spec.axes.optimizer import AdamW
from core.train.base.rng import seed_all
from core.train.batch import IGNORE_INDEX, Batch
from core.train.engine import Engine, build_engine
from core.train.generation.sampling import SamplingParams, by_products, drawn, filtered, uniform
from core.train.generation.slots import SlotCache
from core.train.kernels import interface, native
from core.train.methods.lora import adapt_lora
from core.train.quant.adapters import fuse_adapters
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions

VOCABULARY = 97
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 15, 16], [20], [33, 34, 35, 36, 37], [40, 41, 42, 43]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


def engine_of(model: Any, *, autocast: bool = False) -> Engine:
    if not hasattr(model, "get_base_model"):
        seed_all(1)
        model = adapt_lora(model, LoRA(r=4, lora_alpha=8))
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:  # adapters that do something
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return build_engine(model, AdamW(learning_rate=1e-3), autocast=torch.bfloat16 if autocast else None, pad_token_id=1)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for parameter in model.parameters():
        parameter.data *= 8  # answers that are not the same token again and again
    return model


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of(llama())


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    wanted = GenerationConfig(max_new_tokens=tokens, pad_token_id=1)
    ids = torch.tensor([list(prompt)])
    output = model.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
    return list(output[0, len(prompt) :].tolist())


def keyed(samples: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[tuple[int, ...]]]:
    return [[(7, prompt[0], sample) for sample in range(samples)] for prompt in prompts]


@pytest.mark.parametrize("slots", [1, 3, 64])
def test_greedy_answers_are_those_of_transformers(engine: Engine, slots: int) -> None:
    params = SamplingParams(12)
    assert engine.without_slots(64) is None
    found = engine.complete(PROMPTS, keyed(2), params, slots=slots, prompt_tokens=16)
    expected = [greedy(engine.model, prompt, 12) for prompt in PROMPTS]
    assert len({token for answer in expected for token in answer}) > 20
    assert [[one.tokens for one in answers] for answers in found] == [[answer] * 2 for answer in expected]
    assert not any(one.finished for answers in found for one in answers)


SAMPLED = SamplingParams(10, temperature=4.0, top_p=0.95, stop_token_ids=tuple(range(60, 72)))


def test_company_has_no_say_in_a_draw(engine: Engine) -> None:
    together = engine.complete(PROMPTS, keyed(4), SAMPLED, slots=20)
    lengths = [len(one.tokens) for answers in together for one in answers]
    assert len(set(lengths)) > 3 and len({tuple(one.tokens) for one in together[0]}) == 4
    for slots in (1, 3, 7):
        few = engine.complete(PROMPTS[::-1], keyed(4, PROMPTS[::-1]), SAMPLED, slots=slots, prompt_tokens=9)[::-1]
        assert [[one.tokens for one in answers] for answers in few] == [
            [one.tokens for one in answers] for answers in together
        ]
    other = engine.complete(PROMPTS, [[(8, *key[1:]) for key in keys] for keys in keyed(4)], SAMPLED, slots=20)
    assert other != together


def test_answers_end_at_their_stops_and_have_the_log_probabilities_of_training(engine: Engine) -> None:
    whole = SamplingParams(10, temperature=1.0, stop_token_ids=SAMPLED.stop_token_ids)
    for prompt, answers in zip(PROMPTS, engine.complete(PROMPTS, keyed(3), whole, slots=4), strict=True):
        for one in answers:
            stops = [at for at, token in enumerate(one.tokens) if token in whole.stop_token_ids]
            assert one.finished is bool(stops) and stops in ([], [len(one.tokens) - 1])
            assert one.finished or len(one.tokens) == 10
            assert_logprobs(engine, prompt, one.tokens, one.logprobs, 1e-4)


def assert_logprobs(
    engine: Engine, prompt: list[int], tokens: list[int], logprobs: list[float], tolerance: float
) -> None:
    ids = torch.tensor([prompt + tokens])
    labels = ids.clone()
    labels[:, : len(prompt)] = IGNORE_INDEX
    (expected,) = engine.logprobs(Batch(ids, labels, (ids.shape[1],), len(tokens)))
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=tolerance)


def test_stop_strings_end_an_answer_with_the_token_that_completes_one(engine: Engine) -> None:
    (free,) = engine.complete([PROMPTS[0]], [[(0,)]], SamplingParams(12), slots=1)[0]
    text = "".join(chr(200 + token) for token in free.tokens)
    params = SamplingParams(12, stop_strings=(text[4:6],))

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(200 + token) for token in ids)

    (one,) = engine.complete([PROMPTS[0]], [[(0,)]], params, slots=1, decode=decode)[0]
    assert one.finished and one.tokens == free.tokens[: text.index(text[4:6]) + 2]
    with pytest.raises(ValueError, match="decode"):
        engine.complete([PROMPTS[0]], [[(0,)]], params, slots=1)


def test_a_groups_prompt_is_computed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    before = SlotCache.before_prompts

    def watched(cache: SlotCache, slots: Sequence[int], from_rows: Sequence[int], *more: Any) -> None:
        rows.append(len(set(from_rows)))
        before(cache, slots, from_rows, *more)

    assert engine.without_slots(64) is None  # tried before its passes are counted
    monkeypatch.setattr(SlotCache, "before_prompts", watched)
    for slots in (3, 32):
        rows.clear()
        engine.complete(PROMPTS, keyed(6), SAMPLED, slots=slots)
        assert sum(rows) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_over_packed_weights_are_exact(kind: Any, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model, _ = load_quantized(tmp_path, torch.float32, QuantOptions(format=kind))
    seed_all(1)
    adapted = adapt_lora(model, LoRA(r=4, lora_alpha=8))
    fuse_adapters(adapted)
    engine = engine_of(adapted)
    assert engine.without_slots(64) is None
    for prompt, (one,) in zip(
        PROMPTS, engine.complete(PROMPTS, keyed(1), SamplingParams(6, temperature=1.0), slots=2), strict=True
    ):
        assert_logprobs(engine, prompt, one.tokens, one.logprobs, 2e-4)


def test_in_bf16_the_log_probabilities_are_near_those_of_training() -> None:
    engine = engine_of(llama(), autocast=True)
    (one,) = engine.complete([PROMPTS[1]], [[(3,)]], SamplingParams(16, temperature=1.0), slots=1)[0]
    assert_logprobs(engine, PROMPTS[1], one.tokens, one.logprobs, 0.3)


@pytest.mark.skipif(not native.multiplies_few_rows(64), reason="the C kernels of few rows need AVX-512")
@pytest.mark.parametrize("bf16", [False, True])
def test_products_of_few_rows_with_dense_weights_are_those_of_the_model(
    bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with biases and adapters that the kernel takes, and a head. Log-probabilities are within 1e-4 of those of
    training (bfloat16: 1e-2), and answers in float32 are those without the kernel."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16 if bf16 else torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_()
    engine = engine_of(model, autocast=bf16)
    taken: list[tuple[int, ...]] = []
    kernel = native.wide_product

    def watched(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **more: Any) -> None:
        taken.append((len(x), len(weight)))
        kernel(x, weight, out, **more)

    monkeypatch.setattr(native, "wide_product", watched)
    params, keys = SamplingParams(6, temperature=1.0), keyed(2)
    found = engine.complete(PROMPTS, keys, params, slots=5)
    layers = 2 * 5  # all but those of keys and values, whose weights are small
    assert taken.count((5, 256)) >= 6 * layers and (5, 512) in taken
    for prompt, answers in zip(PROMPTS, found, strict=True):
        for one in answers:
            assert_logprobs(engine, prompt, one.tokens, one.logprobs, 0.01 if bf16 else 1e-4)
    assert not any("forward" in vars(module) for module in engine.model.modules())
    if bf16:
        return
    taken.clear()
    try:
        interface.veto("native", "to compare", "gemv")
        assert [[one.tokens for one in mine] for mine in engine.complete(PROMPTS, keys, params, slots=5)] == [
            [one.tokens for one in mine] for mine in found
        ]
    finally:
        interface.unveto()
    assert not taken


def mamba() -> Any:
    torch.manual_seed(0)
    return MambaForCausalLM(
        MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, pad_token_id=1)
    )


def mistral() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=12))


@pytest.mark.parametrize(
    ("make", "room", "reason"), [(mamba, 8, "cannot be replaced|none of its layers|differ"), (mistral, 20, "12 tokens")]
)
def test_models_without_a_form_for_slots_say_so_and_answer_all_the_same(make: Any, room: int, reason: str) -> None:
    model = make()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    engine = build_engine(model, AdamW(learning_rate=1e-3), pad_token_id=1)
    why = engine.without_slots(room)
    assert why is not None and re.search(reason, why), why
    found = engine.complete(PROMPTS, keyed(2), SamplingParams(14), slots=3)
    expected = [greedy(engine.model, prompt, 14) for prompt in PROMPTS]
    assert [[one.tokens for one in answers] for answers in found] == [[answer] * 2 for answer in expected]
    drawn_alone = engine.complete(PROMPTS[2:3], keyed(4)[2:3], SAMPLED, slots=1)[0]
    if make is mistral:  # a state-space model sees the padding on the left
        together = engine.complete(PROMPTS, keyed(4), SAMPLED, slots=8)[2]
        assert [one.tokens for one in together] == [one.tokens for one in drawn_alone]


def test_a_window_that_is_long_enough_has_a_form() -> None:
    engine = build_engine(mistral(), AdamW(learning_rate=1e-3), pad_token_id=1)
    assert engine.without_slots(12) is None and engine.without_slots(13) is not None
    (one,) = engine.complete([PROMPTS[0]], [[(0,)]], SamplingParams(9), slots=1)[0]
    assert one.tokens == greedy(engine.model, PROMPTS[0], 9)


# --- the choice of a token -------------------------------------------------------------------------------


def test_filters_keep_the_tokens_that_transformers_keeps() -> None:
    scores = torch.randn(16, 50, generator=torch.Generator().manual_seed(2)) * 3
    ids = torch.zeros(16, 1, dtype=torch.int64)
    for top_k, top_p, min_p in ((5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.7, 0.05), (0, 1e-9, 0.0)):
        expected = scores
        for wanted, warper in (
            (top_k > 0, lambda: TopKLogitsWarper(top_k)),  # noqa: B023
            (top_p < 1, lambda: TopPLogitsWarper(top_p)),  # noqa: B023
            (min_p > 0, lambda: MinPLogitsWarper(min_p)),  # noqa: B023
        ):
            expected = warper()(ids, expected) if wanted else expected
        params = SamplingParams(1, 1.0, top_p, top_k, min_p)
        found = filtered(torch.log_softmax(scores, -1), params)
        assert torch.equal(found.isfinite(), expected.isfinite()), (top_k, top_p, min_p)


def test_draws_follow_the_distribution_and_never_take_what_is_left_out() -> None:
    logprobs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05]).log()
    numbers = torch.tensor([uniform((1, row), 0) for row in range(20_000)], dtype=torch.float64)
    shares = drawn(logprobs.expand(len(numbers), -1), numbers).bincount(minlength=5) / len(numbers)
    assert shares[1] == 0
    torch.testing.assert_close(shares, logprobs.exp(), rtol=0, atol=0.01)
    edges = torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64)
    assert drawn(logprobs.expand(2, -1), edges).tolist() == [0, 4]


def test_numbers_depend_on_key_and_position_alone() -> None:
    assert uniform((1, 2), 3) == uniform((1, 2), 3)
    assert len({uniform((a, b), c) for a in range(4) for b in range(4) for c in range(4)}) == 64
    assert uniform((1, 2), 3) != uniform((1,), 2)


def test_running_sums_by_products_are_running_sums() -> None:
    values = torch.rand(3, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(by_products(values), values.cumsum(-1), rtol=1e-12, atol=0)
