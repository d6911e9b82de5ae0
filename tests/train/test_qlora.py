"""Jobs over packed bases: what is packed and told, bases that somebody else has packed, what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from core.errors import ModelError
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.train.base.stop import Stop
from core.train.export.formats.subject import Withheld, check_memory
from core.train.hub.model_files import inspect
from core.train.memory.available import available_bytes
from tests.support.tiny_model import make
from tests.support.trainer import events, log, notices, pairs, run, weights, write_rows, write_run

AXES: dict[str, Any] = {
    "method": {"type": "qlora", "r": 4},
    "optimizer": {"learning_rate": 1e-2},
    "training": {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"},
}
IDS = torch.randint(2, 250, (2, 12), generator=torch.Generator().manual_seed(1))
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "train.jsonl", pairs(16))


@pytest.fixture(scope="module")
def packed_dir(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as bitsandbytes packs and saves it."""
    folder = tmp_path_factory.mktemp("packed") / "model"
    shutil.copytree(tiny_dir, folder)
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(tiny_dir, quantization_config=NF4).save_pretrained(folder)
    return folder


def go(folder: Path, model: Path, rows: Path, **axes: Any) -> Path:
    run_dir = write_run(folder, model, rows, **AXES | axes)
    assert run(run_dir) == EXIT_OK, (events(run_dir)[-1], log(run_dir))
    return run_dir


def refusal(folder: Path, model: Path, rows: Path, **axes: Any) -> dict[str, Any]:
    run_dir = write_run(folder, model, rows, **AXES | axes)
    assert run(run_dir) == EXIT_FAILED
    error = events(run_dir)[-1]
    assert (error["type"], error["failure"]) == ("error", "user"), error
    assert not events(run_dir, "metrics")
    return error


def record(run_dir: Path) -> dict[str, Any]:
    return events(run_dir, "run_record")[0]["record"]


def losses(run_dir: Path) -> list[float]:
    return [event["values"]["loss"] for event in events(run_dir, "metrics")]


def codes(run_dir: Path) -> list[str]:
    return [event["code"] for event in notices(run_dir)]


@pytest.fixture(scope="module")
def ours(tiny_dir: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of AXES that nothing disturbs. It is everybody's: nothing is written there."""
    return go(tmp_path_factory.mktemp("ours") / "run", tiny_dir, rows)


# --- what is packed ----------------------------------------------------------------------------------------


def test_the_record_says_what_was_packed_and_how_it_computes(
    tmp_path: Path, tiny_dir: Path, rows: Path, ours: Path
) -> None:
    plain = go(tmp_path / "plain", tiny_dir, rows, method={"type": "lora", "r": 4})
    packed = record(ours)["quantization"]
    assert (packed["format"], packed["layers"], packed["source"]) == ("nf4", 14, "quantised")
    assert packed["kept"] == {"lm_head": "output head"}
    assert packed["packed_bytes"] < 0.2 * packed["dense_bytes"]  # of float32
    assert packed["kernels"]["backend"] in ("native", "portable")
    assert packed["adapters"] == {"fused": 14, "unfused": {}, "grouped": 10}  # all but o_proj and down_proj
    assert record(ours)["loss"] == record(plain)["loss"] == {"kernel": "chunked", "backend": "portable"}  # float32
    assert record(plain)["quantization"] is None
    assert record(ours)["parameters"] == record(plain)["parameters"]
    assert "quantizing" in [event["phase"] for event in events(ours, "phase")]
    assert losses(ours)[-1] < losses(ours)[0]
    assert 0 < abs(losses(ours)[0] - losses(plain)[0]) < 0.05 * losses(plain)[0]


@pytest.mark.parametrize(
    ("axes", "format", "layers", "fused"),
    [
        ({"quantization": {"type": "nf4", "double": False, "skip_modules": ["o_proj"]}}, "nf4", 12, 14),
        ({"method": {"type": "qlora", "r": 4, "use_rslora": True, "target_modules": "attention"}}, "nf4", 14, 8),
    ],
    ids=["skipped modules", "rslora on attention"],
)
def test_packings_and_adapters_in_turn(
    tmp_path: Path, tiny_dir: Path, rows: Path, axes: dict[str, Any], format: str, layers: int, fused: int
) -> None:
    """LoRA over int8 and DoRA over NF4: where their models are merged, below."""
    assert_packed(go(tmp_path / "run", tiny_dir, rows, **axes), format, layers, fused)


def assert_packed(run_dir: Path, format: str, layers: int, fused: int) -> None:
    packed = record(run_dir)["quantization"]
    if packed["kernels"]["backend"] == "portable":  # adapters over dense layers stay PEFT's then
        fused = min(fused, layers)
    assert (packed["format"], packed["layers"], packed["adapters"]["fused"]) == (format, layers, fused)
    assert losses(run_dir)[-1] < losses(run_dir)[0]


def test_a_width_that_is_no_multiple_of_the_block(tmp_path: Path, rows: Path) -> None:
    """Blocks run on over the rows of a weight, as in bitsandbytes: nothing is padded, nothing is left out."""
    folder = tmp_path / "odd"
    make(folder)
    config = LlamaConfig.from_pretrained(folder, hidden_size=36, intermediate_size=50, num_attention_heads=2)
    config.head_dim = 18
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    ours = go(tmp_path / "run", folder, rows, export="merged")
    assert record(ours)["quantization"]["layers"] == 14
    assert events(ours, "result")[0]["result"]["export"][0]["released"]


def test_the_second_start_reads_what_the_first_has_packed(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    cache = tmp_path / "cache"
    first = go(tmp_path / "first", tiny_dir, rows, cache_dir=cache)
    second = go(tmp_path / "second", tiny_dir, rows, cache_dir=cache)
    assert [record(folder)["quantization"]["source"] for folder in (first, second)] == ["quantised", "cache"]
    assert "quantizing" not in [event["phase"] for event in events(second, "phase")]
    assert weights(first) == weights(second)

    (entry,) = (cache / "packed").iterdir()
    data = bytearray((entry / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (entry / "model.safetensors").write_bytes(data)
    third = go(tmp_path / "third", tiny_dir, rows, cache_dir=cache)
    assert codes(third) == ["quantization_cache"] and "damaged" in notices(third)[0]["message"]
    manifest = json.loads((entry / "manifest.json").read_text())
    (entry / "manifest.json").write_text(json.dumps(manifest | {"version": 0}))
    fourth = go(tmp_path / "fourth", tiny_dir, rows, cache_dir=cache)
    assert "of version 0" in notices(fourth)[0]["message"]
    assert weights(third) == weights(fourth) == weights(first)
    assert record(go(tmp_path / "fifth", tiny_dir, rows, cache_dir=cache))["quantization"]["source"] == "cache"

    shutil.rmtree(cache / "packed")
    (cache / "packed").write_text("in the way")
    sixth = go(tmp_path / "sixth", tiny_dir, rows, cache_dir=cache)
    assert "could not be kept" in notices(sixth)[0]["message"]
    assert weights(sixth) == weights(first)


# --- bases that somebody else has packed -------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"method": {"type": "lora", "r": 4}}, {}], ids=["lora", "qlora"])
def test_a_base_that_bitsandbytes_packed_is_taken_as_it_is(
    tmp_path: Path, packed_dir: Path, rows: Path, ours: Path, axes: dict[str, Any]
) -> None:
    theirs = go(tmp_path / "theirs", packed_dir, rows, export="merged", cache_dir=tmp_path / "cache", **axes)
    assert record(theirs)["quantization"]["source"] == "as it is" and "already_quantized" in codes(theirs)
    assert losses(theirs) == losses(ours)
    assert weights_of_adapter(theirs) == weights_of_adapter(ours)
    (outcome,) = events(theirs, "result")[0]["result"]["export"]
    assert outcome["released"], outcome
    assert "quantization_config" not in json.loads((theirs / "artifacts/merged/config.json").read_text())


def weights_of_adapter(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "artifacts/adapter/adapter_model.safetensors").read_bytes()).hexdigest()


def test_what_a_packed_base_rules_out(tmp_path: Path, packed_dir: Path, rows: Path) -> None:
    error = refusal(tmp_path / "int8", packed_dir, rows, quantization="int8")
    assert error["field"] == "quantization" and "already quantised as nf4 and cannot become int8" in error["message"]
    error = refusal(tmp_path / "full", packed_dir, rows, method="full")
    assert error["field"] == "method" and "method: qlora" in error["message"]
    for kind in ("merged", "torchao_int8"):
        onto = [{"type": kind, "merge_onto": "original"}]
        error = refusal(tmp_path / kind, packed_dir, rows, export=onto)
        assert error["field"] == "export" and "no 16-bit weights" in error["message"]


def test_a_packed_base_is_measured_as_what_it_stands_for(tiny_dir: Path, packed_dir: Path) -> None:
    dense, packed = (inspect(folder, field="model.path") for folder in (tiny_dir, packed_dir))
    assert packed.parameters == dense.parameters and packed.bytes < dense.bytes
    assert packed.dtypes["NF4"] == 2 * 36864


@pytest.mark.parametrize(
    ("about", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "LLM.int8 of bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "FP4 of bitsandbytes"),
        (
            {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
            "stored as bfloat16",
        ),
        ({}, "does not name"),
    ],
)
def test_other_packings_are_refused_by_name(tmp_path: Path, tiny_dir: Path, about: dict[str, Any], name: str) -> None:
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
    with pytest.raises(ModelError) as caught:
        inspect(folder, field="model.path")
    assert caught.value.code == "model_quantized"
    assert name in caught.value.message and "16-bit model they were made from" in caught.value.message


# --- files that are not as they should be ------------------------------------------------------------------


def test_bad_weights_end_the_job_in_words(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    bad = shutil.copytree(tiny_dir, tmp_path / "nan")
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    error = refusal(tmp_path / "run-nan", bad, rows)
    assert error["field"] == "model" and "layers.1.mlp.up_proj.weight" in error["message"]
    assert "NaN or infinite" in error["message"]

    cut = shutil.copytree(tiny_dir, tmp_path / "cut")
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:-64])
    error = refusal(tmp_path / "run-cut", cut, rows)
    assert error["field"] == "model" and "model.safetensors is truncated or damaged" in error["message"]


# --- what is handed back -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "dtype"),
    [
        ({"export": "merged"}, torch.bfloat16),
        ({"export": [{"type": "merged", "dtype": "fp32"}]}, torch.float32),
        ({"export": [{"type": "merged", "merge_onto": "original", "dtype": "fp16"}]}, torch.float16),
        ({"export": "merged", "method": {"type": "lora", "r": 4}, "quantization": "int8"}, torch.bfloat16),
        ({"export": "merged", "method": {"type": "qlora", "r": 4, "use_dora": True}}, torch.bfloat16),
        ({"export": "merged", "method": {"type": "lora", "r": 4}}, torch.bfloat16),
        (
            {"export": "merged", "method": {"type": "lora", "r": 4, "use_dora": True, "use_rslora": True}},
            torch.bfloat16,
        ),
    ],
    ids=["nf4", "fp32", "original", "int8", "qdora", "lora", "dora"],
)
def test_the_merged_model_is_base_and_adapter(
    tmp_path: Path, tiny_dir: Path, rows: Path, axes: dict[str, Any], dtype: torch.dtype
) -> None:
    run_dir = go(tmp_path / "run", tiny_dir, rows, **axes)
    method = axes.get("method", AXES["method"])
    if "quantization" in axes or ("use_dora" in method and method["type"] == "qlora"):
        assert_packed(run_dir, axes.get("quantization", "nf4"), layers=14, fused=14)
    last = events(run_dir)[-1]
    (outcome,) = last["result"]["export"]
    assert outcome["released"] and outcome["check"]["adapter_kept"] == pytest.approx(1, abs=0.02)
    listed = {entry["path"]: entry["kind"] for entry in last["artifacts"]}
    assert listed["merged/model.safetensors"] == listed["merged/config.json"] == "model"
    assert listed["merged/tokenizer.json"] == "tokenizer" and listed["merged/README.md"] == "card"
    merged = AutoModelForCausalLM.from_pretrained(run_dir / "artifacts/merged")
    assert {p.dtype for p in merged.parameters()} == {dtype}

    # The same by plain libraries: the adapter's folder over the base it was trained over.
    adapter = run_dir / "artifacts/adapter"
    if axes.get("quantization") == "int8":
        return  # nobody else reads that packing
    packed = method["type"] == "qlora" and outcome["merge_onto"] == "trained"
    base = AutoModelForCausalLM.from_pretrained(tiny_dir, **({"quantization_config": NF4} if packed else {}))
    both = PeftModel.from_pretrained(base, adapter).train()  # in eval mode bitsandbytes rounds the scales
    with torch.no_grad():
        wanted, got = both(IDS).logits.float(), merged.float()(IDS).logits
    spread = wanted - wanted.mean(-1, keepdim=True)
    assert (got - wanted).norm() / spread.norm() < (5e-3 if dtype is not torch.float32 else 1e-5)


def test_a_merged_model_that_differs_is_not_handed_back(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    """Weights beyond float16's range, in a model that is well in float32: the file would hold infinities."""
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 1e5
    tensors["model.embed_tokens.weight"] *= 1e-5  # the head, too: its logits stay what they were
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run_dir = go(tmp_path / "run", folder, rows, export=[{"type": "merged", "dtype": "fp16"}])
    last = events(run_dir)[-1]
    (outcome,) = last["result"]["export"]
    assert outcome["released"] is False and "in fp16 its logits are not finite" in outcome["reason"]
    (notice,) = notices(run_dir)
    assert notice["code"] == "merged_withheld" and "the adapter is" in notice["message"]
    paths = {entry["path"].split("/")[0] for entry in last["artifacts"]}
    assert "adapter" in paths and "merged" not in paths and not (run_dir / "artifacts/merged").exists()
    assert json.loads((run_dir / "artifacts/run_record.json").read_text())["result"]["export"] == [outcome]


def test_a_model_that_memory_does_not_hold_is_withheld_before_it_is_made() -> None:
    wide = LlamaConfig(hidden_size=65536, intermediate_size=262144, num_hidden_layers=80, num_attention_heads=64)
    with torch.device("meta"):
        model = LlamaForCausalLM(wide)
    with pytest.raises(Withheld, match=r"takes \d+\.\d GB of memory, and \d+\.\d are free"):
        check_memory(model, torch.bfloat16)
    here = available_bytes()
    assert here is not None and 0 < here < 2**45


def test_stopped_while_merging_it_merges_again(tmp_path: Path, tiny_dir: Path, rows: Path, ours: Path) -> None:
    """The trained state is saved before formats are made: the next attempt makes them and trains nothing."""
    first = write_run(tmp_path / "first", tiny_dir, rows, export="merged", **AXES)
    assert run(first, StopWhile("saving", first)) == EXIT_CHECKPOINTED
    second = write_run(tmp_path / "second", tiny_dir, rows, export="merged", resume_from=[first], **AXES)
    assert run(second) == EXIT_OK
    assert events(second, "resumed")[0]["step"] == 4 and not events(second, "metrics")
    assert events(second, "result")[0]["result"]["export"][0]["released"]
    assert weights_of_adapter(second) == weights_of_adapter(ours)


class StopWhile(Stop):
    """Asked to leave as soon as a phase has begun."""

    def __init__(self, phase: str, run_dir: Path) -> None:
        self.phase, self.run_dir = phase, run_dir

    @property  # type: ignore[override]
    def requested(self) -> bool:
        return any(event["phase"] == self.phase for event in events(self.run_dir, "phase"))


def test_smaller_batches_after_out_of_memory(tmp_path: Path, tiny_dir: Path, rows: Path, ours: Path) -> None:
    """What the service does after an out-of-memory: half the rows at once, twice as often, from the same checkpoint."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    first = write_run(tmp_path / "first", tiny_dir, rows, **AXES)
    assert run(first, StopAfter(2, first)) == EXIT_CHECKPOINTED
    axes = AXES | {"training": AXES["training"] | sizes}
    second = write_run(tmp_path / "second", tiny_dir, rows, resume_from=[first], **axes)
    assert run(second) == EXIT_OK, log(second)
    assert losses(first) + losses(second) == pytest.approx(losses(ours), rel=1e-5)


class StopAfter(Stop):
    """Asked to leave after so many steps."""

    def __init__(self, steps: int, run_dir: Path) -> None:
        self.steps, self.run_dir = steps, run_dir

    @property  # type: ignore[override]
    def requested(self) -> bool:
        return len(events(self.run_dir, "metrics")) >= self.steps


def test_packed_batches_are_the_same_rows(tmp_path: Path, tiny_dir: Path, rows: Path) -> None:
    """Rows end to end without padding, over packed weights: the losses of the first step are those of padded rows."""
    run_dir = go(tmp_path / "run", tiny_dir, rows, batching={"type": "packed", "tokens_per_batch": 512})
    whole = {"per_device_train_batch_size": 16, "max_steps": 1}
    padded = go(tmp_path / "padded", tiny_dir, rows, training=AXES["training"] | whole)
    assert losses(run_dir)[0] == pytest.approx(losses(padded)[0], rel=1e-5)
    assert losses(run_dir)[-1] < losses(run_dir)[0]
