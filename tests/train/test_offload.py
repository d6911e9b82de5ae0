"""Optimizer offload, by the engine: the same bits as resident, nothing left on the device, blocks that wait for their
own update alone, and errors that surface."""

from __future__ import annotations

import copy
import mmap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.thread import BrokenThreadPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from core.errors import ModelError
from core.spec.axes.optimizer import AdamW
from core.train.batch import Batch
from core.train.checkpoint import engine_state
from core.train.engine import Diverged, Engine, build_engine
from core.train.memory.narrow_dtypes import narrow_parameters
from core.train.memory.offload import optimizer as module
from core.train.memory.offload.optimizer import OptimizerOffload
from core.train.memory.streaming.blocks import find_blocks
from core.train.memory.transfer.pinned import refused, whole_pages
from core.train.memory.transfer.transfer import StagedTransfer
from core.train.model.scaler import LossScaler
from tests.support.live_bytes import LiveBytes
from tests.support.losses import summed

CPU = torch.device("cpu")
BLOCKS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"tie_word_embeddings": False},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": BLOCKS, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": SIZES | {"tie_word_embeddings": True},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": BLOCKS, "state_size": 4},
}
"""An untied head; one tied, with biases and Conv1D; tied with biases; fused experts; states of its own."""


def model_of(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**ARCHITECTURES[name] | changes))
    return model.float().requires_grad_(True)


def engine_of(
    model: Any, offloaded: bool, autocast: torch.dtype | None = torch.bfloat16, scaler: LossScaler | None = None,
    beside: bool = True, of: type[OptimizerOffload] = OptimizerOffload,
) -> Engine:  # fmt: skip
    return build_engine(
        model,
        AdamW(learning_rate=1e-2, weight_decay=0.1),
        lambda step: 1.0 / (1 + step),
        autocast=autocast,
        scaler=scaler,
        updates=of(model, CPU, narrow=autocast, beside=beside) if offloaded else None,
    )


@contextmanager
def offloaded(engine: Engine) -> Iterator[OptimizerOffload]:
    assert isinstance(engine.updates, OptimizerOffload)
    try:
        yield engine.updates
    finally:
        engine.updates.close()


def batch(seed: int, rows: int = 2, tokens: int = 10) -> Batch:
    ids = torch.randint(3, 96, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, 0] = -100
    return Batch(ids, labels, (tokens,) * rows, rows * (tokens - 1))


def window(engine: Engine, number: int) -> list[float]:
    """Two micro-steps."""
    losses = []
    for micro in range(2):
        loss = summed(engine, one := batch(2 * number + micro))
        engine.backward(loss.total / one.label_tokens / 2)
        losses.append(loss.total.item())
    return losses


def train(engine: Engine, steps: int = 3) -> tuple[list[Any], dict[str, Tensor]]:
    """Losses, norms and rates; weights, gradients and optimizer state in mid-window."""
    figures: list[Any] = []
    for number in range(steps):
        figures += window(engine, number)
        result = engine.step()
        figures += [result.grad_norm.item(), result.learning_rate, result.skipped]
    window(engine, steps)
    engine.updates.synchronize()
    return figures, state(engine)


def state(engine: Engine) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in engine.trained_parameters.items():
        found[name] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"{name}:grad"] = parameter.grad.clone()
        found |= {f"{name}:{key}": value.clone() for key, value in engine.optimizer.state[parameter].items()}
    return found


def same(one: tuple[list[Any], dict[str, Tensor]], other: tuple[list[Any], dict[str, Tensor]]) -> bool:
    """To the bit, dtypes too."""
    return (
        str(one[0]) == str(other[0])  # figures that are no numbers count as the same
        and one[1].keys() == other[1].keys()
        and all(v.dtype == other[1][n].dtype and torch.equal(v, other[1][n]) for n, v in one[1].items())
    )


# --- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_full_fine_tuning_in_bf16_is_the_resident_one_to_the_bit(name: str) -> None:
    """The device holds layers' weights in bf16 and the rest in float32; the update runs beside the next forward."""
    wanted = train(engine_of(model_of(name), False))
    assert max(wanted[0][2::5]) > 1.0, "the norm is clipped in some step"
    with offloaded(engine := engine_of(model := model_of(name), True)) as held:
        assert same(train(engine), wanted)
        dtypes = {parameter.dtype for parameter in model.parameters()}
        assert dtypes == {torch.bfloat16, torch.float32} and held.narrowed > 0
        assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if n.endswith("bias"))
        for parameter, master in (pair for unit in held.units for pair in unit.members):
            assert torch.equal(parameter, master.to(parameter.dtype)) and parameter.grad is None
        held.hand_back()
        assert all(torch.equal(p, engine.trained_parameters[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_other_precisions_checkpointed_blocks_and_frozen_parts(autocast: torch.dtype | None) -> None:
    """In fp16 the loss scale begins so high that steps are skipped: in those no weight and no state changes."""
    found = []
    for off in (False, True):
        model = model_of("llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[1].mlp.requires_grad_(False)
        scaler = LossScaler(2.0**22) if autocast is torch.float16 else None
        engine = engine_of(model, off, autocast, scaler)
        found.append(train(engine, 5))
        if off:
            with offloaded(engine) as held:
                assert len(held.parameters) < len(list(model.parameters()))
        if scaler is not None:
            assert 0 < scaler.skipped < 5
    assert same(*found)


def test_a_checkpoint_of_each_is_gone_on_with_as_the_other(tmp_path: Path) -> None:
    """In mid-window; and `load_weights` alone, which what the device holds follows."""
    wanted = train(engine_of(model_of("qwen2"), False))
    for first, then in ((False, True), (True, False), (True, True)):
        begun = engine_of(model_of("qwen2"), first)
        window(begun, 0)
        begun.step()
        one = batch(2)
        begun.backward(summed(begun, one).total / one.label_tokens / 2)
        folder = tmp_path / f"{first}-{then}"
        folder.mkdir()
        engine_state.save(begun, folder)
        assert engine_state.checkpoint_bytes(begun) < sum(path.stat().st_size for path in folder.iterdir())
        ended = engine_of(model_of("qwen2"), then)
        engine_state.load(ended, folder)
        one = batch(3)
        ended.backward(summed(ended, one).total / one.label_tokens / 2)
        ended.step()
        window(ended, 2)
        ended.step()
        window(ended, 3)
        ended.updates.synchronize()
        assert same(([], state(ended)), ([], wanted[1]))
        engine_state.load_weights(ended, folder)
        begun.zero_grad()
        for engine in (begun, ended):
            with engine.inference() as model:
                assert torch.equal(model(one.input_ids).logits, begun.model(one.input_ids).logits)
            if isinstance(engine.updates, OptimizerOffload):
                engine.updates.close()


# --- what the device holds -------------------------------------------------------------------------------


class OnHost(OptimizerOffload):
    """What is made in these two is the host's, and an account of the device leaves it out. Gradients are copied, as
    from a device that is another memory."""

    def _add(self, master: nn.Parameter, gradient: Tensor, after: Any) -> None:
        with _disable_current_modes():
            super()._add(master, gradient.clone(), after)

    def _update(self, *args: Any) -> None:
        with _disable_current_modes():
            super()._update(*args)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_device_holds_narrow_weights_activations_and_one_blocks_gradients(checkpointed: bool) -> None:
    """Every byte that torch makes there, against what the resident run makes beside its weights and gradients."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6}
    accounts: dict[bool, LiveBytes] = {}
    for off in (False, True):
        model = model_of("llama", **sizes)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        weights, narrowed = sum(p.numel() for p in model.parameters()), 0
        block = sum(p.numel() for p in model.model.layers[0].parameters())
        engine = engine_of(model, off, beside=False, of=OnHost)
        with LiveBytes([*model.parameters(), *model.buffers()], []) as accounts[off]:
            for number in range(2):
                window(engine, number)
                if off:  # a resident step would count AdamW's state
                    engine.step()
        if off:
            assert accounts[off].now() <= accounts[off].start + 8, "something of a step stays on the device"
            with offloaded(engine) as held:
                narrowed = held.narrowed
    made = accounts[False].peak - accounts[False].start - 4 * weights  # beside float32 weights and their gradients
    made -= 0 if checkpointed else 2 * narrowed  # autocast's copies of the weights, of all blocks at once
    assert accounts[True].start == accounts[False].start - 2 * narrowed
    assert accounts[True].peak <= accounts[True].start + made + 2 * block
    assert accounts[True].peak < 0.5 * accounts[False].peak


# --- what waits for what ---------------------------------------------------------------------------------


def test_a_block_waits_for_its_own_update_and_for_no_other() -> None:
    """The update of each block is held up until the block before it has computed: a forward that waited for more than
    it needs would wait for ever."""
    engine = engine_of(model := model_of("llama"), True)
    with offloaded(engine) as held:
        assert [unit.name for unit in held.units] == [
            "outside of the blocks", *(f"block {number}" for number in range(BLOCKS)), "output head",
        ]  # fmt: skip
        gates = [threading.Event() for _ in held.units]
        order: list[str] = []
        real, calls = engine.optimizer.step, iter(range(len(gates)))

        def step() -> None:
            number = next(calls)
            assert gates[number].wait(240), f"unit {number} was waited for too early"
            real()
            order.append(f"updated {number}")

        def computed(number: int) -> Callable[..., None]:
            return lambda *_: (order.append(f"computed {number}"), gates[number + 2].set())[0]

        window(engine, 0)
        engine.optimizer.step = step  # type: ignore[assignment]
        blocks = [block for _, block in find_blocks(model)]
        # The first of a block's hooks after its forward: the last block's own wait for the head comes behind it.
        hooks = [b.register_forward_hook(computed(n), prepend=True) for n, b in enumerate(blocks)]
        gates[0].set()
        gates[1].set()
        engine.step()
        one = batch(2)
        loss = summed(engine, one)
        engine.updates.synchronize()
        for hook in hooks:
            hook.remove()
        engine.optimizer.step = real  # type: ignore[method-assign]
        for number in range(BLOCKS):
            assert order.index(f"computed {number}") < order.index(f"updated {number + 2}")
            assert order.index(f"updated {number + 1}") < order.index(f"computed {number}")
    resident = engine_of(model_of("llama"), False)
    window(resident, 0)
    resident.step()
    assert torch.equal(summed(resident, one).total, loss.total)


# --- gradients that a thread takes, as on a GPU ----------------------------------------------------------


def taken_by_the_thread(held: OptimizerOffload, at_once: int) -> None:
    """The way of a GPU's gradients, over one memory: no more than `at_once` bytes of them wait for the thread."""
    held.device, held._at_once = torch.device("cuda", 0), at_once


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_a_thread_takes_gradients_one_at_a_time_or_as_they_come(at_once: int) -> None:
    """Also one that is larger than all that may wait."""
    wanted = train(engine_of(model_of("qwen2"), False))
    with offloaded(engine := engine_of(model_of("qwen2"), True)) as held:
        taken_by_the_thread(held, at_once)
        assert same(train(engine), wanted)
        assert held._under_way == 0


def test_a_gradient_that_is_refused_leaves_none_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is told once all others have arrived, late ones too: none of them counts in the next window."""
    wanted = train(engine_of(model_of("llama"), False))
    with offloaded(engine := engine_of(model_of("llama"), True)) as held:
        taken_by_the_thread(held, 1 << 20)
        real, calls, last = StagedTransfer.fetch, iter(range(10**6)), len(held.parameters) - 1

        def fetch(self: Any, source: Tensor, *, after: Any) -> Iterator[Any]:
            if (number := next(calls)) == 0:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
            if number == last:
                threading.Event().wait(0.3)  # longer than telling the first takes
            return real(self, source, after=after)

        with monkeypatch.context() as patched:
            patched.setattr(StagedTransfer, "fetch", fetch)
            patched.setattr(held, "_add", partial(copied, held._add))
            one = batch(7)
            engine.backward(summed(engine, one).total)
            with pytest.raises(ModelError, match="no memory left"):
                engine.updates.synchronize()
            assert held._under_way == 0 and next(calls) == last + 1
        engine.zero_grad()
        assert same(train(engine), wanted)


def copied(add: Callable[..., None], master: nn.Parameter, gradient: Tensor, after: Any) -> None:
    """Not taken as it is, though it could be."""
    add(master, gradient.double(), after)


def test_a_thread_that_cannot_begin_is_told_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "_begin", refuses)
    with pytest.raises(BrokenThreadPool):
        OptimizerOffload(model_of("llama"), CPU, beside=True)


def test_what_is_read_outside_of_the_blocks_is_updated_before_them() -> None:
    """Also where a block has it, too: nothing outside waits for a block's update."""
    model = model_of("llama")
    shared = model.model.norm.weight = model.model.layers[1].input_layernorm.weight
    with offloaded(engine_of(model, True)) as held:
        assert [unit.name for unit in held.units if any(p is shared for p, _ in unit.members)] == [held.units[0].name]
        assert sum(len(unit.members) for unit in held.units) == len(held.parameters)


def test_a_layer_that_the_model_wants_in_float32_is_not_narrowed() -> None:
    """Named by its module, or by its weight."""
    model = model_of("llama")
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = ["q_proj"], ["mlp.up_proj.weight"]
    narrow = narrow_parameters(model, [block for _, block in find_blocks(model)])
    names = {name.split(".", 3)[3] for name, p in model.named_parameters() if p in narrow}
    assert names == {f"{name}.weight" for name in (
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj",
    )}  # fmt: skip


# --- what goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False])
def test_an_error_in_an_update_surfaces_and_nothing_half_updated_is_kept(tmp_path: Path, beside: bool) -> None:
    engine = engine_of(model_of("llama"), True, beside=beside)
    with offloaded(engine):
        window(engine, 0)
        real, calls = engine.optimizer.step, iter(range(9))

        def step() -> None:
            if next(calls) == 2:
                raise ZeroDivisionError("in the third unit")
            real()

        engine.optimizer.step = step  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError, match="in the third unit"):
            engine.step()
            summed(engine, batch(2))
        save, load = (partial(verb, engine, tmp_path) for verb in (engine_state.save, engine_state.load))
        for verb in (save, engine.step, engine.zero_grad, load):
            with pytest.raises((ZeroDivisionError, FileNotFoundError)):
                verb()
        assert not list(tmp_path.glob("weights*"))


def test_a_broken_backward_and_a_refused_gradient_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(engine_of(model_of("llama"), False))
    engine = engine_of(model := model_of("llama"), True)
    with offloaded(engine):
        block = model.model.layers[1]

        def broken(*_: Any) -> None:
            raise ZeroDivisionError("in a backward")

        def refuses(self: Any, source: Tensor, *, after: Any) -> Iterator[Any]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

        hook = block.register_full_backward_hook(broken)
        with pytest.raises(ZeroDivisionError, match="in a backward"):
            window(engine, 7)
        hook.remove()
        assert any(master.grad is not None for master in engine.trained_parameters.values())
        engine.zero_grad()
        with monkeypatch.context() as patched:
            patched.setattr(StagedTransfer, "fetch", refuses)
            with pytest.raises(ModelError, match="no memory left") as caught:
                window(engine, 8)
            assert caught.value.field == "memory.offload_optimizer"
        engine.zero_grad()
        assert same(train(engine), wanted)


def test_a_step_that_is_no_number_changes_no_weight() -> None:
    engine = engine_of(model_of("llama"), True)
    with offloaded(engine):
        window(engine, 0)
        before = {name: p.detach().clone() for name, p in engine.trained_parameters.items()}
        next(iter(engine.trained_parameters.values())).grad.fill_(float("nan"))  # type: ignore[union-attr]
        with pytest.raises(Diverged, match="at step 1"):
            engine.step()
        assert all(torch.equal(p, before[name]) for name, p in engine.trained_parameters.items())


def test_too_little_host_memory_is_told_before_anything_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    model = model_of("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="MiB are needed, and 0 are free") as caught:
        OptimizerOffload(model, CPU, narrow=torch.bfloat16)
    assert (caught.value.code, caught.value.field) == ("offload_does_not_fit", "memory.offload_optimizer")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_locked_memory_that_is_refused_names_the_field() -> None:
    error = refused(32 << 20, "error 2", "memory.offload_optimizer.pinned")
    assert error.field == "memory.offload_optimizer.pinned" and "`memory.offload_optimizer.pinned`" in error.message


def test_locked_memory_shares_no_page_with_other_memory() -> None:
    for nbytes in (1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 256):
        held = whole_pages(nbytes)
        assert (held.nbytes, held.data_ptr() % mmap.PAGESIZE) == (nbytes, 0)
        assert held.untyped_storage().nbytes() - held.storage_offset() >= -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        held[: nbytes // 8 * 8].view(torch.float64).zero_()


def test_a_model_whose_blocks_cannot_be_found_is_one_unit() -> None:
    """All of it is updated before the next pass begins."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    held = OptimizerOffload(model, CPU, narrow=torch.bfloat16, beside=True)
    assert len(held.units) == 1 and held.narrowed == 0
    optimizer = torch.optim.AdamW(held.parameters.values(), fused=True)
    model(torch.ones(1, 4)).sum().backward()
    held.update(optimizer, torch.ones(()), None)
    model(torch.ones(1, 4))
    assert all(torch.equal(p, held.parameters[name]) for name, p in model.named_parameters())
    held.close()
