"""GGUF files: a tiny one made here in several types, and the real SmolLM2 of the demo."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import wheel
from core.errors import ModelError
from core.spec.axes.model import GGUFModel
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.orders import PrepareOrder
from core.train.hub.gguf import read_header
from core.train.hub.gguf_once import read_once
from core.train.prepare.models import Prepared, prepare_model
from tests.support.tiny_gguf import HEADS, HIDDEN, write_gguf

SMOLLM2 = wheel.gguf()


def prepare(path: Path, cache: Path) -> Prepared:
    return prepare_model(GGUFModel(path=str(path)), cache, [path.parent], False, lambda phase, done, total: None)


def dequantised(path: Path, name: str) -> torch.Tensor:
    """The reference: gguf's own numpy code."""
    tensor = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


Kind = gguf.GGMLQuantizationType


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.BF16, "bfloat16"), (Kind.F16, "float16"), (Kind.Q8_0, "float32"), (Kind.Q4_0, "float32")]
)
def test_values_are_kept_exactly_in_the_smallest_dtype(tmp_path: Path, kind: Kind, dtype: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind)
    prepared = prepare(path, tmp_path / "cache")
    stored = load_file(prepared.model_dir / "model.safetensors")
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    }.items():
        assert stored[ours].dtype is getattr(torch, dtype)
        assert torch.equal(stored[ours].float(), dequantised(path, theirs)), ours
    # llama.cpp stores q and k with the two halves of a rotary pair interleaved.
    query = dequantised(path, "blk.0.attn_q.weight").view(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    query = query.transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(stored["model.layers.0.self_attn.q_proj.weight"].float(), query)
    assert prepared.source["dtype"] == dtype and prepared.source["tensor_types"] == {kind.name: 9, "F32": 3}
    assert prepared.parameters == sum(value.numel() for value in stored.values())
    config = json.loads((prepared.model_dir / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(prepared.model_dir, local_files_only=True)
    assert model.dtype is getattr(torch, dtype)


def test_one_reading_serves_a_conversion_and_says_the_same(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf", Kind.Q4_0))
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    with read_once():
        ours, table = gguf.GGUFReader(path), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        assert gguf.GGUFReader(path) is ours and gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2) is table
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3) is not table
    assert gguf.GGUFReader is reader and gguf.get_tensor_name_map is names
    theirs = reader(path)
    assert ours.fields.keys() == theirs.fields.keys() and table.mapping == names(gguf.MODEL_ARCH.LLAMA, 2).mapping
    for one, other in zip(ours.fields.values(), theirs.fields.values(), strict=True):
        assert (one.data, one.types) == (other.data, other.types)
        assert [part.tolist() for part in one.parts] == [part.tolist() for part in other.parts]
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (mine.name, mine.tensor_type) == (other.name, other.tensor_type)
        assert mine.data.tolist() == other.data.tolist()


def test_same_bytes_are_converted_once_wherever_they_lie(tmp_path: Path) -> None:
    first = prepare(write_gguf(tmp_path / "tiny.gguf", Kind.F32), tmp_path / "cache")
    other = tmp_path / "other.gguf"
    other.write_bytes((tmp_path / "tiny.gguf").read_bytes())
    phases: list[str] = []
    again = prepare_model(
        GGUFModel(path=str(other)), tmp_path / "cache", None, True, lambda phase, done, total: phases.append(phase)
    )
    assert phases == [] and again.model_dir == first.model_dir and again.source["path"] == str(other)


def test_what_lies_beside_the_file_does_not_matter(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Kind.F32)
    expected = prepare(path, tmp_path / "cache-1").model_dir
    (tmp_path / "config.json").write_text('{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x", "auto_map": {"AutoTokenizer": ["e.E", null]}}')
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/evil"}')
    (tmp_path / "chat_template.jinja").write_text("evil")
    found = prepare(path, tmp_path / "cache-2").model_dir
    assert {file.name: file.read_bytes() for file in found.iterdir()} == {
        file.name: file.read_bytes() for file in expected.iterdir()
    }


def test_half_a_conversion_is_not_a_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Kind.F32)
    cache = tmp_path / "cache"
    prepared = prepare(path, cache)
    entry = prepared.model_dir.parent
    (entry / "manifest.json").unlink()  # as if it had been killed before the end
    entry.rename(cache / ".partial" / f"gguf--{entry.name}")
    again = prepare(path, cache)
    assert again == prepared and (again.model_dir / "tokenizer.json").exists()


def test_unknown_split_and_unknown_architecture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre = 'brand-new'") as caught:
        prepare(write_gguf(tmp_path / "a.gguf", Kind.F32, pre="brand-new"), tmp_path / "cache")
    assert (caught.value.code, caught.value.field) == ("model_unsupported", "model.path")
    with pytest.raises(ModelError, match="brand-new") as caught:
        prepare(write_gguf(tmp_path / "b.gguf", Kind.F32, arch="brand-new"), tmp_path / "cache")
    assert caught.value.code == "model_unsupported"


@pytest.mark.parametrize(
    "data",
    [b"", b"GGUF", b"PK\x03\x04" * 20, b"GGUF" + struct.pack("<IQQ", 1, 0, 0), b"GGUF" + struct.pack("<IQQ", 3, 0, 9),
     b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60) + b"key" * 20],
)  # fmt: skip
def test_broken_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_header(path, field="model.path")
    assert caught.value.code == "model_unreadable"


def test_a_file_cut_short(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", Kind.F32)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(ModelError) as caught:
        prepare(path, tmp_path / "cache")
    assert caught.value.code == "model_unreadable"


@pytest.fixture(scope="module")
def smollm2() -> Prepared:
    return prepare(SMOLLM2, wheel.CACHE)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Prepared) -> Any:
    return AutoTokenizer.from_pretrained(smollm2.model_dir, local_files_only=True)


def test_smollm2_tokenizer_has_the_facts_of_the_model(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.unk_token, len(tokenizer), tokenizer.model_max_length) == ("<|endoftext|>", 49152, 8192)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    chat = system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chat
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(chat).input_ids
    assert ids.count(1) == ids.count(2) == 3 and tokenizer.decode(ids) == chat
    assert tokenizer("Hi").input_ids == tokenizer("Hi", add_special_tokens=False).input_ids  # no BOS of its own


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("set 12%", ["set", "Ġ", "1", "2", "%"]),
        ("a  12", ["a", "ĠĠ", "1", "2"]),
        ("x\n\n1", ["x", "ĊĊ", "1"]),
        ("    7", ["ĠĠĠĠ", "7"]),
        ("don't stop", ["don", "'t", "Ġstop"]),
    ],
)
def test_smollm2_splits_digits_as_it_was_trained(tokenizer: Any, text: str, tokens: list[str]) -> None:
    """With GPT-2's split, which transformers falls back to, rows 2 to 4 come out as other tokens."""
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens


def test_smollm2_knows_the_capital_of_france(smollm2: Prepared, tokenizer: Any) -> None:
    assert smollm2.parameters == 134_515_008 and smollm2.source["dtype"] == "float32"
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2.model_dir, local_files_only=True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    batch = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**batch, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, batch["input_ids"].shape[1] :])
    assert output[0, -1] == tokenizer.eos_token_id


def test_from_the_cache_without_torch(smollm2: Prepared, tmp_path: Path) -> None:
    order = PrepareOrder(
        job_id="job", attempt=1, model=GGUFModel(path=str(SMOLLM2)), models_dir=str(wheel.CACHE),
        model_roots=[str(SMOLLM2.parent)], offline=True,
    )  # fmt: skip
    (tmp_path / "run.json").write_text(order.model_dump_json())
    code = (
        "import sys; from core.train.entry.prepare import main; status = main(sys.argv[1:]); "
        "print('torch' in sys.modules or 'transformers' in sys.modules); sys.exit(status)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == EXIT_OK, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["type"] == "result" and event["result"]["model_dir"] == str(smollm2.model_dir)
    assert seconds < 5, "it takes about 0.5 s of a processor"
    print(f"prepared from the cache in {seconds:.2f} s of a processor")
