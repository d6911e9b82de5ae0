"""Packed weights, fused LoRA and the chunked loss on a GPU: held to what the CPU computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.train.kernels import interface, ops
from core.train.kernels.autograd import Member, lora_linear, lora_linears
from core.train.loss.head import OutputHead, head_of, hidden_states
from core.train.loss.linear_cross_entropy import HeadOptions, linear_cross_entropy, token_figures, token_logprobs
from core.train.quant.adapters import FusedLoraLinear, fuse_adapters
from core.train.quant.int8 import quantize_int8
from core.train.quant.linear import QuantLinear
from core.train.quant.nf4 import quantize_nf4
from tests.support import small_llama
from tests.support.small_llama import IDS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _weight(format: str, shape: tuple[int, int] = (96, 128)) -> Any:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    return quantize_nf4(values) if format == "nf4" else quantize_int8(values)


def _close(ours: Tensor, wanted: Tensor, tolerance: float) -> None:
    error = (ours.detach().float().cpu() - wanted.detach().float().cpu()).norm() / wanted.detach().float().norm().cpu()
    assert error < tolerance, f"{error:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 128), (7, 9), (130, 64)], ids=str)
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_dequantises_to_the_cpus_bits(device: torch.device, format: str, shape: tuple[int, int], dtype: Any) -> None:
    weight = _weight(format, shape)
    n = shape[0] * shape[1]
    there, here = torch.empty(n, dtype=dtype, device=device), torch.empty(n, dtype=dtype)
    scales = [scale.to(device) for scale in weight.scales]
    interface.dequantize_into(there, weight.packed.to(device), scales, format, 64)  # type: ignore[arg-type]
    interface.dequantize_into(here, weight.packed, weight.scales, format, 64)  # type: ignore[arg-type]
    assert torch.equal(there.cpu(), here)


def _members(device: torch.device, dtype: torch.dtype) -> list[Member]:
    generator = torch.Generator().manual_seed(1)
    members = []
    for out in (96, 32, 32):
        weight = quantize_nf4(torch.randn(out, 128, generator=generator) * 0.05)
        a, b = torch.randn(4, 128, generator=generator) * 0.1, torch.randn(out, 4, generator=generator) * 0.1
        members.append(
            Member(
                weight.packed.to(device), [s.to(device) for s in weight.scales], "nf4", 64,
                torch.randn(out, generator=generator).to(device),
                a.to(device).requires_grad_(), b.to(device).requires_grad_(), 1.5,
            )
        )  # fmt: skip
    return members


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)], ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
def test_lora_linear_is_the_cpus(device: torch.device, dtype: torch.dtype, tolerance: float, grouped: bool) -> None:
    """Stated tolerance: 1e-4 in float32 (no TF32), 2 % of the norm in bfloat16."""
    results = []
    source = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(2))
    for where in (device, torch.device("cpu")):
        x = source.to(where, dtype).requires_grad_()
        members = _members(where, dtype)
        outputs = lora_linears(x, members) if grouped else [lora_linear(x, member) for member in members]
        leaves = [x, *(t for m in members for t in (m.a, m.b))]
        grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
        results.append([*outputs, *grads])
    for ours, wanted in zip(*results, strict=True):
        assert ours.dtype == wanted.dtype
        _close(ours, wanted, tolerance)


def test_compiles_whole_with_the_default_backend(device: torch.device) -> None:
    layer = QuantLinear(_weight("nf4"), torch.randn(96)).to(device)
    x = torch.randn(4, 128, device=device, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    _close(compiled(x), layer(x), 1e-5)
    _close(torch.autograd.grad(compiled(x).sum(), x)[0], torch.autograd.grad(layer(x).sum(), x)[0], 1e-5)


def test_a_captured_graph_dequantises_at_every_replay(device: torch.device) -> None:
    if device.type != "cuda":
        return  # only tried where there are graphs; this file is not collected elsewhere
    layers = [QuantLinear(_weight("nf4", shape)).to(device) for shape in ((128, 128), (128, 128))]
    x = torch.randn(4, 128, device=device)

    def run() -> Tensor:
        return layers[1](layers[0](x))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = run()
    layers[0].packed.fill_(0x77)  # every value 0
    graph.replay()
    assert (y == 0).all()


@pytest.mark.parametrize(
    "options", [HeadOptions(), HeadOptions(softcap=5.0, label_smoothing=0.1, z_loss=1e-3)], ids=str
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)], ids=str)
def test_chunked_loss_is_the_full_one(
    device: torch.device, options: HeadOptions, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    source, head, labels = torch.randn(70, 48), torch.randn(1003, 48) * 0.3, torch.randint(0, 1003, (70,)).to(device)
    labels[::9] = -100
    hidden = source.to(device, dtype).requires_grad_()
    weight = head.to(device, dtype)
    exact = hidden.detach().double().requires_grad_()
    z = exact @ weight.double().t()
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    wanted = functional.cross_entropy(
        z, labels, reduction="sum", label_smoothing=options.label_smoothing
    ) + options.z_loss * (z.logsumexp(1)[labels != -100].square().sum())
    (slope,) = torch.autograd.grad(wanted, exact, retain_graph=True)
    picked = z.log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    for backend in interface.available(device, "loss"):
        ours = linear_cross_entropy(hidden, weight, labels, options=options, chunk_rows=32, backend=backend)
        _close(ours, wanted, tolerance)
        _close(torch.autograd.grad(ours, hidden)[0], slope, tolerance)
        found = token_logprobs(hidden, weight, labels, options=options, chunk_rows=32, backend=backend)
        _close(found, torch.where(labels != -100, picked, 0.0), 1e-4)  # of logits that are float32 in bfloat16, too
        figures = token_figures(
            hidden, weight, z.argmax(1).where(labels != -100, -100), options=options, backend=backend
        )
        sure = (z.topk(2, dim=1).values.diff(dim=1).abs()[:, 0] > 0.1) & (labels != -100)
        assert figures.right[sure].all() and not figures.right[labels == -100].any()


def test_a_vocabulary_of_a_quarter_million_in_rows_past_two_to_the_31(device: torch.device) -> None:
    """8,200 rows of 262,144 logits in one chunk: 4 GiB, where there is room for them."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < 16 * 2**30:
        pytest.skip("needs a GPU with 16 GiB")
    torch.manual_seed(0)
    hidden = torch.randn(8200, 16, device=device, dtype=torch.bfloat16).requires_grad_()
    head = torch.randn(262_144, 16, device=device, dtype=torch.bfloat16) * 0.3
    labels = torch.randint(0, 262_144, (8200,), device=device)
    results = []
    for rows in (8200, 64):
        loss = linear_cross_entropy(hidden, head, labels, chunk_rows=rows)
        results.append((loss, torch.autograd.grad(loss, hidden)[0]))
    for whole, chunked in zip(*results, strict=True):
        _close(whole, chunked, 0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama.save(tmp_path_factory.mktemp("base"))


def _gradients(model: Any, device: torch.device, autocast: bool) -> dict[str, Tensor]:
    ids = IDS.to(device)
    head = head_of(model)
    assert isinstance(head, OutputHead)
    model.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        hidden = hidden_states(head, ids)[:, :-1].flatten(0, 1)
        loss = linear_cross_entropy(hidden, head.weight, ids[:, 1:].flatten(), count=16.0)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_models_step_is_the_cpus_grouped_or_not(
    device: torch.device, folder: Path, autocast: bool, checkpointing: bool | None
) -> None:
    """Stated tolerance: 1e-3 of each gradient's norm in float32; under autocast 10 %, as between PEFT and us."""
    results = []
    for where, grouped in ((device, True), (device, False), (torch.device("cpu"), True)):
        model = small_llama.adapted(folder, torch.bfloat16 if autocast else torch.float32)
        assert fuse_adapters(model).grouped == 10
        if not grouped:
            for module in model.modules():
                if isinstance(module, FusedLoraLinear):
                    module.shared = None
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        results.append(_gradients(model.to(where).train(), where, autocast))
    for other in results[1:]:
        assert other.keys() == results[0].keys() and len(other) == 29
        for name, value in other.items():
            _close(results[0][name], value, 0.1 if autocast else 1e-3)


def test_registered_operators_pass_opcheck(device: torch.device) -> None:
    weight = _weight("nf4")
    scales = [scale.to(device) for scale in weight.scales]
    x = torch.randn(2, 5, 128, device=device, requires_grad=True)
    a, b = torch.randn(4, 128, device=device, requires_grad=True), torch.randn(96, 4, device=device, requires_grad=True)
    torch.library.opcheck(ops.lora_linear, (x, None, weight.packed.to(device), scales, "nf4", 64, None, a, b, 2.0))


def test_bitsandbytes_on_the_gpu_gives_the_same_bits(device: torch.device) -> None:
    import bitsandbytes.functional as bnb

    values = (torch.randn(512, 256, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    packed, state = bnb.quantize_4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4")
    state.to(device)
    weight = quantize_nf4(values)
    out = torch.empty(values.numel(), dtype=torch.bfloat16, device=device)
    interface.dequantize_into(out, weight.packed.to(device), [s.to(device) for s in weight.scales], "nf4", 64)
    assert torch.equal(out, bnb.dequantize_4bit(packed.to(device), state).view(-1))
