"""Whole models: both ways with the real bitsandbytes, the cache, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from core.errors import ModelError
from core.train.quant.adapters import fuse_adapters
from core.train.quant.cache import save_quantized, store
from core.train.quant.linear import QuantLinear
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions
from tests.support import small_llama
from tests.support.small_llama import IDS


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    small_llama.save(path, torch.bfloat16, shards="40KB", attention_bias=True, tie_word_embeddings=request.param)
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def _copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_same_logits_as_bitsandbytes_both_ways(folder: Path, tmp_path: Path, double: bool) -> None:
    options = QuantOptions(double=double)
    ours, report = load_quantized(folder, torch.bfloat16, options)
    assert report.layers == 14 and report.kept == {"lm_head": "output head"} and report.source == "quantised"
    assert report.packed_bytes < 0.4 * report.dense_bytes
    ask = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=ask)
    # Not under no_grad and not in eval mode: there bitsandbytes' CPU path takes another kernel, with rounded scales.
    logits = ours.train()(IDS).logits
    assert torch.equal(theirs.train()(IDS).logits, logits)

    save_quantized(ours, tmp_path / "ours", options, list(report.kept))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(read.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"
    assert torch.equal(read.train()(IDS).logits, logits)

    theirs.save_pretrained(tmp_path / "theirs")
    again, report = load_quantized(tmp_path / "theirs", torch.bfloat16, options)
    assert report.source == "as it is" and torch.equal(again.train()(IDS).logits, logits)
    a, b = load_file(tmp_path / "ours/model.safetensors"), load_file(tmp_path / "theirs/model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_the_second_start_reads_the_cache(folder: Path, tmp_path: Path, format: str) -> None:
    options = QuantOptions(format=format)  # type: ignore[arg-type]
    first, report = load_quantized(folder, torch.bfloat16, options, tmp_path)
    second, report2 = load_quantized(folder, torch.bfloat16, options, tmp_path)
    assert (report.source, report2.source) == ("quantised", "cache") and report2.layers == 14
    assert torch.equal(first(IDS).logits, second(IDS).logits)
    _, other = load_quantized(folder, torch.bfloat16, QuantOptions(format=format, skip=("o_proj",)), tmp_path)  # type: ignore[arg-type]
    assert other.source == "quantised" and other.layers == 12 and other.kept["model.layers.0.self_attn.o_proj"]

    for entry in tmp_path.iterdir():
        file = entry / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])  # a disk that lost the end
    third, report3 = load_quantized(folder, torch.bfloat16, options, tmp_path)
    assert report3.source == "quantised" and torch.equal(third(IDS).logits, first(IDS).logits)
    assert all(not e.name.startswith(".") for e in tmp_path.iterdir())
    for manifest in tmp_path.glob("*/manifest.json"):
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 0}))
    fourth, report4 = load_quantized(folder, torch.bfloat16, options, tmp_path)
    assert report4.source == "quantised" and "of version 0" in str(report4.cache_fault)
    assert torch.equal(fourth(IDS).logits, first(IDS).logits)
    _, report5 = load_quantized(folder, torch.bfloat16, options, tmp_path)
    assert report5.source == "cache" and report5.cache_fault is None


def test_widths_that_are_no_multiple_of_a_block(tmp_path: Path) -> None:
    """Blocks run across rows, as in bitsandbytes' layout: 9.5 % error a weight whatever the width, and files that read
    back."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=72, intermediate_size=100, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    plain = LlamaForCausalLM(config).eval()
    plain.save_pretrained(tmp_path / "odd")
    packed, report = load_quantized(tmp_path / "odd", torch.float32)
    assert report.layers == 7
    for name, module in packed.named_modules():
        if isinstance(module, QuantLinear):
            wanted = plain.get_submodule(name).weight
            assert (module.dense_weight() - wanted).norm() / wanted.norm() < 0.11
    save_quantized(packed, tmp_path / "again", QuantOptions(), [])
    again, _ = load_quantized(tmp_path / "again", torch.float32)
    assert torch.equal(again(IDS).logits, packed(IDS).logits)


def test_saved_int8_reads_back_and_says_so_as_nf4(folder: Path, tmp_path: Path) -> None:
    options = QuantOptions(format="int8")
    model, report = load_quantized(folder, torch.bfloat16, options)
    save_quantized(model, tmp_path / "int8", options, list(report.kept))
    again, report = load_quantized(tmp_path / "int8", torch.bfloat16, options)
    assert report.source == "as it is" and torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(ModelError, match="already quantised"):
        load_quantized(tmp_path / "int8", torch.bfloat16)


def test_dense_parts_are_whole_and_mode_is_eval(folder: Path) -> None:
    model, _ = load_quantized(folder, torch.bfloat16)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert not model.training and not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    tied = plain.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not any(isinstance(m, QuantLinear) for m in [model.lm_head])
    assert model.generate(IDS[:1], max_new_tokens=3, do_sample=False).shape == (1, 12)


def test_bad_files_are_named(folder: Path, tmp_path: Path) -> None:
    cut = _copy(folder, tmp_path / "cut")
    shard = sorted(cut.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-64])
    with pytest.raises(ModelError, match=f"{shard.name} is truncated or damaged"):
        load_quantized(cut, torch.bfloat16)

    lost = _copy(folder, tmp_path / "lost")
    shard = sorted(lost.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}"):
        load_quantized(lost, torch.bfloat16)

    for name, words in (("mlp.up_proj.weight", "cannot be quantised"), ("input_layernorm.weight", "holds NaN")):
        bad = _copy(folder, tmp_path / name)
        for shard in bad.glob("*.safetensors"):
            tensors = load_file(shard)
            for key in tensors:
                if key.endswith("layers.1." + name):
                    tensors[key].view(-1)[0] = float("nan")
            save_file(tensors, shard, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=rf"model\.layers\.1\.{name}.*{words}"):
            load_quantized(bad, torch.bfloat16)

    wide = small_llama.save(tmp_path / "wide", torch.float32)  # finite there, and not in the run's dtype
    tensors = load_file(wide / "model.safetensors")
    tensors["model.norm.weight"].fill_(3.4e38)
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds .* past bfloat16's range"):
        load_quantized(wide, torch.bfloat16)

    extra = _copy(folder, tmp_path / "extra")
    shard = sorted(extra.glob("*.safetensors"))[0]
    save_file({**load_file(shard), "model.unknown.weight": torch.zeros(2)}, shard, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.unknown\.weight is in the files but not in the model"):
        load_quantized(extra, torch.bfloat16)


def test_what_is_not_quantised_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    small = {"vocab_size": 97, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ModelError, match="Conv1D"):
        load_quantized(tmp_path / "gpt2", torch.bfloat16)
    mixtral = MixtralConfig(**small, hidden_size=32, intermediate_size=64, num_local_experts=2)
    MixtralForCausalLM(mixtral).save_pretrained(tmp_path / "mixtral")
    with pytest.raises(ModelError, match="experts"):
        load_quantized(tmp_path / "mixtral", torch.bfloat16)
    other = _copy(folder, tmp_path / "gptq")
    config = json.loads((other / "config.json").read_text())
    for about, words in (
        ({"quant_method": "gptq", "bits": 4}, r"already quantised \(gptq\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"already quantised \(bitsandbytes\)"),
    ):
        (other / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
        with pytest.raises(ModelError, match=words):
            load_quantized(other, torch.bfloat16)
    (other / "config.json").write_text(
        json.dumps({**config, "quantization_config": {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}})
    )  # fmt: skip
    with pytest.raises(ModelError, match="cannot become int8"):
        load_quantized(other, torch.bfloat16, QuantOptions(format="int8"))


def test_skip_lists_are_held_to_what_is_there(folder: Path, tmp_path: Path) -> None:
    _, report = load_quantized(folder, torch.bfloat16, QuantOptions(skip=("o_proj", "model.layers.1.mlp.up_proj")))
    assert report.layers == 11 and set(report.kept) - {"lm_head"} == {
        "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj",
    }  # fmt: skip
    for name in ("mlp", "oproj", "model.layers.7.mlp.up_proj"):
        with pytest.raises(ModelError, match=f"no linear layer `{name}` to leave dense; .*up_proj") as caught:
            load_quantized(folder, torch.bfloat16, QuantOptions(skip=(name,)))
        assert caught.value.field == "quantization.skip_modules"
    ours, report = load_quantized(folder, torch.bfloat16)
    save_quantized(ours, tmp_path / "packed", QuantOptions(), list(report.kept))
    with pytest.raises(
        ModelError, match=r"o_proj is packed in the files.*leave it out of skip_modules, or name the 16"
    ):
        load_quantized(tmp_path / "packed", torch.bfloat16, QuantOptions(skip=("o_proj",)))


def test_a_packed_head_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """bitsandbytes packs the head, too, when it is told to skip nothing."""
    config = LlamaConfig.from_pretrained(folder)
    if config.tie_word_embeddings:
        return  # a tied head is an embedding, which nobody packs
    ask = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["nothing"])
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=ask).save_pretrained(
        tmp_path / "all"
    )
    with pytest.raises(ModelError, match=r"lm_head is packed in the files.*\(output head\); name the 16-bit model"):
        load_quantized(tmp_path / "all", torch.bfloat16)


def test_packed_from_float16_and_merged_in_bfloat16(tmp_path: Path) -> None:
    """What a merge makes has the run's dtype, whatever dtype was packed: in two dtypes the model cannot run."""
    small_llama.save(tmp_path / "base", torch.float16)
    packed, report = load_quantized(tmp_path / "base", torch.float16)
    save_quantized(packed, tmp_path / "packed", QuantOptions(), list(report.kept))
    model = small_llama.adapted(tmp_path / "packed", torch.bfloat16).eval()
    fuse_adapters(model)
    before = model(IDS).logits.float()
    merged = model.merge_and_unload()
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert (merged(IDS).logits.float() - before).norm() / before.norm() < 0.02


def test_the_slower_of_two_that_pack_the_same_finds_it_done(folder: Path, tmp_path: Path) -> None:
    options = QuantOptions()
    model, report = load_quantized(folder, torch.bfloat16, options, tmp_path)
    (entry,) = tmp_path.iterdir()
    times = {file: file.stat().st_mtime_ns for file in entry.iterdir()}
    assert store(tmp_path, entry.name, model, options, sorted(report.kept)) is None
    assert list(tmp_path.iterdir()) == [entry] and {f: f.stat().st_mtime_ns for f in entry.iterdir()} == times


def test_other_content_is_another_entry_of_the_cache(folder: Path, tmp_path: Path) -> None:
    _, first = load_quantized(folder, torch.bfloat16, None, tmp_path / "cache")
    other = _copy(folder, tmp_path / "other")
    shard = sorted(other.glob("*.safetensors"))[0]
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, shard, metadata={"format": "pt"})
    for at, dtype in ((other, torch.bfloat16), (folder, torch.float32)):
        _, report = load_quantized(at, dtype, None, tmp_path / "cache")
        assert report.source == "quantised"
    assert first.source == "quantised" and len(list((tmp_path / "cache").iterdir())) == 3
