"""Exports with quantised weights: folders as compressed-tensors and torchao read them, and as eft reads them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.errors import ModelError
from core.spec.axes.export import AWQ, FP8, GPTQ, MXFP4, PackedExport, TorchAOInt4, TorchAOInt8
from core.train.base.shards import INDEX_FILE, write_shards
from core.train.export.compare import logits_of
from core.train.export.formats import packed
from core.train.export.formats.packed import write_rounded
from core.train.export.formats.subject import Subject, Withheld
from core.train.export.formats.write import write_formats
from core.train.export.packed.awq import Fold, factors_for, folds_of, rounded
from core.train.export.packed.blocks import one_after_another
from core.train.export.packed.gptq import quantise
from core.train.export.packed.layout import E2M1, INT4, LEAST, MOST, fp8_pieces, group_of, int4_pieces, mxfp4_pieces
from core.train.export.packed.readers import Reader
from core.train.export.packed.torchao import int8_pieces
from core.train.export.prepare import prepare_exports
from core.train.hub.unpack import compressed
from core.train.hub.unpack.convert import write_unpacked
from core.train.hub.unpack.packing import Packing, packing_of
from core.train.model.load import load_model
from core.train.quant.fill import read_tensors
from tests.support.tool_forks import tool_forks
from tests.support.tools import CACHE, compressed_tools, torchao_tools
from tests.support.tuned import tuned

# --- one layer -------------------------------------------------------------------------------------------


def test_fp8_is_the_nearest_number_of_its_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64) * torch.logspace(-3, 1, 16).unsqueeze(1)
    weight[3] = 0
    pieces = fp8_pieces(weight, torch.bfloat16)
    read = compressed.plain(pieces, Packing("compressed", "", 8), "w", torch.float32)
    scale = pieces["weight_scale"].float()
    steps = (weight / scale).abs().clamp(min=2.0**-6)
    ulp = torch.exp2(steps.log2().floor() - 3) * scale
    assert ((read.float() - weight).abs() <= ulp / 2 + read.float().abs() * 2.0**-8).all()
    assert (read[3] == 0).all()


def test_int8_is_the_nearest_number_of_its_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64) * torch.logspace(-3, 1, 16).unsqueeze(1)
    weight[3] = 0
    q, scale, zero = int8_pieces(weight, torch.bfloat16).values()
    assert (q.dtype, scale.dtype, zero.dtype) == (torch.int8, torch.float32, torch.int8)
    assert ((q * scale - weight).abs() <= scale * 0.5001).all() and (q[3] == 0).all() and not zero.any()


def test_four_bits_are_read_back_to_the_bit() -> None:
    torch.manual_seed(0)
    q = torch.randint(LEAST, MOST + 1, (24, 96))
    scales = torch.rand(24, 3).bfloat16()
    read = compressed.packed(
        int4_pieces(q, scales.float(), torch.bfloat16), Packing("", "", 4, 32), "w", torch.bfloat16
    )  # type: ignore[arg-type]
    assert torch.equal(read, q.to(torch.bfloat16) * scales.repeat_interleave(32, 1))


def test_four_bit_floats_are_read_back_to_the_bit() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 96) * torch.logspace(-4, 2, 24).unsqueeze(1)
    weight[5] = 0
    q, scales = quantise(weight, torch.eye(96), 32, E2M1, torch.bfloat16)
    assert set(q.abs().unique().tolist()) <= {0, 0.5, 1, 1.5, 2, 3, 4, 6} and torch.equal(scales.log2() % 1, scales * 0)
    read = compressed.mxfp4(mxfp4_pieces(q, scales, torch.bfloat16), "w", torch.bfloat16)
    assert torch.equal(read.float(), q * scales.repeat_interleave(32, 1)) and not read[5].any()
    # Of numbers as large as the largest, the nearest is at most a sixth away.
    assert ((read - weight).abs() <= weight.abs().view(24, 3, 32).amax(-1).repeat_interleave(32, 1) / 4).all()


def _error(weight: Tensor, q: Tensor, scales: Tensor, rows: Tensor) -> float:
    return float((rows @ (weight - q * scales.repeat_interleave(32, 1)).t()).square().mean())


def test_gptq_loses_less_of_a_layers_output_than_rounding() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 160)
    rows = torch.randn(400, 20) @ torch.randn(20, 160) + 0.3 * torch.randn(400, 160)
    hessian = rows.t() @ rows / len(rows)
    q, scales = quantise(weight, hessian, 32, INT4, torch.bfloat16)
    assert q.shape == weight.shape and scales.shape == (48, 5) and torch.equal(scales, scales.bfloat16().float())
    assert torch.equal(q, q.round()) and float(q.min()) >= LEAST and float(q.max()) <= MOST
    nearest = (weight / scales.repeat_interleave(32, 1)).round().clamp(LEAST, MOST)
    assert _error(weight, q, scales, rows) < 0.4 * _error(weight, nearest, scales, rows)
    # Inputs that say nothing of one another: there is nothing to make up for, and each weight is rounded.
    q, scales = quantise(weight, torch.eye(160), 32, INT4, torch.bfloat16)
    assert torch.equal(q, (weight / scales.repeat_interleave(32, 1)).round().clamp(LEAST, MOST))


def test_gptq_of_inputs_that_never_come_and_of_too_few_rows() -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(8, 64), torch.randn(3, 64)
    rows[:, 5] = 0
    q, scales = quantise(weight, rows.t() @ rows, 32, INT4, torch.float16)
    assert torch.isfinite(scales).all() and (scales > 0).all() and (q[:, 5] == 0).all()
    assert _error(weight, q, scales, rows) < 0.01 * float((rows @ weight.t()).square().mean())


def test_awq_keeps_large_inputs_better_than_rounding_does() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(48, 160), torch.randn(32, 160)]
    rows = torch.randn(400, 160)
    rows[:, ::40] *= 20  # as a few channels of a language model are
    products = rows.t() @ rows / len(rows)
    factors = factors_for(weights, products, 32, torch.bfloat16)
    lost = []
    for weight in weights:
        q, scales = rounded(weight * factors, products.diagonal() / factors.square(), 32, torch.bfloat16)
        ranged, own = rounded(weight, products.diagonal(), 32, torch.bfloat16)
        widest = weight.view(-1, 5, 32).abs().amax(-1) / MOST
        nearest = (weight / widest.repeat_interleave(32, 1)).round()
        scaled = _error(weight * factors, q, scales, rows / factors)
        lost.append((scaled, _error(weight, ranged, own, rows), _error(weight, nearest, widest, rows)))
    by_awq, by_range, by_rounding = (sum(each) for each in zip(*lost, strict=True))
    assert by_awq < by_range and by_awq < 0.4 * by_rounding
    # Inputs of one size, none of which comes before others: nothing is divided.
    assert torch.equal(factors_for(weights, torch.eye(160), 32, torch.bfloat16), torch.ones(160))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "phi3"])
def test_awq_finds_what_makes_the_inputs_of_layers(tmp_path: Path, family: str) -> None:
    # A Gemma that was not trained has zeros for the weights of its norms, which nothing divides.
    subject = tuned(family, "full" if family == "gemma3" else "lora", tmp_path)
    whole = subject.whole("trained")
    model = load_model(whole, torch.float32)
    layers = [name for name, module in model.get_submodule("model.layers.0").named_modules()
              if isinstance(module, torch.nn.Linear)]  # fmt: skip
    found: list[tuple[str, Fold]] = []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def visit(name: str, block: torch.nn.Module, products: object, first: Callable[[], Tensor]) -> None:
        found.extend((name, fold) for fold in folds_of(block, layers, first))

    wanted = {f"model.layers.{number}.{name}" for number in range(2) for name in layers}
    one_after_another(model, "model.layers", subject.rows[:2], wanted, visit, subject.between)
    form = "from_one" if family == "gemma3" else "weight"
    sources = {fold.layers: (fold.source, fold.form) for name, fold in found if name == "model.layers.0"}
    if family == "phi3":
        assert sources[("self_attn.qkv_proj",)] == ("input_layernorm", form)
    else:
        assert sources[("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")] == ("input_layernorm", form)
        assert sources[("mlp.down_proj",)] == ("mlp.up_proj", "rows")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "a trial left traces"
    subject.close()


def test_groups_divide_every_layer() -> None:
    assert [group_of(inputs) for inputs in ({256, 512}, {576, 1536}, {96}, {100, 128})] == [128, 64, 32, None]


# --- folders ---------------------------------------------------------------------------------------------


def _unpacked(folder: Path, into: Path, subject: Subject) -> Tensor:
    """Logits of the folder as eft reads quantised base models; one of torchao by its formula."""
    if folder.name.startswith("torchao"):
        return _by_formula(folder, into, subject)
    packing = packing_of(json.loads((folder / "config.json").read_text())["quantization_config"], field="model")
    assert packing is not None
    write_unpacked(folder, packing, into)
    return logits_of(load_model(into, torch.bfloat16), subject.rows, subject.between)


def _by_formula(folder: Path, into: Path, subject: Subject) -> Tensor:
    """Logits of a folder of torchao: each weight is q * scale."""
    tensors = dict(read_tensors(folder))
    for name in [name for name in tensors if name.endswith("._weight_qdata")]:
        module = name.removesuffix("._weight_qdata")
        q, scale = tensors.pop(name), tensors.pop(f"{module}._weight_scale")
        assert not tensors.pop(f"{module}._weight_zero_point").any()
        tensors[f"{module}.weight"] = q.float() * scale.float().repeat_interleave(q.shape[1] // scale.shape[1], 1)
    into.mkdir()
    write_shards(tensors.items(), into, subject.between)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    return logits_of(load_model(into, torch.float32), subject.rows, subject.between)


APART = {"gptq": 1e-10, "awq": 1e-10, "mxfp4": 1e-10, "torchao_int8": 1e-10, "fp8": 0.05, "torchao_int4": 0.05}
"""Squares of what the library computes and what the formula does; two libraries round the inputs of layers too."""


def test_formats_are_read_by_their_library_and_by_eft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several files, each with the whole header.
    monkeypatch.setattr(packed, "write_shards", partial(write_shards, shard_bytes=2**16))
    subject = tuned("llama", "lora", tmp_path)
    told: list[dict[str, str]] = []

    class Events:
        def write(self, kind: str, **data: str) -> None:
            told.append(data)

    read: dict[str, Tensor] = {}
    before = packed.read_logits

    def noted(folder: Path, subject: Subject, tools: packed.Tools, reader: Reader) -> Tensor:
        read[folder.name] = before(folder, subject, tools, reader)
        return read[folder.name]

    with tool_forks() as forks, pytest.MonkeyPatch.context() as patch:
        for tools in (compressed_tools(), torchao_tools()):
            forks.prepare(packed.PROGRAM, tools)
        patch.setattr(packed, "read_logits", noted)
        asked: list[PackedExport] = [
            *(
                FP8(min_retention=0.9),
                GPTQ(min_retention=1),
                TorchAOInt8(),
                TorchAOInt4(),
                AWQ(min_retention=0.6),
                MXFP4(),
            ),
        ]
        outcomes = write_formats(asked, subject, Events())  # type: ignore[arg-type]
    fp8, gptq, int8, int4, awq, mxfp4 = outcomes
    assert mxfp4["released"] and 0.9 < mxfp4["retention"]["retention"] < 1, mxfp4
    assert awq["released"] and 0.6 < awq["retention"]["retention"] < 1, awq
    for outcome, least in ((int8, 0.97), (int4, 0.9)):
        assert outcome["released"] and outcome["retention"]["reader"] == "torchao 0.18.0", outcome
        assert least < outcome["retention"]["retention"] < 1
        files = {one.suffix for one in (tmp_path / "artifacts" / outcome["folder"]).iterdir()}
        assert (tmp_path / "artifacts" / outcome["folder"] / INDEX_FILE).is_file()
        assert files <= {".safetensors", ".json", ".jinja"}, files  # no pickle
    assert fp8["released"] and fp8["retention"]["reader"] == "compressed-tensors 0.20.0", fp8
    assert 0.9 < fp8["retention"]["retention"] < 1 and fp8["dtype"] == "bf16"
    # What has kept less than the job wants is there, apart, with its figure.
    assert not gptq["released"] and gptq["folder"] == "withheld/gptq" and 0.9 < gptq["retention"]["retention"] < 1
    assert told[0]["code"] == "packed_withheld"
    for outcome in outcomes:
        folder = tmp_path / "artifacts" / outcome["folder"]
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {one.name for one in folder.iterdir()}
        ours = _unpacked(folder, tmp_path / outcome["type"], subject)
        apart = (ours - read[outcome["type"]]).square().mean() / ours.square().mean()
        assert apart < APART[outcome["type"]], (outcome["type"], float(apart))
    assert not list((tmp_path / "artifacts").glob(".*"))


def test_what_cannot_be_held_is_refused_before_work_begins(tmp_path: Path) -> None:
    compressed_tools()
    torchao_tools()
    subject = tuned("qwen2_moe", "lora", tmp_path)
    for item in (FP8(), TorchAOInt8()):
        with pytest.raises(ModelError, match=f"`{item.type}`: its experts .* mixtures of experts") as caught:
            prepare_exports([item], subject.model_dir, CACHE, offline=True)
        assert (caught.value.field, caught.value.code) == ("export", "packed_refused")
        with pytest.raises(Withheld):
            write_rounded(item, subject, subject.artifacts / item.type)
