"""Some hundred hostile model folders, each by its name, made of the tiny model by code: the same ones every time."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.selection import EVERYTHING

Make = Callable[[Path], None]
"""Changes a folder that holds the tiny model."""

HUGE = 10**400
ODD: dict[str, Any] = {
    "0": 0, "-1": -1, "10^12": 10**12, "10^400": HUGE, "2^63": 2**63, "a half": 1.5, "text": "64", "list": [64],
    "object": {"a": 1}, "true": True, "null": None, "nan": float("nan"),
}  # fmt: skip
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "head_dim",
)  # fmt: skip

FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json",
)  # fmt: skip
CONTENTS: dict[str, bytes] = {
    "null": b"null", "list": b"[]", "text": b'"x"', "number": b"5", "object": b"{}", "empty": b"",
    "cut short": b'{"model_type": "lla', "binary": b"\x80\x04\xff" * 50, "deep": b"[" * 100_000,
    "deep object": b'{"a":' * 5000 + b"1" + b"}" * 5000,
}  # fmt: skip
NAMED = {
    "config num_hidden_layers 10^12", "config vocab_size -1", "config num_attention_heads 0", "tokenizer.json null",
}  # fmt: skip
"""Cases that tests/train/test_hostile_models.py looks at one by one."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    make: Make

    def build(self, tiny: Path, folder: Path) -> None:
        """The folder. What is not changed is linked to."""
        folder.mkdir()
        for path in tiny.iterdir():
            os.link(path, folder / path.name) if path.name == "model.safetensors" else shutil.copy(path, folder)
        self.make(folder)


def cases() -> list[Case]:
    found = [
        *_configs(), *_whole_files(), *_headers(), *_indexes(), *_packed(), *_tokenizers(), *_tokenizer_configs(),
        *_templates(), *_generation(), *_adapters(),
    ]  # fmt: skip
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    return found


def chosen() -> list[Case]:
    """What a run takes: of the products (a field of config.json and an odd value, a file and its content) a third, so
    that each value meets several fields and each field several values. What has a name in a test is among them."""
    if EVERYTHING:
        return cases()
    left_out = set[str]()
    for rows, columns, name in ((SIZES, ODD, "config {} {}"), (FILES, CONTENTS, "{} {}")):
        for x, row in enumerate(rows):
            left_out |= {name.format(row, column) for y, column in enumerate(columns) if (x + y) % 3}
    return [case for case in cases() if case.name in NAMED or case.name not in left_out]


# --- config.json -----------------------------------------------------------------------------------------


def config(**changes: Any) -> Make:
    return _json("config.json", changes)


def _json(name: str, changes: dict[str, Any]) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return make


def write(name: str, content: bytes | str) -> Make:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def _configs() -> Iterator[Case]:
    for field in SIZES:
        for name, value in ODD.items():
            yield Case(f"config {field} {name}", config(**{field: value}))
    for name, value in ODD.items():
        yield Case(f"config text_config {name}", config(text_config={"num_key_value_heads": value}))
    others: dict[str, list[Any]] = {
        "max_position_embeddings": [0, HUGE, 10**15, "many"],
        "rms_norm_eps": [0, -1.0, "small", HUGE, float("inf")],
        "hidden_act": ["bogus", 5],
        "dtype": ["bogus", "int64", "float8_e4m3fn", 16, HUGE],
        "rope_parameters": [
            None, [], "x", {"rope_type": "bogus"}, {"rope_type": "default", "rope_theta": 0},
            {"rope_type": "default", "rope_theta": "x"}, {"rope_type": "linear", "factor": -1, "rope_theta": 1e4},
            {"rope_type": "yarn", "rope_theta": HUGE, "factor": HUGE}, {"rope_type": "llama3", "rope_theta": 1e4},
        ],
        "tie_word_embeddings": [False, "maybe"],
        "attention_dropout": [-1, 5.0, "x"],
        "mlp_bias": [True, "x"],
        "attention_bias": [True, None],
        "initializer_range": ["x", HUGE],
        "pad_token_id": [10**12, HUGE, "x", 300],
        "eos_token_id": [10**12, "x"],
        "bos_token_id": [HUGE, -5],
        "model_type": [None, 5, [], "bogus", "bert", "t5", "gpt2", "mixtral", "qwen2", "mamba", "gemma3_text", "clip"],
        "architectures": ["x", ["BertModel"]],
        "auto_map": [{"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "x"],
        "quantization_config": [
            {}, "x", [], 5, {"quant_method": "gptq"}, {"quant_method": 5},
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            {"quant_method": "bitsandbytes", "load_in_4bit": "x", "bnb_4bit_quant_type": ["nf4"]},
        ],
        "_attn_implementation": ["bogus", "hub/evil-kernels", 5],
        "attn_implementation": ["hub/evil-kernels"],
        "layer_types": [["full_attention"], "x", [5, 5]],
        "num_local_experts": [10**9, HUGE, "x"],
        "use_cache": ["x", 5],
                        "id2label": [5, {"x": "y"}, {"0": HUGE}],
        "per_layer_config": [{"0": {"hidden_size": HUGE}}],
    }  # fmt: skip
    for field, values in others.items():
        for number, value in enumerate(values):
            yield Case(f"config {field} #{number}", config(**{field: value}))
    yield Case("config more layers than files", config(num_hidden_layers=3))
    yield Case("config fewer layers than files", config(num_hidden_layers=1))
    yield Case("config without sizes", write("config.json", '{"model_type": "llama"}'))
    yield Case(
        "config of an encoder-decoder", write("config.json", '{"model_type": "bart", "decoder_layers": 1000000}')
    )
    yield Case("config of gptj", write("config.json", '{"model_type": "gptj", "n_positions": 10000000}'))


def _whole_files() -> Iterator[Case]:
    """Other content where JSON belongs, and other things where a file belongs."""
    for file in FILES:
        for name, content in CONTENTS.items():
            if name in ("null", "list", "cut short", "deep") or file in FILES[:3]:
                yield Case(f"{file} {name}", write(file, content))

    def pipe(name: str) -> Make:
        def make(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            os.mkfifo(folder / name)

        return make

    def directory(name: str) -> Make:
        def make(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            (folder / name).mkdir()

        return make

    def loop(name: str) -> Make:
        def make(folder: Path) -> None:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(folder / name)

        return make

    for file in ("config.json", "model.safetensors", "tokenizer.json", "model.safetensors.index.json"):
        yield Case(f"{file} is a pipe", pipe(file))
        yield Case(f"{file} is a folder", directory(file))
        yield Case(f"{file} is a link to itself", loop(file))


# --- safetensors -----------------------------------------------------------------------------------------


def parts(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def safetensors(folder: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    write("model.safetensors", struct.pack("<Q", len(text)) + text + data)(folder)


def tensors(change: Callable[[dict[str, tuple[str, Any, bytes]]], Any]) -> Make:
    """`change` gets name → (dtype, shape, bytes); the offsets are made right."""

    def make(folder: Path) -> None:
        header, data = parts(folder)
        held = {
            name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        change(held)
        new: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        body = b""
        for name, (dtype, shape, content) in held.items():
            new[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
            body += content
        safetensors(folder, new, body)

    return make


EMBEDDING, QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def _headers() -> Iterator[Case]:
    def header(change: Callable[[dict[str, Any]], Any]) -> Make:
        def make(folder: Path) -> None:
            head, data = parts(folder)
            changed = change(head)
            safetensors(folder, head if changed is None else changed, data)

        return make

    def entry(**changes: Any) -> Make:
        return header(lambda head: head[QUERY].update(changes))

    for name, shape in {
        "negative": [-64, -64], "of halves": [64.0, 64.0], "of truths": [True, 4096], "text": "64", "empty": [],
        "flat": [4096], "deep": [1] * 30 + [4096], "huge": [2**40, 2**40], "huge and none": [2**62, 2**62, 0],
        "beyond": [HUGE], "transposed": [32, 128],
    }.items():  # fmt: skip
        yield Case(f"header shape {name}", entry(shape=shape))
    for name, dtype in {"unknown": "F31", "number": 5, "list": ["F32"], "integers": "I32", "code": "os.system"}.items():
        yield Case(f"header dtype {name}", entry(dtype=dtype))
    for name, offsets in {
        "backward": [16384, 0], "beyond": [0, 2**63], "huge": [0, HUGE], "three": [0, 1, 2], "null": None,
        "of halves": [0.5, 16384.5], "negative": [-16384, 0],
    }.items():  # fmt: skip
        yield Case(f"header offsets {name}", entry(data_offsets=offsets))
    for name, content in {"null": None, "list": [1], "text": "x", "number": 5}.items():
        yield Case(f"header is {name}", lambda folder, content=content: safetensors(folder, content, b""))
    yield Case("header entry is null", header(lambda head: head.update({QUERY: None})))
    yield Case("header metadata is a number", header(lambda head: head.update({"__metadata__": 5})))
    yield Case(
        "header metadata of another library", header(lambda head: head.update({"__metadata__": {"format": "tf"}}))
    )
    yield Case("header deep", lambda folder: safetensors(folder, b"[" * 100_000, b""))
    yield Case("header not JSON", lambda folder: safetensors(folder, b"\x80\x04" * 40, b""))
    yield Case("header longer than the file", write("model.safetensors", struct.pack("<Q", 2**62) + b"{}"))
    yield Case("header of no length", write("model.safetensors", struct.pack("<Q", 0) + b"{}"))
    yield Case("weights empty", write("model.safetensors", b""))
    yield Case("weights cut short", lambda folder: safetensors(folder, parts(folder)[0], parts(folder)[1][:-8]))
    yield Case("weights of one tensor", tensors(lambda held: [held.pop(name) for name in list(held) if name != QUERY]))

    def put(name: str, dtype: str, shape: list[int], content: bytes) -> Make:
        return tensors(lambda held: held.update({name: (dtype, shape, content)}))

    def drop(name: str) -> Make:
        return tensors(lambda held: held.pop(name))

    yield Case("weights without an embedding", drop(EMBEDDING))
    yield Case("weights without a projection", drop(QUERY))
    yield Case("weights without a norm", drop("model.norm.weight"))
    yield Case("embedding of other rows", put(EMBEDDING, "F32", [10, 64], bytes(2560)))
    yield Case("embedding of another width", put(EMBEDDING, "F32", [258, 8], bytes(258 * 32)))
    yield Case("projection of another shape", put(QUERY, "F32", [8, 64], bytes(2048)))
    yield Case("projection of three dimensions", put(QUERY, "F32", [2, 32, 64], bytes(16384)))
    yield Case("projection of no rows", put(QUERY, "F32", [0, 64], b""))
    for dtype, width in {"I8": 1, "F64": 8, "F8_E4M3": 1}.items():
        yield Case(f"projection in {dtype}", put(QUERY, dtype, [64, 64], bytes(4096 * width)))
    yield Case("weights that are no numbers", put(QUERY, "F32", [64, 64], struct.pack("<f", float("nan")) * 4096))
    yield Case("weights without end", put(QUERY, "F32", [64, 64], struct.pack("<f", float("inf")) * 4096))
    yield Case("a third layer of nothing", put("model.layers.2.x", "F32", [1], bytes(4)))
    yield Case("a layer with a long number", put(f"model.layers.{'9' * 5000}.x.weight", "F32", [1], bytes(4)))
    yield Case("a layer with a large number", put("model.layers.99999999.x.weight", "F32", [1], bytes(4)))
    yield Case("a tensor without a name", put("", "F32", [1], bytes(4)))
    yield Case("a tensor with a path for a name", put("../../etc/passwd", "F32", [1], bytes(4)))
    yield Case("a tensor with controls in its name", put("\x1b[2J\x00.weight", "F32", [1], bytes(4)))

    def many(held: dict[str, tuple[str, Any, bytes]]) -> None:
        held.update({f"extra.{number}.weight": ("F32", [1], bytes(4)) for number in range(20_000)})

    yield Case("twenty thousand tensors", tensors(many))


def _indexes() -> Iterator[Case]:
    name = "model.safetensors.index.json"
    maps: dict[str, Any] = {
        "without a map": {}, "a list": {"weight_map": []}, "empty": {"weight_map": {}},
        "upwards": {"weight_map": {QUERY: "../model.safetensors"}},
        "absolute": {"weight_map": {QUERY: "/etc/passwd"}},
        "of numbers": {"weight_map": {QUERY: 5}},
        "of lists": {"weight_map": {QUERY: ["model.safetensors"]}},
        "of a file that is not there": {"weight_map": {QUERY: "model-00001-of-00002.safetensors"}},
        "of a tensor that is not there": {"weight_map": {"x.weight": "model.safetensors"}},
        "of one tensor": {"weight_map": {QUERY: "model.safetensors"}},
        "of sizes": {"metadata": {"total_size": HUGE}, "weight_map": {QUERY: "model.safetensors"}},
    }  # fmt: skip
    for words, content in maps.items():
        yield Case(f"index {words}", write(name, json.dumps(content)))


def _packed() -> Iterator[Case]:
    """NF4 as bitsandbytes writes it, or nearly."""
    about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "shape": [64, 64], "dtype": "float32"}
    notes: dict[str, Any] = {
        "of no shape": {name: value for name, value in about.items() if name != "shape"},
        "negative": about | {"shape": [-64, -64]}, "beyond": about | {"shape": [HUGE, 64]},
        "text": about | {"shape": "x"},
        "other": about | {"shape": [64, 65]}, "null": None, "a list": [], "of blocks of none": about | {"blocksize": 0},
        "of huge blocks": about | {"blocksize": 2**62}, "of another type": about | {"quant_type": "fp4"},
        "of another dtype": about | {"dtype": "os.system"},
    }  # fmt: skip
    packing = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for words, note in notes.items():

        def make(folder: Path, note: Any = note) -> None:
            content = json.dumps(note).encode()

            def pack(held: dict[str, tuple[str, Any, bytes]]) -> None:
                held[QUERY] = ("U8", [2048, 1], bytes(2048))
                held[f"{QUERY}.absmax"] = ("F32", [64], bytes(256))
                held[f"{QUERY}.quant_map"] = ("F32", [16], bytes(64))
                held[f"{QUERY}.quant_state.bitsandbytes__nf4"] = ("U8", [len(content)], content)

            tensors(pack)(folder)
            config(quantization_config=packing)(folder)

        yield Case(f"packed note {words}", make)


# --- tokenizers ------------------------------------------------------------------------------------------


def tokenizer(change: Callable[[dict[str, Any]], Any]) -> Make:
    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return make


def _tokenizers() -> Iterator[Case]:
    def top(name: str, value: Any) -> Make:
        return tokenizer(lambda content: content.update({name: value}))

    def model(**changes: Any) -> Make:
        return tokenizer(lambda content: content["model"].update(changes))

    def vocabulary(token: str, number: Any) -> Make:
        return tokenizer(lambda content: content["model"]["vocab"].update({token: number}))

    for part in ("model", "added_tokens", "pre_tokenizer", "normalizer", "post_processor", "decoder", "version"):
        for name, value in {"null": None, "a list": [], "of no type": {"type": "Bogus"}}.items():
            yield Case(f"tokenizer {part} {name}", top(part, value))
    for name, number in {
        "negative": -1,
        "beyond": 2**40,
        "far": 2**31,
        "huge": HUGE,
        "text": "x",
        "the same": 5,
    }.items():
        yield Case(f"tokenizer token's number {name}", vocabulary("zzz", number))

    def added(**changes: Any) -> Make:
        token = {"id": 258, "content": "<|x|>", "single_word": False, "lstrip": False, "rstrip": False}
        token |= {"normalized": False, "special": True} | changes
        return tokenizer(lambda content: content["added_tokens"].append(token))

    yield Case("tokenizer added token beyond", added(id=10**9))
    yield Case("tokenizer added token negative", added(id=-1))
    yield Case("tokenizer added token empty", added(content=""))
    yield Case("tokenizer added token of NUL", added(content="\x00"))
    yield Case("tokenizer added token of a MiB", added(content="x" * (1 << 20)))
    yield Case("tokenizer merges of nothing", model(merges=[["zz", "yy"]]))
    yield Case("tokenizer merges of texts", model(merges=["a"]))
    yield Case("tokenizer merges of numbers", model(merges=[5]))
    yield Case("tokenizer without a vocabulary", model(vocab={}))
    yield Case("tokenizer vocabulary is a list", model(vocab=[["a", float("nan")]]))
    yield Case("tokenizer of unigrams", model(type="Unigram", vocab=[["a", -1.0]], unk_id=10**9))
    yield Case("tokenizer of word pieces", model(type="WordPiece", unk_token="x", max_input_chars_per_word=HUGE))
    yield Case("tokenizer dropout", model(dropout=5.0))
    yield Case("tokenizer cache", model(cache_capacity=2**62))
    yield Case("tokenizer pads to the moon", top("padding", {
        "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|im_end|>",
    }))  # fmt: skip
    yield Case("tokenizer truncates to nothing", top("truncation", {
        "direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5,
    }))  # fmt: skip
    patterns = {"that is none": "(", "with a look back": "(?<=a*)b", "of nested stars": "(a+)+$", "huge": "a{1000000}"}
    for name, pattern in patterns.items():
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        yield Case(f"tokenizer pattern {name}", top("pre_tokenizer", split))
    grow = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
    yield Case("tokenizer normaliser that grows", top("normalizer", {"type": "Sequence", "normalizers": [grow] * 4}))
    yield Case("tokenizer normaliser that eats", top("normalizer", grow | {"content": ""}))
    deep: Any = {"type": "Lowercase"}
    for _ in range(100):
        deep = {"type": "Sequence", "normalizers": [deep]}
    yield Case("tokenizer normaliser deep", top("normalizer", deep))
    yield Case("tokenizer template of nobody", top("post_processor", {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}], "pair": [],
        "special_tokens": {},
    }))  # fmt: skip
    sentence = _both(_gone("tokenizer.json"), write("tokenizer.model", b"\x80\x04 no protobuf"))
    yield Case("tokenizer.model is none", sentence)
    yield Case(
        "vocab.json is none", _both(_gone("tokenizer.json"), write("vocab.json", b"{}"), write("merges.txt", b"\xff"))
    )
    yield Case("no tokenizer", _gone("tokenizer.json"))


def _gone(name: str) -> Make:
    return lambda folder: (folder / name).unlink()


def _both(*makes: Make) -> Make:
    def make(folder: Path) -> None:
        for one in makes:
            one(folder)

    return make


def _tokenizer_configs() -> Iterator[Case]:
    fields: dict[str, list[Any]] = {
        "tokenizer_class": [5, "LlamaTokenizer", "BertTokenizer", "os.system"],
        "auto_map": [{"AutoTokenizer": ["evil.Evil", None]}],
        "model_max_length": [-1, HUGE],
        "eos_token": [
            None,
            5,
            "",
            "not there",
            {"content": 5},
            {"__type": "AddedToken", "content": "x", "bogus": 1},
            ["x"],
        ],
        "pad_token": [None, "not there"],
        "padding_side": ["up"],
        "chat_template": [5, [{"name": "default"}], {"default": 5}],
        "added_tokens_decoder": [[], {"x": {}}, {"-1": {"content": "x"}}, {str(HUGE): {"content": "x"}}, {"5": 5}],
        "extra_special_tokens": ["x", 5, {"a": 5}],
        "backend": ["bogus"],
    }
    for field, values in fields.items():
        for number, value in enumerate(values):
            yield Case(f"tokenizer_config {field} #{number}", _json("tokenizer_config.json", {field: value}))


def _templates() -> Iterator[Case]:
    templates = {
        "empty": "", "of nothing": "{{ nothing.at.all }}", "not whole": "{% for m in", "of another tag": "{% bogus %}",
        "that raises": "{{ raise_exception('no') }}",
        "of many cases": "{% if a %}" + "{% elif a %}" * 10_000 + "{% endif %}",
        "of many loops": "{% for a in 'x' %}" * 40 + "{% endfor %}" * 40,
        "of many brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "of many sums": "{{ 1" + "+1" * 20_000 + " }}",
        "that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "that divides": "{{ 1 // 0 }}", "that includes": "{% include '/etc/passwd' %}",
        "that extends": "{% extends 'x' %}", "that escapes": "{{ ''.__class__.__mro__ }}",
        "that grows": "{{ 'x' * 10**10 }}", "of a power": "{{ 9**9**9 }}",
        "of half a pair": "{{ '\\ud800' }}",
        "of marks": "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
        "that says only one thing": "x", "not UTF-8": None,
    }  # fmt: skip
    for name, template in templates.items():
        content = b"\xff\xfe" if template is None else template.encode()
        yield Case(f"template {name}", write("chat_template.jinja", content))


def _generation() -> Iterator[Case]:
    fields: dict[str, list[Any]] = {
        "eos_token_id": [[10**12], "x", HUGE],
        "max_length": [-1, "x"],
        "temperature": ["x"],
        "cache_implementation": ["bogus"],
        "custom_generate": ["evil/repo"],
        "num_beams": [10**9],
        "bad_words_ids": ["x"],
    }
    for field, values in fields.items():
        for number, value in enumerate(values):
            yield Case(f"generation {field} #{number}", write("generation_config.json", json.dumps({field: value})))


def _adapters() -> Iterator[Case]:
    about: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    adapters: dict[str, Any] = {
        "plain": about, "null": None, "of no type": {}, "of another type": about | {"peft_type": "Bogus"},
        "huge": about | {"r": HUGE}, "of another base": about | {"base_model_name_or_path": "/etc"},
        "with code": about | {"auto_mapping": {"base_model_class": "evil"}},
    }  # fmt: skip
    for name, content in adapters.items():
        beside = write("adapter_config.json", json.dumps(content))
        yield Case(f"adapter beside {name}", _both(beside, write("adapter_model.safetensors", b"\x08\0")))
    alone = _both(write("adapter_config.json", json.dumps(about)), _gone("model.safetensors"))
    yield Case("adapter alone", alone)
    yield Case("adapter alone with a pickle", _both(alone, write("adapter_model.bin", b"\x80\x04pickle")))
    yield Case("adapter without a config", _both(alone, _gone("config.json")))
