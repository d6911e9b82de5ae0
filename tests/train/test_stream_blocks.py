"""Blocks that pass through slots: the same gradients to the bit, clean after every failure, refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from core.errors import ModelError, NoSpace, SpecError
from core.train.memory.streaming.block_image import check_room, load_from_disk
from core.train.memory.streaming.block_source import BlocksLost, FileBlocks
from core.train.memory.streaming.blocks import find_blocks, lay_out
from core.train.memory.streaming.prefetch_cache import CacheSlot, PrefetchCache, SlotFiller
from core.train.memory.streaming.stream import StreamedModel, on_device, stream_from_host
from core.train.memory.transfer.pinned import refused
from core.train.quant.linear import QuantLinear
from core.train.quant.targets import QuantOptions
from tests.support.blocks import CPU, IDS, adapt, backwards, from_disk, from_host, resident, same
from tests.support.small_llama import save

BLOCKS = 5
NF4, INT8 = QuantOptions("nf4"), QuantOptions("int8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    return save(path, torch.bfloat16, num_hidden_layers=BLOCKS, shards="100KB")  # several shards


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of the resident NF4 model."""
    return backwards(resident(folder, NF4))


@pytest.fixture
def streamed(folder: Path) -> Iterator[tuple[Any, StreamedModel]]:
    model, stream = from_host(folder, NF4, slots=2)
    yield model, stream
    stream.close()


def at_rest(stream: StreamedModel) -> bool:
    """Nothing in use, and the model shows every block where it lies for good."""
    views = [block.views(stream.source.rest(number)) for number, block in enumerate(stream.blocks)]
    places = [block.places for block in stream.blocks]
    return stream.cache.held is None and all(
        place.tensor.data_ptr() == view.data_ptr()
        for there, seen in zip(places, views, strict=True)
        for place, view in zip(there, seen, strict=True)
    )


# --- the same to the bit -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, lora",
    [(None, {}), (NF4, {}), (QuantOptions("nf4", double=False), {}), (INT8, {"use_dora": True})],
    ids=["bf16", "nf4", "nf4 with single scales", "int8 and DoRA"],
)
def test_host_and_disk_give_the_gradients_of_the_resident_model(
    folder: Path, cache: Path, options: QuantOptions | None, lora: dict[str, Any]
) -> None:
    wanted = backwards(resident(folder, options, **lora))
    assert len(wanted[1]) >= 14 * BLOCKS
    for slots, where in ((1, "host"), (2, "disk"), (3, "host")):
        if where == "host":
            model, stream = from_host(folder, options, slots, **lora)
        else:
            model, stream = from_disk(folder, cache, options, slots, **lora)
        assert same(backwards(model), wanted)
        assert at_rest(stream)
        counts = stream.counts
        # Each of two passes takes every block twice: forwards, and for recomputation and backward together.
        assert counts.found + counts.missed == 2 * 2 * BLOCKS
        assert counts.missed == (2 * 2 * BLOCKS - 3 if slots == 1 else 1)  # one slot: only at the three turns
        assert counts.bytes == sum(n * stream.blocks[block].nbytes for block, n in counts.by_block.items())
        stream.close()


def test_frozen_weights_are_never_written(folder: Path) -> None:
    model, stream = from_host(folder, NF4, slots=1)
    before = [stream.source.rest(number).clone() for number in range(BLOCKS)]
    backwards(model)
    assert all(torch.equal(stream.source.rest(number), was) for number, was in enumerate(before))
    stream.close()


def test_what_stays_on_the_device_is_as_the_rule_says(streamed: tuple[Any, StreamedModel]) -> None:
    model, stream = streamed
    moved = {id(place.owner) for block in stream.blocks for place in block.places}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            assert id(module) in moved, name
    for name, parameter in model.named_parameters():
        assert id(parameter) not in moved, name  # embeddings, norms, head, adapters
    assert stream.about() == {
        "slots": 2, "pinned": False, "slot_bytes": stream.blocks[0].nbytes, "blocks": BLOCKS,
        "block_bytes": BLOCKS * stream.blocks[0].nbytes,
    }  # fmt: skip


def test_generation_runs_through_the_slots(folder: Path, streamed: tuple[Any, StreamedModel]) -> None:
    model, stream = streamed
    plain = resident(folder, NF4)
    answers = []
    for each in (plain, model):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            answers.append(each.eval().generate(input_ids=IDS, max_new_tokens=5, do_sample=False))
    assert torch.equal(*answers)
    assert stream.counts.found + stream.counts.missed == 5 * BLOCKS
    assert stream.counts.missed == 1  # from the last block to the first, the copy is ahead as well
    assert at_rest(stream)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "mixtral"])
def test_blocks_of_other_architectures(tmp_path: Path, architecture: str) -> None:
    """Transposed weights and dropout inside the block; norms after it; fused experts."""
    sizes: dict[str, Any] = {
        "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0},
        "gemma2": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "head_dim": 16},
        "mixtral": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "num_local_experts": 4},
    }[architecture]  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, vocab_size=97, **sizes)).save_pretrained(
        tmp_path
    )
    target = {"gpt2": ["c_attn", "c_proj"], "gemma2": "all-linear", "mixtral": "attention"}[architecture]
    wanted = backwards(resident(tmp_path, None, target_modules=target))
    model, stream = from_host(tmp_path, None, slots=1, target_modules=target)
    assert same(backwards(model), wanted)
    if architecture == "mixtral":
        assert any(part.name.endswith("experts.gate_up_proj") for part in stream.blocks[0].parts)
    stream.close()


# --- the slots ---------------------------------------------------------------------------------------------


def test_every_order_of_takes_finds_the_right_block() -> None:
    """Against a table of what each block holds, with copies asked for ahead that are used, and that are not."""

    class Numbers:
        def rest(self, block: int) -> torch.Tensor:
            return torch.full((64,), block, dtype=torch.uint8)

        def read(self, block: int, into: torch.Tensor) -> None:
            into[:64].copy_(self.rest(block))

        def close(self) -> None: ...

    chance = torch.Generator().manual_seed(0)
    for slots in (1, 2, 3, 4):
        source = Numbers()
        buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(slots)]
        filler = SlotFiller(CPU, source, 64, pinned=False)
        cache = PrefetchCache([CacheSlot(buffer) for buffer in buffers], [64] * 6, filler)
        for block in torch.randint(0, 6, (300,), generator=chance).tolist():
            slot = cache.take(block)
            cache.ahead(torch.randperm(6, generator=chance).tolist())
            assert cache.held == block and bool((slot.buffer == block).all())
            if block % 2:
                cache.give()  # and otherwise the next take does
        assert cache.counts.found + cache.counts.missed == 300
        assert sum(cache.counts.by_block.values()) == cache.counts.copies <= 300 * slots
        cache.close()


# --- failures in mid-stream --------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward", "generation"])
def test_a_pass_that_breaks_leaves_nothing_behind(
    streamed: tuple[Any, StreamedModel], expected: Any, where: str, error: type[BaseException]
) -> None:
    model, stream = streamed
    layer = stream.blocks[2].module
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > (1 if where == "recomputation" else 0):
            raise error

    if where == "backward":
        (parameter,) = [p for name, p in layer.named_parameters() if "k_proj.lora_A" in name]
        handle = parameter.register_hook(fail)
    else:
        handle = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(error):
        if where == "generation":
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)
        else:
            backwards(model)
    handle.remove()
    assert at_rest(stream)
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert same(backwards(model.train()), expected)


def test_a_file_that_is_cut_short_is_told_and_not_computed_with(folder: Path, tmp_path: Path, expected: Any) -> None:
    model, stream = from_disk(folder, tmp_path, NF4, slots=2)
    assert same(backwards(model), expected)
    (file,) = tmp_path.glob("*/block-00003.safetensors")
    whole = file.read_bytes()
    with file.open("r+b") as opened:
        opened.truncate(len(whole) // 2)
    with pytest.raises(BlocksLost, match=r"block-00003.*it ends at byte .*last checkpoint"):
        backwards(model)
    assert stream.cache.held is None
    with file.open("r+b") as opened:
        opened.write(whole)
    assert same(backwards(model), expected)  # the same slots, once the disk is back
    stream.close()


def test_a_file_that_is_deleted_is_read_to_the_end(folder: Path, tmp_path: Path, expected: Any) -> None:
    model, stream = from_disk(folder, tmp_path, NF4, slots=1)
    for file in tmp_path.glob("*/*"):
        file.unlink()
    assert same(backwards(model), expected)
    stream.close()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BlocksLost, match="No such file"):
        FileBlocks([(tmp_path / "block-00000.safetensors", 0, 64)])
    (tmp_path / "short").write_bytes(b"x" * 10)
    with pytest.raises(BlocksLost, match="10 bytes in place of 64"):
        FileBlocks([(tmp_path / "short", 0, 64)])


# --- models and slots that cannot be streamed --------------------------------------------------------------


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no blocks are found in Sequential.*leave `memory\.stream` out"):
        find_blocks(nn.Sequential(nn.Linear(4, 4)))


def test_shared_and_tied_blocks_are_refused(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = model.model.layers
    first = layers[3]
    layers[3] = layers[1]
    with pytest.raises(ModelError, match=r"layers\.3 is the same block as .*layers\.1"):
        lay_out(model)
    layers[3] = first
    first.mlp.down_proj.weight = layers[0].mlp.down_proj.weight
    with pytest.raises(ModelError, match=r"layers\.3 shares a weight with .*layers\.0"):
        lay_out(model)


def test_blocks_that_write_to_what_they_share_are_refused(tmp_path: Path) -> None:
    """Gemma 3n hands keys and values from layer to layer: their gradients would be lost without a word."""
    config = AutoConfig.for_model(
        "gemma3n_text", vocab_size=97, vocab_size_per_layer_input=97, hidden_size=64, intermediate_size=64,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, laurel_rank=4, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = adapt(AutoModelForCausalLM.from_config(config), False, target_modules="attention")
    stream = stream_from_host(model, CPU, slots=2)
    with pytest.raises(ModelError, match="share `shared_kv_states`, which they write to"):
        model(input_ids=IDS, use_cache=False)
    stream.close()


def test_slots_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="`slots: 6` for a model of 5 blocks") as refused:
        from_host(folder, NF4, slots=6)
    assert refused.value.field == "memory.stream.slots"


def test_what_the_system_refuses_is_told_with_the_way_out() -> None:
    """No GPU here whose driver could refuse, so the words alone."""
    error = refused(350 << 20, "error 2 of cudaHostRegister")
    assert (error.code, error.field) == ("pinned_memory_refused", "memory.stream.pinned")
    assert "lock 351 MiB" in error.message and "LimitMEMLOCK=" in error.message


def test_an_image_is_whole_or_not_there(folder: Path, tmp_path: Path) -> None:
    """One that was broken off leaves nothing, a damaged one is made anew, and a disk without room is told before it is
    full."""
    with pytest.raises(Broken):
        load_from_disk(folder, torch.bfloat16, NF4, tmp_path, between=_raiser(20))
    assert list(tmp_path.iterdir()) == []
    _, report, _, first = load_from_disk(folder, torch.bfloat16, NF4, tmp_path)
    first.close()
    assert report is not None and report.source == "quantised"
    (file,) = tmp_path.glob("*/block-00001.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    _, report, _, second = load_from_disk(folder, torch.bfloat16, NF4, tmp_path)
    second.close()
    assert report is not None and report.source == "quantised" and "block-00001" in str(report.cache_fault)
    with pytest.raises(NoSpace, match="make room below the data root") as full:
        check_room(tmp_path, 1 << 60)
    assert full.value.needs_bytes == 1 << 60


def _raiser(after: int) -> Any:
    calls = 0

    def between(doing: str) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise Broken

    return between


# --- beside training ---------------------------------------------------------------------------------------


def test_a_module_at_hand_shows_its_slot_and_copies_of_it_do_not_stream(streamed: tuple[Any, StreamedModel]) -> None:
    import copy

    _, stream = streamed
    layer = stream.blocks[4].module.self_attn.q_proj
    before = layer.base_layer.packed.clone()
    with on_device(layer):
        assert stream.cache.held == 4
        assert torch.equal(layer.base_layer.packed, before)
        twin = copy.deepcopy(layer)
    assert at_rest(stream)
    with on_device(twin):
        assert stream.cache.held is None
