"""Exports of a job: GGUF files as llama.cpp's engine reads them, and how much of the tuning each format has kept.
Formats that are made after the training have the bytes of those that the training run makes at its end."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from core.errors import ModelError
from core.spec.axes.export import GGUF, Merged
from core.spec.axes.method import Adapter
from core.spec.axes.quantization import QAT
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.entry import export
from core.train.export.formats import packed
from core.train.export.formats.gguf import PROGRAMS
from core.train.export.formats.vllm import refusal
from core.train.export.prepare import prepare_exports
from core.train.export.retention import LEAST_TUNING, LOGIT_BYTES, TOKENS, measure, probes
from core.train.render.families import FAMILIES
from core.train.render.jinja.template import without_marks
from core.train.tools.install import ToolsMissing, install
from tests.support.family_tokenizers import family_tokenizer
from tests.support.tool_forks import tool_forks
from tests.support.tools import CACHE, gguf_tools, torchao_tools
from tests.support.trainer import Forked, events, log, notices, pairs, run, start, write_rows, write_run

AXES: dict[str, Any] = {
    "method": {"type": "lora", "r": 8, "target_modules": "all-linear"},
    "optimizer": {"learning_rate": 2e-2},
    "training": {"max_steps": 8, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose tokenizer has merges, which llama.cpp wants."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    tokenizer = copy.deepcopy(family_tokenizer("chatml"))
    tokenizer.chat_template = without_marks(FAMILIES["chatml"].source)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def programs() -> Iterator[None]:
    """What imports torch is a fork (tests/support/tool_forks.py)."""
    gguf = replace(gguf_tools(), beside=(install("quants", CACHE, offline=True, field="export").folder,))
    with tool_forks() as forks:
        forks.prepare(packed.PROGRAM, torchao_tools())
        forks.prepare(PROGRAMS / "convert_program.py", gguf)
        yield


# --- a job ---------------------------------------------------------------------------------------------------


def test_a_job_hands_back_what_each_reader_reads(tmp_path: Path, model_dir: Path) -> None:
    rows = write_rows(tmp_path / "train.jsonl", pairs(16))
    held_out = write_rows(tmp_path / "eval.jsonl", pairs(24)[16:])
    small = {"type": "gguf", "quantization": "Q4_K_M"}
    exports = [
        {"type": "merged", "min_retention": 1},
        "gguf",
        {"type": "gguf", "quantization": "F16"},
        small,
        "torchao_int8",
    ]
    axes = AXES | {"name": "Small talk", "export": exports}
    run_dir = write_run(tmp_path / "run", model_dir, rows, held_out=held_out, cache_dir=CACHE, **axes)
    assert run(run_dir) == EXIT_OK, (events(run_dir)[-1], log(run_dir))
    last, artifacts = events(run_dir)[-1], run_dir / "artifacts"
    merged, q8, f16, q4, int8 = last["result"]["export"]

    for outcome, required in ((q8, 0.99), (f16, 0.999), (q4, 0.9)):
        found = outcome["retention"]
        assert outcome["released"] and found["reader"].startswith("llama.cpp (xllamacpp "), outcome
        assert (found["rows_of"], found["rows"], found["required"]) == ("held_out", 8, required)
        assert found["kl_base"] > LEAST_TUNING and required < found["retention"] <= 1
        assert found["same_choice"] > 0.8  # a model of eight steps nearly ties, and products in int8 differ by CPU
        assert outcome["proof"] == {"texts": 8, "chats": 3, "ends": [1]}
    assert f16["retention"]["kl_exported"] < q8["retention"]["kl_exported"] / 10
    # What has kept less than the job wants is there, apart, with its figure.
    assert not merged["released"] and merged["folder"] == "withheld/merged" and "1 is required" in merged["reason"]
    assert 0.999 < merged["retention"]["retention"] < 1
    assert [notice["code"] for notice in notices(run_dir)] == ["merged_withheld"]

    kinds = {entry["path"]: entry["kind"] for entry in last["artifacts"]}
    assert kinds["gguf-Q8_0/model-Q8_0.gguf"] == kinds["gguf-F16/model-F16.gguf"] == "gguf"
    assert kinds["withheld/merged/model.safetensors"] == "withheld"
    assert not [path for path in kinds if path.startswith(".")] and not list(artifacts.glob(".*"))
    card = (artifacts / "gguf-Q8_0/README.md").read_text()
    assert f"| gguf-Q8_0 | {q8['retention']['retention']:.4f} | 0.99 |" in card
    assert "llama-server -m model-Q8_0.gguf" in card
    assert "| withheld/merged |" in (artifacts / "adapter/README.md").read_text()
    assert int8["released"] and kinds["torchao_int8/model.safetensors"] == "model", int8
    card = (artifacts / "torchao_int8/README.md").read_text()
    assert "in 8-bit integers) of" in card and "With the package `torchao`:\n\n```python" in card
    assert "base_model_relation: quantized" in card and "library_name: transformers" in card

    fields = gguf.GGUFReader(artifacts / "gguf-Q8_0/model-Q8_0.gguf").fields
    assert fields["general.name"].contents() == "Small talk" and "general.finetune" not in fields
    assert fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q8_0
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 1
    assert not fields["tokenizer.ggml.add_bos_token"].contents()
    sizes = [(artifacts / f"gguf-{kind}/model-{kind}.gguf").stat().st_size for kind in ("Q4_K_M", "Q8_0", "F16")]
    assert sizes[0] < 0.8 * sizes[1] and sizes[1] < 0.7 * sizes[2]
    assert all(one["seconds"] > 0 and one["bytes"] >= size for one, size in zip((q4, q8, f16), sizes, strict=True))


# --- after the training --------------------------------------------------------------------------------------

ROUNDED: dict[str, dict[str, Any]] = {
    "rounded": {"type": "qat", "weights": "int4", "group_size": 32, "skip_modules": ["down_proj"]},
    "rounded full": {"type": "qat", "weights": "int8"},
}
METHODS: dict[str, tuple[Any, Any]] = {
    "rounded": ({"type": "lora", "r": 4, "target_modules": "attention"}, ["torchao_int4"]),
    "rounded full": ("full", ["torchao_int8"]),
    "qlora": ({"type": "qlora", "r": 4, "target_modules": "all-linear"}, ["merged"]),
    "pissa": ({"type": "lora", "r": 4, "init_lora_weights": "pissa"}, ["merged", "vllm"]),
    "full": ("full", [{"type": "gguf", "quantization": "F16"}]),
}


def check_rounded(base: Path, trained: Path, folder: Path, spec: QAT) -> None:
    """Each weight that the folder has in few bits is, to the bit, the trained one as torchao's own fake quantiser
    rounds it."""
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, IntxFakeQuantizer

    share = PerGroup(spec.group_size) if spec.weights == "int4" else PerAxis(0)
    theirs = IntxFakeQuantizer(IntxFakeQuantizeConfig(getattr(torch, spec.weights), share))
    model: Any = AutoModelForCausalLM.from_pretrained(base if trained.name == "adapter" else trained, dtype="float32")
    if trained.name == "adapter":
        model = PeftModel.from_pretrained(model, str(trained)).merge_and_unload()
    files = load_file(folder / "model.safetensors")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    found = {name.removesuffix("._weight_qdata") for name in files if name.endswith("._weight_qdata")}
    assert found == {name for name in layers if not name.endswith(("lm_head", *spec.skip_modules))}
    for name in found:
        q, scale = files[f"{name}._weight_qdata"], files[f"{name}._weight_scale"]
        assert scale.dtype == torch.float32
        read = q * scale.repeat_interleave(q.shape[1] // scale.shape[1], 1)
        assert torch.equal(read, theirs(layers[name].weight.detach())), name


@pytest.mark.parametrize("name", METHODS)
def test_later_is_the_same_to_the_bit(tmp_path: Path, model_dir: Path, name: str) -> None:
    method, exports = METHODS[name]
    rows = write_rows(tmp_path / "train.jsonl", pairs(8))
    training = {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"}
    axes: dict[str, Any] = {"method": method, "training": training, "optimizer": {"learning_rate": 1e-2}}
    if name in ROUNDED:
        axes["quantization"] = ROUNDED[name]
    first = write_run(tmp_path / "first", model_dir, rows, cache_dir=CACHE, name="Same", export=exports, **axes)
    assert run(first) == EXIT_OK, (events(first)[-1], log(first))
    plain = RunOrder.model_validate_json((first / ORDER_FILE).read_bytes())
    trained = first / "artifacts" / ("model" if method == "full" else "adapter")

    later = tmp_path / "later"
    later.mkdir()
    spec = plain.spec
    if isinstance(spec.method, Adapter):
        spec = spec.model_copy(update={"method": spec.method.handed_back()})
    order = plain.model_copy(update={"spec": spec, "adapter_dir": str(trained), "tokenizer_dir": str(trained)})
    (later / ORDER_FILE).write_text(order.model_dump_json())
    if name == "qlora":  # one as a worker starts it; a fork has what a process of its own would import
        assert start(later, "-m", "core.train.entry.export").wait(200) == EXIT_OK, log(later)
    else:
        assert Forked(later, program=partial(export.main, [str(later)])).wait() == EXIT_OK, log(later)
    told = [events(folder)[-1] for folder in (first, later)]
    for outcome in (outcomes := [one["result"]["export"] for one in told])[1]:
        assert outcome["released"], outcome
    measured = [[{**one, "seconds": 0, "bytes": 0} for one in each] for each in outcomes]
    assert measured[0] == measured[1], "the same figures"
    if name == "pissa":
        served = outcomes[1][1]
        assert served["max_lora_rank"] == 8, "twice the rank of the training"
        assert served["retention"]["retention"] == pytest.approx(1, abs=1e-5)
        card = (later / "artifacts" / "vllm" / "README.md").read_text()
        assert "--max-lora-rank 8 --lora-modules" in card
    folder = outcomes[0][0]["folder"]
    if name in ROUNDED:
        assert outcomes[0][0]["retention"]["kl_exported"] < 1e-6, "torchao computes what the training did"
        check_rounded(model_dir, trained, first / "artifacts" / folder, QAT(**ROUNDED[name]))
    hashes = [{one["path"]: one["sha256"] for one in each["artifacts"]} for each in told]
    folders = tuple(f"{one['folder']}/" for one in outcomes[0])
    made = {path for path in hashes[1] if not path.endswith("README.md")}
    assert made and made == {path for path in hashes[0] if path.startswith(folders) and "README" not in path}
    if name in ROUNDED:  # what safetensors says beside the tensors has another order in each process
        made.remove(weights := f"{folder}/model.safetensors")
        one, other = (load_file(run_dir / "artifacts" / weights) for run_dir in (first, later))
        assert one.keys() == other.keys() and all(torch.equal(one[tensor], other[tensor]) for tensor in one)
    assert {path: hashes[0][path] for path in made} == {path: hashes[1][path] for path in made}
    card = (later / "artifacts" / folder / "README.md").read_text()
    assert "## What the exported formats have kept" in card and "## How it was trained" in card


# --- what vLLM does not load ---------------------------------------------------------------------------------

PLAIN = {"peft_type": "LORA", "r": 8, "bias": "none", "use_dora": False, "rank_pattern": {}, "modules_to_save": None}
PAIR = ["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]


@pytest.mark.parametrize(
    ("changed", "names", "words"),
    [
        ({}, [], None),
        ({"peft_type": "OFT"}, [], "vLLM loads LoRA"),
        ({"use_dora": True}, [], "`use_dora` is true"),
        ({"rank_pattern": {"q_proj": 4}}, [], "`rank_pattern`"),
        ({"alpha_pattern": {"q_proj": 4}}, [], "`alpha_pattern`"),
        ({"modules_to_save": ["lm_head"]}, [], "`modules_to_save`"),
        ({"bias": "all"}, [], "it trains biases"),
        ({"r": 513}, [], "its rank is 513"),
        ({}, ["base_model.model.lm_head.lora_A.weight"], "lm_head"),
        ({}, ["base_model.model.model.embed_tokens.lora_embedding_A"], "embed_tokens"),
        ({}, ["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"], "magnitude"),
    ],
)
def test_what_vllm_does_not_load_is_named(changed: dict[str, Any], names: list[str], words: str | None) -> None:
    found = refusal(PLAIN | changed, PAIR + names)
    assert found is None if words is None else found is not None and words in found


# --- what is refused before work begins ------------------------------------------------------------------------


def test_a_model_that_llama_cpp_cannot_hold_is_refused(tmp_path: Path, model_dir: Path) -> None:
    prepare_exports([GGUF()], model_dir, CACHE, offline=True)  # nothing is downloaded twice

    def refused(**changes: Any) -> str:
        folder = shutil.copytree(model_dir, tmp_path / "-".join(changes), dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError) as caught:
            prepare_exports([Merged(), GGUF()], folder, CACHE, offline=True)
        assert (caught.value.field, caught.value.code) == ("export", "gguf_refused")
        assert caught.value.message.endswith("take `merged` instead, or remove `gguf` from `export`")
        return caught.value.message

    assert "does not know HomeMadeForCausalLM" in refused(architectures=["HomeMadeForCausalLM"])
    assert "heads have 15 numbers" in refused(head_dim=15)
    bare = shutil.copytree(model_dir, tmp_path / "bare")
    about = json.loads((bare / "tokenizer.json").read_text())
    about["model"]["merges"] = []
    (bare / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match="tokenizer has no merges"):
        prepare_exports([GGUF()], bare, CACHE, offline=True)
    prepare_exports([Merged()], bare, CACHE, offline=True)


def test_offline_without_the_libraries_says_how_they_come(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(
        ToolsMissing, match=r"offline: prepare one such job with network, or copy tools/gguf-"
    ) as caught:
        prepare_exports([GGUF()], model_dir, tmp_path, offline=True)
    assert caught.value.field == "export" and not list(tmp_path.iterdir())


# --- retention -------------------------------------------------------------------------------------------------


def _figures(tuned: Tensor, base: Tensor, exported: Tensor, required: float = 0.9) -> Any:
    return measure(tuned, base, exported, rows=2, rows_of="training", required=required, reader="torch")


def test_retention_is_the_share_of_the_tuning_that_is_kept() -> None:
    base = torch.randn(70, 11, generator=torch.Generator().manual_seed(0))
    tuned = base + torch.randn(70, 11, generator=torch.Generator().manual_seed(1))
    whole, nothing = _figures(tuned, base, tuned.clone()), _figures(tuned, base, base.clone())
    assert whole.retention == pytest.approx(1) and whole.same_choice == 1 and whole.fault() is None
    assert nothing.retention == 0 and "kept 0.0000 of the tuning, and 0.9 is required" in nothing.fault()
    p, q = tuned.double().softmax(-1), base.double().softmax(-1)
    assert nothing.kl_base == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-9)
    assert 0 < _figures(tuned, base, (tuned + base) / 2).retention < 1
    assert _figures(tuned, base, 2 * base - tuned).retention < 0  # farther from the tuned model than its base
    shifted = _figures(tuned, base, tuned + 100)  # logits mean the same with a constant added
    assert shifted.retention == pytest.approx(1)


def test_where_hardly_anything_was_tuned_the_loss_is_held_against_a_fixed_figure() -> None:
    base = torch.randn(70, 11, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(70, 11, generator=torch.Generator().manual_seed(1))
    tuned = base + 0.01 * noise
    near, far = _figures(tuned, base, tuned + 1e-4 * noise), _figures(tuned, base, tuned + 0.1 * noise)
    assert near.kl_base < LEAST_TUNING and near.retention is None and near.fault() is None
    assert far.retention is None and "nats a token from the tuned model" in far.fault()


def test_numbers_that_are_none_are_a_fault() -> None:
    base = torch.zeros(3, 5)
    broken = base.clone()
    broken[1, 2] = torch.nan
    found = _figures(base + torch.arange(5.0), base, broken)
    assert found.kl_exported is None and found.retention is None
    assert found.fault() == "its logits are not finite numbers"


def test_rows_are_spread_and_their_logits_bounded() -> None:
    rows = [torch.full((100,), place) for place in range(64)]
    chosen = probes(rows, 1000)
    assert [int(row[0]) for row in chosen] == list(range(0, 64, 4)) and all(len(row) == TOKENS for row in chosen)
    assert len(probes(rows[:3], 1000)) == 3
    few = probes(rows, 262_144)
    assert 2 <= len(few) < 16 and len(few) * TOKENS * 262_144 * 4 <= LOGIT_BYTES
