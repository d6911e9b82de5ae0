"""Exports of a job: GGUF files as llama.cpp's engine reads them, and how much of the tuning each format has kept."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from core.errors import ModelError
from core.spec.axes.export import GGUF, Merged
from core.spec.run.exit_codes import EXIT_OK
from core.train.export.formats.vllm import refusal
from core.train.export.prepare import prepare_exports
from core.train.export.retention import LEAST_TUNING, LOGIT_BYTES, TOKENS, measure, probes
from core.train.render.families import FAMILIES
from core.train.render.jinja.template import without_marks
from core.train.tools.install import ToolsMissing
from tests.support.family_tokenizers import family_tokenizer
from tests.support.tools import CACHE, gguf_tools, torchao_tools
from tests.support.trainer import events, log, notices, pairs, run, write_rows, write_run

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


# --- a job ---------------------------------------------------------------------------------------------------


def test_a_job_hands_back_what_each_reader_reads(tmp_path: Path, model_dir: Path) -> None:
    gguf_tools()
    torchao_tools()
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
    gguf_tools()
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
