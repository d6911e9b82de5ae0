"""Methods alone: each against PEFT's or transformers' own, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from transformers.integrations.neftune import neftune_post_forward_hook

from core.errors import SpecError
from core.plan.device import Device
from core.plan.memory.plan import plan
from core.plan.models.freeze import trained_names
from core.plan.models.shape import Shape
from core.spec.axes.method import OFT, Full, LoRA, TrainedPart
from core.spec.axes.optimizer import AdamW
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.train.base.rng import seed_all
from core.train.export.merge import write_merged
from core.train.loss.head import OutputHead, head_of
from core.train.methods.full import adapt_full
from core.train.methods.lora import adapt_lora, parameter_groups
from core.train.methods.neftune import add_noise
from core.train.methods.oft import adapt_oft
from core.train.methods.start import begin_at_base, write_out_starts
from core.train.model.load import load_model
from core.train.optim.groups import decay_groups, hidden_matrices
from core.train.optim.optimizers import build_optimizer
from core.train.quant.model import load_quantized
from core.train.vocabulary.new_tokens import add_tokens, ids_of, require_new
from core.train.vocabulary.rows import grow
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support import small_llama


def adapted(tiny: Path, spec: LoRA) -> Any:
    seed_all(3)
    return adapt_lora(load_model(tiny, torch.float32), spec)


@pytest.mark.parametrize("dora", [False, True])
def test_lora_plus_is_pefts_to_the_bit(tiny_dir: Path, dora: bool) -> None:
    spec = LoRA(r=4, lora_alpha=8, loraplus_lr_ratio=8.0, use_dora=dora)
    ours, theirs = adapted(tiny_dir, spec), adapted(tiny_dir, spec)
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    groups = parameter_groups(ours, spec)
    one = build_optimizer(AdamW(learning_rate=1e-2), groups, trained)
    other = create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=8.0, fused=True)
    ids = torch.arange(2, 26).view(2, 12)
    for _ in range(3):
        for model, optimizer in ((ours, one), (theirs, other)):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(p, theirs.get_parameter(name)) for name, p in trained.items())
    assert one.param_groups[0]["lr"] == 1e-2, "the rate of a step is that of A"


@pytest.mark.parametrize("how", ["pissa", "olora"])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_begins_as_pefts_and_loads_over_the_base(
    tiny_dir: Path, tmp_path: Path, how: Any, rslora: bool
) -> None:
    spec = LoRA(r=4, lora_alpha=6, use_rslora=rslora, init_lora_weights=how)
    theirs: Any = get_peft_model(
        load_model(tiny_dir, torch.float32),
        LoraConfig(r=4, lora_alpha=6, use_rslora=rslora, target_modules="all-linear", init_lora_weights=how),
    )
    ours = adapted(tiny_dir, spec)
    base = load_model(tiny_dir, torch.float32)
    begin_at_base(ours, spec, torch.device("cpu"))
    ids = torch.arange(2, 26).view(2, 12)
    assert torch.equal(ours(ids).logits, base(ids).logits), "it begins as the base, to the bit"
    optimizers = []
    for model in (ours, theirs):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers.append(torch.optim.SGD(trained, lr=1e-3))
    for _ in range(2):
        losses = [model(input_ids=ids, labels=ids).loss for model in (ours, theirs)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                mine = ours.get_parameter(name)
                torch.testing.assert_close(mine, parameter, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-3, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    trained_to = ours(ids).logits.detach()
    assert (trained_to - base(ids).logits).abs().max() > 1e-3
    write_out_starts(ours)
    ours.save_pretrained(tmp_path)
    read: Any = PeftModel.from_pretrained(base, str(tmp_path))
    torch.testing.assert_close(read(ids).logits, trained_to, rtol=1e-5, atol=1e-6)
    assert {p.shape[0] for n, p in read.named_parameters() if "lora_A" in n} == {8}


def test_an_approximate_start_is_near_the_exact_one(tiny_dir: Path) -> None:
    products = []
    for how in ("pissa", "pissa_niter_16"):
        spec = LoRA(r=4, lora_alpha=8, init_lora_weights=how)
        model = adapted(tiny_dir, spec)
        begin_at_base(model, spec, torch.device("cpu"))
        layer = model.get_base_model().model.layers[0].mlp.up_proj
        products.append(layer.lora_B["default"].weight @ layer.lora_A["default"].weight)
    torch.testing.assert_close(*products, rtol=0.05, atol=0.01)


def test_a_layer_with_too_few_directions(tiny_dir: Path) -> None:
    method = {"type": "lora", "r": 128, "init_lora_weights": "olora"}
    job = resolve(parse_job({"model": str(tiny_dir), "data": "/rows.jsonl", "method": method}))
    assert isinstance(job.method, LoRA)
    with pytest.raises(SpecError, match="directions") as planned:
        plan(job, Shape.of_folder(tiny_dir), longest=64, device=Device("cpu"))
    with pytest.raises(SpecError, match="directions") as found:
        begin_at_base(adapted(tiny_dir, job.method), job.method, torch.device("cpu"))
    assert planned.value.field == found.value.field == "method.r"


def test_whole_modules_are_trained_as_pefts(tmp_path: Path) -> None:
    folder = small_llama.save(tmp_path)
    names = ["embed_tokens", "lm_head", "input_layernorm"]
    spec = LoRA(r=4, lora_alpha=8, modules_to_save=names)
    ours = adapted(folder, spec)
    seed_all(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=names)
    theirs: Any = get_peft_model(load_model(folder, torch.float32), config)
    head, ids = head_of(ours), torch.arange(2, 26).view(2, 12)
    assert isinstance(head, OutputHead), "logits in chunks, as with a frozen head"
    assert head.weight is ours.get_base_model().lm_head.modules_to_save["default"].weight
    for model in (ours, theirs):
        model(input_ids=ids, labels=ids).loss.backward()
    for name, parameter in theirs.named_parameters():
        mine = ours.get_parameter(name)
        assert mine.requires_grad is parameter.requires_grad, name
        assert parameter.grad is None or torch.equal(mine.grad, parameter.grad), name
    narrow: Any = adapt_lora(load_model(folder, torch.bfloat16), spec)
    trained = {p.dtype for p in narrow.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        assert narrow.get_input_embeddings()(ids).dtype == torch.bfloat16, "blocks compute as with frozen embeddings"


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_new_tokens_are_trained_as_pefts(tiny_dir: Path, tmp_path: Path, tied: bool) -> None:
    folder = tiny_dir if tied else small_llama.save(tmp_path)
    size = load_model(folder, torch.float32).get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    new, spec = [size, size + 1], LoRA(r=4, lora_alpha=8)
    ours: Any = load_model(folder, torch.float32)
    grow(ours, new)
    start = ours.get_input_embeddings().weight.detach()
    assert torch.equal(start[size], start[:size].mean(0)) and torch.equal(start[size], start[size + 1])
    seed_all(3)
    ours = adapt_lora(ours, spec, new=new)
    theirs: Any = load_model(folder, torch.float32)
    grow(theirs, new)
    seed_all(3)
    rows: Any = new if tied else {"embed_tokens": new, "lm_head": new}
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", trainable_token_indices=rows)
    theirs = get_peft_model(theirs, config)
    ids = torch.tensor([[2, 3, size, 4, size + 1, 5, size, 6]])
    for model in (ours, theirs):
        model(input_ids=ids, labels=ids).loss.backward()
    grads = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert sum("trainable_tokens_delta" in name for name in grads) == (1 if tied else 2)
    for name, parameter in theirs.named_parameters():
        assert parameter.requires_grad is (name in grads), name
        assert not parameter.requires_grad or torch.equal(grads[name], parameter.grad), name
    assert not any("trainable_tokens" in name for name in hidden_matrices(ours)), "of the embedding, not of a layer"


@pytest.mark.parametrize(
    ("new", "words"), [(["<a>", "<a>"], "twice"), ([" <a>"], "white space"), (["x"], "at least 2")]
)
def test_new_tokens_that_are_none(new: list[str], words: str) -> None:
    job = {"model": "a/b", "data": "/rows.jsonl", "method": {"type": "lora", "new_tokens": new}}
    with pytest.raises(SpecError, match=words) as refused:
        parse_job(job)
    assert "new_tokens" in refused.value.faults[0].field


def test_new_tokens_that_are_there_already(tiny_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_dir)
    with pytest.raises(SpecError, match="already has the token") as refused:
        require_new(tokenizer, ["<look>", tokenizer.eos_token])
    assert refused.value.field == "method.new_tokens"
    add_tokens(tokenizer, ["<look>"])
    add_tokens(tokenizer, ["<look>"])
    (number,) = tokenizer("<look>", add_special_tokens=False)["input_ids"]
    assert [number] == ids_of(tokenizer, ["<look>"])


@pytest.mark.parametrize(
    ("modules", "quantization", "words"),
    [
        (["lm_head"], "none", "shares its weights"),
        (["embed_tokens"], "none", "shares its weights"),
        (["k_norm"], "none", "no module `k_norm`"),
        (["down_proj"], "nf4", "packed"),
    ],
)
def test_modules_that_cannot_be_trained_whole(
    tiny_dir: Path, modules: list[str], quantization: Any, words: str
) -> None:
    method = {"type": "lora", "r": 4, "target_modules": "attention", "modules_to_save": modules}
    axes = {"model": str(tiny_dir), "data": "/rows.jsonl", "method": method, "quantization": quantization}
    job = resolve(parse_job(axes))
    assert isinstance(job.method, LoRA)
    with pytest.raises(SpecError, match=words) as planned:
        plan(job, Shape.of_folder(tiny_dir), longest=64, device=Device("cpu"))
    base = load_model(tiny_dir, torch.float32) if quantization == "none" else load_quantized(tiny_dir, torch.float32)[0]
    with pytest.raises(SpecError, match=words) as found:
        adapt_lora(base, job.method)
    assert planned.value.field == found.value.field == "method.modules_to_save"


def test_noise_is_that_of_transformers_and_only_while_training() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.Embedding(9, 8)

        def get_input_embeddings(self) -> nn.Module:
            return self.embeddings

    model, ids = Model(), torch.tensor([[1, 2, 3], [4, 5, 6]])
    plain = model.embeddings(ids)
    add_noise(model, 5.0)
    seed_all(1)
    noisy = model.embeddings(ids)
    seed_all(1)
    model.embeddings.neftune_noise_alpha = 5.0  # type: ignore[assignment]
    assert torch.equal(noisy, neftune_post_forward_hook(model.embeddings, None, plain))
    assert not torch.equal(noisy, plain)
    model.eval()
    assert torch.equal(model.embeddings(ids), plain)


@pytest.mark.parametrize(
    ("part", "first"),
    [
        ({"layers": "last 1"}, ["model.layers.1"]),
        ({"layers": "first 1", "embeddings": True, "head": True}, ["model.embed_tokens", "model.layers.0"]),
        ({"layers": [0, 1], "embeddings": True}, ["model.embed_tokens", "model.layers.0", "model.layers.1"]),
        ({"layers": "none", "norms": True}, ["model.layers.0", "model.layers.1", "model.norm.weight"]),
    ],
)
def test_the_layers_that_are_trained(tiny_dir: Path, part: dict[str, Any], first: list[str]) -> None:
    model = adapt_full(load_model(tiny_dir, torch.float32), Full(train=TrainedPart(**part)))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert (
        sorted(
            {
                ".".join(name.split(".")[:3])
                if "layers" in name
                else name.removesuffix(".weight") + (".weight" if "norm" in name else "")
                for name in trained
            }
        )
        == first
    )
    if part["layers"] == "none":
        assert all("norm" in name for name in trained)


@pytest.mark.parametrize("exact", [True, False])
def test_oft_rotates_and_is_merged(tiny_dir: Path, tmp_path: Path, exact: bool) -> None:
    spec = OFT(oft_block_size=8, use_cayley_neumann=not exact)
    model: Any = adapt_oft(load_model(tiny_dir, torch.float32), spec)
    ids = torch.arange(3, 20)[None]
    with model.disable_adapter():
        before = model(ids).logits
    assert torch.equal(model(ids).logits, before), "rotations begin as none"
    seed_all(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.02)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    turned = layer.get_delta_weight("default")
    eye = torch.eye(turned.shape[0])
    torch.testing.assert_close(turned @ turned.t(), eye, rtol=0, atol=1e-5 if exact else 1e-3)
    x = torch.randn(3, turned.shape[0])
    torch.testing.assert_close(layer(x), layer.base_layer(x @ turned))
    write_merged(model, tmp_path / "merged", model_dir=tiny_dir, dtype=torch.float32)
    merged = load_model(tmp_path / "merged", torch.float32)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "field"), [({"oft_block_size": 7}, "oft_block_size"), ({"r": 7}, "r")])
def test_blocks_that_do_not_divide_a_layer(tiny_dir: Path, size: dict[str, int], field: str) -> None:
    spec = OFT(**size)
    with pytest.raises(SpecError, match="inputs") as refused:
        adapt_oft(load_model(tiny_dir, torch.float32), spec)
    assert refused.value.field == f"method.{field}"
    job = parse_job({"model": str(tiny_dir), "data": "/rows.jsonl", "method": {"type": "oft", **size}})
    with pytest.raises(SpecError, match="inputs") as refused:
        plan(resolve(job), Shape.of_folder(tiny_dir), longest=64, device=Device("cpu"))
    assert refused.value.field == f"method.{field}"


NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight", "model.norm.weight"]


@pytest.mark.parametrize(
    ("part", "tied", "field", "words"),
    [
        ({"layers": "last 3"}, True, "method.train.layers", "2 layers"),
        ({"layers": [0, 2]}, True, "method.train.layers", "2 layers"),
        ({"layers": "none", "head": True}, True, "method.train.head", "embeddings"),
        ({"layers": "none", "head": True}, False, "method.train.head", "no head"),
    ],
)
def test_layers_that_do_not_exist(part: dict[str, Any], tied: bool, field: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        trained_names(TrainedPart(**part), NAMES, "model.layers", 2, tied=tied)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "groups",
    [[{"pattern": "*.attention.*"}], [{"pattern": "*"}, {"pattern": "*.mlp.*"}]],
    ids=["nothing", "all taken before"],
)
def test_a_pattern_without_parameters(tiny_dir: Path, groups: list[dict[str, Any]]) -> None:
    job = parse_job({"model": "a/b", "data": "/r.jsonl", "optimizer": {"parameter_groups": groups}})
    model = adapted(tiny_dir, LoRA(r=4, lora_alpha=8))
    spec = job.optimizer.model_copy(update={"learning_rate": 1e-3})
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(SpecError) as refused:
        build_optimizer(spec, decay_groups(model), trained)
    assert refused.value.field == f"optimizer.parameter_groups[{len(groups) - 1}].pattern"


@pytest.mark.parametrize(
    ("axes", "field"),
    [
        ({"method": {"type": "full", "train": {"layers": "none"}}}, "method.train"),
        ({"method": {"type": "full", "train": {"layers": "middle 2"}}}, "method.train.layers"),
        ({"method": {"type": "lora", "loraplus_lr_ratio": 0.5}}, "method.loraplus_lr_ratio"),
        ({"method": {"type": "full", "loraplus_lr_ratio": 4}}, "method.loraplus_lr_ratio"),
        ({"method": {"type": "lora", "init_lora_weights": "pissa", "lora_dropout": 0.1}}, "method"),
        ({"method": {"type": "lora", "init_lora_weights": "olora", "use_dora": True}}, "method"),
        ({"method": {"type": "lora", "init_lora_weights": "pissa", "r": 256}}, "method"),
        ({"method": {"type": "lora", "init_lora_weights": "loftq"}}, "method.init_lora_weights"),
        ({"method": {"type": "oft", "r": 4, "oft_block_size": 8}}, "method"),
        ({"training": {"neftune_noise_alpha": 0}}, "training.neftune_noise_alpha"),
        ({"optimizer": {"parameter_groups": [{"pattern": "a b"}]}}, "optimizer.parameter_groups[0].pattern"),
    ],
)
def test_bad_input_names_its_field(axes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({"model": "a/b", "data": "/rows.jsonl", **axes})
    assert any(fault.field.startswith(field) for fault in refused.value.faults), refused.value.faults
