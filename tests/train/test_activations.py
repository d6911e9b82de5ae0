"""What blocks keep between forward and backward: all, their inputs, or a selection; in host memory; the same result."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from core.errors import ModelError
from core.plan.compatibility import check
from core.plan.constants import INPUTS_IN_FLIGHT
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.base.stop import Stop
from core.train.kernels.scratch import clear_scratch
from core.train.memory.checkpointing.checkpointed_block import CheckpointPolicy
from core.train.memory.checkpointing.policy import checkpoint_blocks
from core.train.memory.checkpointing.selective import SavedResults, contexts
from core.train.memory.offload.activations import FIELD, ActivationOffload
from core.train.memory.streaming.stream import StreamedModel, stream_from_host
from core.train.memory.transfer.pinned import HostPool, refused
from core.train.methods.full import adapt_full
from core.train.quant.targets import QuantOptions
from tests.support.blocks import CPU, IDS, backwards, resident, same
from tests.support.live_bytes import LiveBytes
from tests.support.small_llama import save
from tests.support.trainer import events, notices, pairs, run, weights, write_rows, write_run

HIDDEN, INNER, KEYS, RANK, HEADS, BLOCKS = 64, 128, 32, 2, 4, 5
TOKENS = IDS.numel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), torch.bfloat16, num_hidden_layers=BLOCKS)


def held(model: Any, policy: CheckpointPolicy, streamed: bool = False) -> StreamedModel | None:
    if streamed:
        return stream_from_host(model, CPU, slots=2, policy=policy)
    checkpoint_blocks(model, policy)
    return None


def loss_of(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


class SavesAnEmptyOneFirst(torch.autograd.Function):
    """As the checkpoint of torch 2.11 does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(0), tensor)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _, tensor = ctx.saved_tensors
        return gradient * tensor


def test_an_empty_tensor_that_is_saved_first_is_no_blocks_input() -> None:
    inputs, tensor = ActivationOffload(CPU), torch.arange(4.0).requires_grad_()
    with inputs.first_put():
        answer = SavesAnEmptyOneFirst.apply(tensor)  # type: ignore[no-untyped-call]
    assert (inputs.counts.out, inputs.counts.bytes) == (1, tensor.nbytes)
    answer.sum().backward()
    assert tensor.grad is not None and torch.equal(tensor.grad, tensor.detach())
    inputs.close()


def test_inputs_that_stay_are_counted() -> None:
    inputs, wide = ActivationOffload(CPU), torch.ones(2, 3).t().requires_grad_()
    with inputs.first_put():
        wide.square()  # saved, and not contiguous
    with inputs.first_put():
        pass
    with torch.no_grad(), inputs.first_put():
        pass
    assert (inputs.counts.missed, inputs.counts.out) == (2, 0)
    assert inputs.counts.describe_missed().startswith("2 of 2 times the input of a block stayed")
    inputs.close()


# --- to the bit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, attention",
    [(None, "eager"), (QuantOptions("nf4"), "sdpa"), (QuantOptions("int8"), "sdpa")],
    ids=["bf16", "nf4", "int8"],
)
def test_adapters_get_the_gradients_of_the_whole_graph(folder: Path, options: Any, attention: str) -> None:
    """With dropout, two passes added up; resident and streamed."""

    def adapted() -> Any:
        model = resident(folder, options)
        model.set_attn_implementation(attention)
        return model

    wanted = backwards(adapted())
    for policy in (CheckpointPolicy(selective=True), CheckpointPolicy(inputs=ActivationOffload(CPU))):
        model = adapted()
        checkpoint_blocks(model, policy)
        assert same(backwards(model), wanted), policy
    model = adapted()
    stream = stream_from_host(model, CPU, slots=2)
    for policy in (CheckpointPolicy(selective=True), CheckpointPolicy(selective=True, inputs=ActivationOffload(CPU))):
        stream.policy = policy
        assert same(backwards(model), wanted), policy
    stream.close()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_parameters_get_the_gradients_of_the_whole_graph(folder: Path, attention: str) -> None:
    """With dropout in attention: its result draws random numbers, so it is never kept."""

    def full() -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, attention_dropout=0.2
        )
        return adapt_full(model).train()

    wanted = backwards(full())
    assert len(wanted[1]) == 2 + BLOCKS * 9 + 1
    model = full()
    checkpoint_blocks(model, CheckpointPolicy(selective=True, inputs=ActivationOffload(CPU)))
    assert same(backwards(model), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_are_put_away_with_both_kinds_of_torchs_checkpoints(folder: Path, reentrant: bool) -> None:
    wanted = backwards(resident(folder, None))
    model, inputs = resident(folder, None), ActivationOffload(CPU)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for module in model.modules():
        if "_gradient_checkpointing_func" in module.__dict__:
            module._gradient_checkpointing_func = inputs.around(module._gradient_checkpointing_func)
    assert same(backwards(model), wanted)
    assert inputs.counts.out == 2 * BLOCKS


# --- what is kept ----------------------------------------------------------------------------------------


def _of_a_block(folder: Path, options: Any, ways: list[CheckpointPolicy | None], streamed: bool = False) -> list[int]:
    """For each way, one after the other: bytes that torch holds after a forward of BLOCKS blocks and not after one of
    BLOCKS - 1, but for weights, slots, what is kept dequantised, and host memory that inputs were put into."""
    found = []
    for blocks in (BLOCKS - 1, BLOCKS):
        model = resident(folder, options, r=RANK)
        del model.get_base_model().model.layers[blocks:]
        stream = stream_from_host(model, CPU, slots=2) if streamed else None
        slots = [] if stream is None else [slot.buffer for slot in stream.cache.slots]
        found.append([_after_a_forward(model, slots, policy, stream) for policy in ways])
        if stream is not None:
            stream.close()
    return [more - less for less, more in zip(*found, strict=True)]


def _after_a_forward(
    model: Any, slots: list[Tensor], policy: CheckpointPolicy | None, stream: StreamedModel | None
) -> int:
    if stream is not None and policy is not None:
        stream.policy = policy
    elif policy is not None:
        checkpoint_blocks(model, policy)
    with LiveBytes([*model.parameters(), *model.buffers(), *slots], []) as live:
        loss = loss_of(model)  # noqa: F841 -- held, with its graph
        clear_scratch()
        host = 0 if policy is None or policy.inputs is None else _in_use(policy.inputs.pool)
        return live.now() - live.start - host


def _in_use(pool: HostPool) -> int:
    assert pool.in_use in ((BLOCKS - 1) * mmap.PAGESIZE, BLOCKS * mmap.PAGESIZE)
    return pool.nbytes


INPUT = TOKENS * HIDDEN * 2


def _selected(options: Any) -> int:
    """By name: bfloat16 beside attention's float32 logarithms, one a head."""
    q_k_v, attention, o, gate_up = HIDDEN + 2 * KEYS, HIDDEN, HIDDEN, 2 * INNER
    down = HIDDEN if options is None else 0  # LoRA beside dense weights keeps x for A after the product with W
    of_a = 7 * RANK  # x·Aᵀ of every linear layer
    return TOKENS * (2 * (q_k_v + attention + o + gate_up + down + of_a) + 4 * HEADS)


@pytest.mark.parametrize("options", [None, QuantOptions("nf4")], ids=["bf16", "nf4"])
def test_every_byte_that_a_block_keeps_is_accounted_for(folder: Path, options: Any) -> None:
    ways = [
        None,
        CheckpointPolicy(),
        CheckpointPolicy(selective=True),
        CheckpointPolicy(inputs=ActivationOffload(CPU)),
        CheckpointPolicy(selective=True, inputs=ActivationOffload(CPU)),
    ]
    everything, *found = _of_a_block(folder, options, ways)
    assert found == [INPUT, INPUT + _selected(options), 0, _selected(options)]
    assert everything > 1.3 * found[1]


def test_a_streamed_block_keeps_the_same(folder: Path) -> None:
    nf4 = QuantOptions("nf4")
    ways: list[CheckpointPolicy | None] = [
        CheckpointPolicy(),
        CheckpointPolicy(selective=True),
        CheckpointPolicy(inputs=ActivationOffload(CPU)),
    ]
    assert _of_a_block(folder, nf4, ways, streamed=True) == [INPUT, INPUT + _selected(nf4), 0]


def test_inputs_are_on_the_device_only_on_their_way(folder: Path) -> None:
    model, inputs = resident(folder, None), ActivationOffload(CPU)
    held(model, CheckpointPolicy(inputs=inputs))
    backwards(model, times=3)
    counts = inputs.counts
    assert (counts.out, counts.stayed, counts.ahead, counts.late) == (3 * BLOCKS, 6, 3 * (BLOCKS - INPUTS_IN_FLIGHT), 0)
    assert counts.bytes == 3 * BLOCKS * INPUT
    assert inputs.pool.nbytes == BLOCKS * mmap.PAGESIZE == mmap.PAGESIZE * len(inputs.pool._free)
    inputs.close()
    assert inputs.pool.nbytes == 0


def test_nothing_is_put_away_where_there_is_no_backward(folder: Path) -> None:
    model, inputs = resident(folder, None), ActivationOffload(CPU)
    held(model, CheckpointPolicy(selective=True, inputs=inputs))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=IDS)
    assert inputs.counts.out == 0


# --- what goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
def test_a_backward_that_breaks_leaves_nothing_behind(folder: Path, streamed: bool) -> None:
    model, inputs = resident(folder, None), ActivationOffload(CPU)
    wanted = backwards(resident(folder, None))
    stream = held(model, CheckpointPolicy(selective=True, inputs=inputs), streamed)
    backwards(model)
    weight = dict(model.named_parameters())["base_model.model.model.layers.2.mlp.up_proj.lora_A.default.weight"]

    def broken(grad: Tensor) -> None:
        raise KeyboardInterrupt

    hook = weight.register_hook(broken)
    with pytest.raises(KeyboardInterrupt):
        backwards(model)
    hook.remove()
    gc.collect()
    if streamed:  # torch's checkpoints hold on to what is above the block that broke
        assert len(inputs.pool._free) * mmap.PAGESIZE == inputs.pool.nbytes == BLOCKS * mmap.PAGESIZE
    assert same(backwards(model), wanted)
    if stream is not None:
        stream.close()


def test_two_graphs_at_once_and_a_graph_gone_through_twice(folder: Path) -> None:
    model, inputs = resident(folder, None, lora_dropout=0.0), ActivationOffload(CPU)
    held(model, CheckpointPolicy(selective=True, inputs=inputs))
    other = IDS.flip(1)
    wanted = []
    for ids in (IDS, other):
        model.zero_grad()
        loss_of(model, ids).backward()
        wanted.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    losses = [loss_of(model, ids) for ids in (IDS, other)]
    for loss, gradients in zip(losses, wanted, strict=True):
        for again in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=again)
            found = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, gradients, strict=True))


def test_a_result_that_was_written_into_is_computed_again() -> None:
    a, b = (torch.randn(8, 8, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in (0, 1))

    def block(x: Tensor) -> Tensor:
        y = x @ b
        y.mul_(2.0)
        return (y @ b).sin()

    block(a).sum().backward()
    assert a.grad is not None and b.grad is not None
    wanted = a.grad.clone(), b.grad.clone()
    a.grad = b.grad = None
    checkpoint(block, a, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch.equal(a.grad, wanted[0]) and torch.equal(b.grad, wanted[1])


def test_a_block_that_is_another_one_the_second_time_is_no_block() -> None:
    a = torch.randn(8, 8, requires_grad=True)
    products = iter([torch.mm, torch.addmm])

    def block(x: Tensor) -> Tensor:
        product = next(products)
        y = product(x, x) if product is torch.mm else product(x, x, x)
        return y.sin()

    loss = checkpoint(block, a, use_reentrant=False, context_fn=contexts).sum()
    with pytest.raises(RuntimeError, match="in another way"):
        loss.backward()


def test_an_input_that_is_written_into_is_told() -> None:
    inputs = ActivationOffload(CPU)
    tensor = torch.zeros(4)
    stored = inputs.put(tensor)
    tensor.add_(1.0)
    with pytest.raises(RuntimeError, match="written into"):
        inputs.get(stored)


def test_what_is_kept_needs_a_graph_that_is_made_again() -> None:
    with pytest.raises(RuntimeError, match="under the hooks of a checkpoint"), SavedResults().keeping():
        pass


def test_a_model_that_cannot_be_checkpointed_is_refused(folder: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.supports_gradient_checkpointing = False
    with pytest.raises(ModelError, match="cannot be checkpointed") as error:
        checkpoint_blocks(model, CheckpointPolicy())
    assert error.value.field == "memory.gradient_checkpointing"


def test_host_memory_grows_with_the_largest_batch_and_is_used_again() -> None:
    pool = HostPool(pinned=False)
    first = [pool.take(mmap.PAGESIZE) for _ in range(3)]
    for buffer in first:
        pool.give(buffer)
    larger = [pool.take(3 * mmap.PAGESIZE - 1) for _ in range(3)]
    assert pool.nbytes == 9 * mmap.PAGESIZE, "those that were too small are gone"
    for buffer in larger:
        pool.give(buffer)
    assert pool.take(1) in larger
    pool.close()
    assert pool.nbytes == 3 * mmap.PAGESIZE, "what is in use is freed when it is given back"
    pool.give(larger[0])
    assert pool.nbytes == 0


def test_what_the_system_refuses_names_this_field() -> None:
    error = refused(1 << 20, "error 2 of cudaHostRegister", f"{FIELD}.pinned")
    assert error.field == "memory.activation_offloading.pinned" and f"`{FIELD}.pinned` to false" in error.message


# --- jobs ------------------------------------------------------------------------------------------------

AXES: dict[str, Any] = {
    "method": {"type": "qlora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": {"max_steps": 3, "gradient_accumulation_steps": 2, "max_length": 64},
    "batching": {"type": "packed", "tokens_per_batch": 96},
    "evaluation": {"type": "held_out", "eval_steps": 2, "samples": {"type": "greedy", "rows": 2, "max_new_tokens": 4}},
}


class InWindow(Stop):
    """Asks to leave at the n-th place in training where the run looks whether it should."""

    def __init__(self, run_dir: Path, place: int) -> None:
        super().__init__()
        self._run_dir, self._left = run_dir, place

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self._left -= any(event["phase"] == "training" for event in events(self._run_dir, "phase"))
        return self._left < 0

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def _told(*run_dirs: Path) -> list[Any]:
    """What steps, evaluations and samples gave, over the attempts of a run."""
    everything = [event for run_dir in run_dirs for event in events(run_dir)]
    figures = [(e["values"]["loss"], e["values"]["grad_norm"]) for e in everything if e["type"] == "metrics"]
    evaluations = [e["values"] for e in everything if e["type"] == "evaluation"]
    return [figures, evaluations, [e["samples"] for e in everything if e["type"] == "samples"]]


def test_jobs_hand_back_the_same_however_they_keep_activations(tiny_dir: Path, tmp_path: Path) -> None:
    """Begun with inputs in host memory, left in the middle of a window, and gone on with selective checkpoints."""
    rows, rest = write_rows(tmp_path / "rows.jsonl", pairs(24)), write_rows(tmp_path / "held.jsonl", pairs(4))

    def order(name: str, resume_from: list[Path], **memory: Any) -> Path:
        run_dir = tmp_path / name
        return write_run(run_dir, tiny_dir, rows, held_out=rest, memory=memory, resume_from=resume_from, **AXES)

    plain = order("plain", [])
    assert run(plain) == EXIT_OK, events(plain)[-1]
    first = order("first", [], activation_offloading=True)
    assert run(first, InWindow(first, 5)) == EXIT_CHECKPOINTED, events(first)[-1]
    assert events(first, "checkpoint")[-1]["micro_step"] == 1 and events(first, "metrics")
    second = order("second", [first], gradient_checkpointing="selective")
    assert run(second) == EXIT_OK, events(second)[-1]
    assert weights(second) == weights(plain)
    assert _told(first, second) == _told(plain)

    kept = [events(each, "run_record")[0]["record"]["memory"]["activations"] for each in (plain, first, second)]
    assert kept == [
        {"kept": "all"},
        {"kept": "inputs", "where": "host", "pinned": False},
        {"kept": "selected", "where": "device"},
    ]
    told = [[event["code"] for event in notices(each)] for each in (plain, first, second)]
    for codes in told:  # a CPU without bf16 computes in fp32, and says so
        codes[:] = [code for code in codes if code != "precision_fallback"]
    assert told == [[], ["activation_offloading"], []]


def test_a_run_whose_inputs_stay_on_the_device_says_so(tiny_dir: Path, tmp_path: Path) -> None:
    rows, put = write_rows(tmp_path / "rows.jsonl", pairs(8)), ActivationOffload.put

    def put_what_is_not_contiguous(inputs: ActivationOffload, tensor: Tensor) -> Tensor:
        put(inputs, tensor.mT)
        return tensor

    def prepare() -> None:
        ActivationOffload.put = put_what_is_not_contiguous  # type: ignore[method-assign]

    codes = []
    for name in ("moved", "stayed"):
        training = {"max_steps": 1, "max_length": 64}
        run_dir = write_run(tmp_path / name, tiny_dir, rows, memory={"activation_offloading": True}, training=training)
        assert run(run_dir, None, prepare if name == "stayed" else None) == EXIT_OK, events(run_dir)[-1]
        codes.append([notice["code"] for notice in notices(run_dir)])
    assert codes[1] == [*codes[0], "activations_stayed"]


def _job(**memory: Any) -> Any:
    return parse_job({"model": "a/b", "data": "file-0123456789abcdefghjkmnpqrs", "memory": memory})


def test_offloading_implies_checkpoints_and_is_refused_without() -> None:
    assert resolve(_job()).memory.gradient_checkpointing is False
    for short in (True, "host", {"type": "host", "pinned": False}):
        spec = resolve(_job(activation_offloading=short))
        assert spec.memory.gradient_checkpointing is True and spec.memory.activation_offloading.type == "host"
        assert not check(spec)
    assert resolve(_job(activation_offloading=True, gradient_checkpointing="selective")).memory == (
        _job(activation_offloading=True, gradient_checkpointing="selective").memory
    )
    (fault,) = check(_job(activation_offloading=True, gradient_checkpointing=False))
    assert (fault.code, fault.field) == ("nothing_kept_to_offload", "memory.gradient_checkpointing")
    assert not check(_job(activation_offloading=False, gradient_checkpointing=False))
