"""Attention libraries beside PyTorch: what is tried where, what a self-test makes of it, and what a run then takes.

None of the libraries runs without a GPU. A module of their interface stands in for one, which computes by PyTorch on
the CPU: right, or wrong in ways that such libraries have been.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, MistralConfig

from core.hardware.selftest import Choice, Part, Verdict, choose
from core.hardware.tables.attention import LIBRARIES, libraries_for
from core.spec.axes.optim.optimizers import AdamW
from core.train.attention import packed, probe
from core.train.attention.backends import Wanted, choose_attention
from core.train.attention.probe import prepare_padded
from core.train.attention.segments import apart, side_by_side, varlen
from core.train.base.rng import seed_all
from core.train.batch import Batch
from core.train.engine import Engine, build_engine
from core.train.selftest.attention import library_checks
from core.train.selftest.run import measure
from tests.train.test_batching import token_rows

CPU = torch.device("cpu")
MODULE = """
import torch
from core.train.attention.segments import apart

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False):
    assert causal and deterministic and int(cu_seqlens_q.diff().max()) == max_seqlen_q
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
    out = apart(q, k, v, cu_seqlens_q.diff().tolist(), softmax_scale, 0.0, cu_seqlens_k.diff().tolist())[0]
    return ANSWER
"""
RIGHT, WITH_SUMS = "out", "(out, None)"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path for modules that are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for row in LIBRARIES:
        monkeypatch.delitem(__import__("sys").modules, row.module, raising=False)
    return tmp_path


def install(folder: Path, name: str, answer: str = RIGHT, text: str = MODULE) -> None:
    module = next(row.module for row in LIBRARIES if row.name == name)
    (folder / f"{module}.py").write_text(text.replace("ANSWER", answer))


def statuses(arch: str) -> dict[str, tuple[str, str | None]]:
    """Part → how it ended and why, of the libraries of an architecture; computed by the CPU."""
    checks = [check for check in library_checks(arch) if "cudnn" not in check.name]
    found = {check.name: measure(check, CPU) for check in checks}
    return {name: (part["status"], part.get("error")) for name, part in found.items()}


def verdict(arch: str) -> Verdict:
    parts = {name: Part(status=status, error=error) for name, (status, error) in statuses(arch).items()}  # type: ignore[arg-type]
    sound = {
        f"{what}.{dtype}": Part(status="passed")
        for what in ("matmul", "lora.r64", "loss.logits", "attention.flash", "attention.math", "attention.eager")
        for dtype in ("bf16", "fp16", "fp32")
    }
    return Verdict(
        key="k", slot="0", node="box", device_name="card", arch=arch, torch="2", runtime="r", checked_at="",
        seconds=1.0, parts=sound | parts,
    )  # fmt: skip


def test_a_library_that_passed_is_taken_and_the_best_first(installed: Path) -> None:
    install(installed, "flash_attn")
    assert {status for status, _ in statuses("gfx942").values()} == {"passed", "unavailable"}
    choice = choose(verdict("gfx942"))
    assert choice.libraries == {"bf16": ("flash_attn",), "fp16": ("flash_attn",)} and not choice.told
    found = choose_attention("auto", "gfx942", "bf16", choice)
    assert found.libraries == ("flash_attn",)
    assert found.as_dict() == {"kernels": ["flash", "math"], "libraries": ["flash_attn"]}
    install(installed, "aiter", WITH_SUMS)
    both = choose(verdict("gfx942"))
    assert choose_attention("flash", "gfx942", "fp16", both).libraries == ("aiter", "flash_attn")
    assert choose_attention("auto", "gfx90a", "bf16", both).libraries == ("flash_attn",), "aiter has no row there"


def test_neither_another_wish_nor_a_card_without_a_self_test_takes_one(installed: Path) -> None:
    install(installed, "flash_attn")
    choice = choose(verdict("sm_80"))
    wishes: tuple[Wanted, ...] = ("math", "eager")
    for wanted in wishes:
        assert choose_attention(wanted, "sm_80", "bf16", choice).libraries == ()
    assert choose_attention("auto", "sm_80", "fp32", choice).libraries == (), "they compute in 16 bits"
    assert choose_attention("auto", "sm_80", "bf16", Choice()).libraries == ()


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("out * 1.1", MODULE, "failed"),
        ("out.flip(0)", MODULE, "failed"),
        ("out.detach()", MODULE, "failed"),
        (RIGHT, "import a_library_that_is_not_there\n", "failed"),
        (RIGHT, "def flash_attn_varlen_func(q, k, v): return q\n", "failed"),
        (RIGHT, "raise ImportError('undefined symbol: _ZN3c104cuda')\n", "failed"),
    ],
)
def test_what_is_wrong_or_broken_is_told_and_not_used(installed: Path, answer: str, text: str, expected: str) -> None:
    install(installed, "flash_attn", answer, text)
    assert {status for status, _ in statuses("sm_86").values()} == {expected}
    found = verdict("sm_86")
    choice = choose(found)
    assert choice.libraries == {} and choice.refused is None
    assert any(words.startswith("library.flash_attn.bf16 ") for words in choice.told)
    assert choose_attention("auto", "sm_86", "bf16", choice).libraries == ()


def test_what_is_not_installed_is_no_fault(installed: Path) -> None:
    assert statuses("sm_90") == {
        f"library.{name}.{dtype}": ("unavailable", f"{name} is not installed on this node")
        for name in ("flash_attn_3", "flash_attn")
        for dtype in ("bf16", "fp16")
    }
    assert choose(verdict("sm_90")).told == ()
    assert library_checks("cpu") == library_checks("gfx1100") == []


def test_rows_of_a_line_are_computed_by_it(installed: Path) -> None:
    """With as many keys as queries, and with a beginning that rows share."""
    install(installed, "flash_attn", WITH_SUMS)
    for queries, keys in (((3, 5), (3, 5)), ((3, 2), (3, 7))):
        q, k, v = (
            torch.randn(1, heads, sum(tokens), 16).requires_grad_()
            for heads, tokens in ((4, queries), (2, keys), (2, keys))
        )
        lengths = [
            (torch.tensor([0, *each], dtype=torch.int32).cumsum(0, dtype=torch.int32), max(each))
            for each in (queries, keys)
        ]
        found = varlen(q, k, v, lengths[0], lengths[1], 0.3, "flash_attn")
        wanted = apart(q, k, v, queries, 0.3, 0.0, keys)
        torch.testing.assert_close(found, wanted)
        gradients: list[tuple[Tensor, ...]] = [
            torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (found, wanted)
        ]
        torch.testing.assert_close(*gradients)
        assert probe._varlen_gap(CPU, queries, keys, "flash_attn", 16) is None


@pytest.mark.parametrize("takes_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_torchs_own_is_given_as_many_heads_of_each_where_it_knows_no_groups(
    monkeypatch: pytest.MonkeyPatch, takes_groups: bool
) -> None:
    """The signatures are those of the two releases; the kernel itself runs on a GPU alone (tests/gpu)."""

    def by_rows(
        q: Tensor, k: Tensor, v: Tensor, at: Tensor, keys_at: Tensor, scale: float | None, groups: bool
    ) -> Tensor:
        assert groups or q.shape[1] == k.shape[1] == v.shape[1]
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q, k, v))
        return apart(q, k, v, at.diff().tolist(), scale, 0.0, keys_at.diff().tolist())[0]

    def older(q, k, v, at, keys_at, most, most_keys, *, return_aux=None, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
        return by_rows(q, k, v, at, keys_at, scale, False)

    def newer(q, k, v, at, keys_at, most, most_keys, *, scale=None, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
        return by_rows(q, k, v, at, keys_at, scale, enable_gqa)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", newer if takes_groups else older)
    q, k, v = (torch.randn(1, heads, 8, 16) for heads in (4, 2, 2))
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32), 5
    torch.testing.assert_close(varlen(q, k, v, lengths, lengths, 0.3), apart(q, k, v, (3, 5), 0.3))


def test_a_run_compares_it_once_more_at_the_width_of_its_heads(installed: Path) -> None:
    install(installed, "flash_attn", "out if q.shape[-1] <= 128 else out * 0")
    assert probe._varlen_gap(CPU, (4, 6), (4, 6), "flash_attn", 128) is None
    assert "by flash_attn is off by" in (probe._varlen_gap(CPU, (4, 6), (4, 6), "flash_attn", 256) or "")


def test_cudnn_is_taken_by_its_name_alone() -> None:
    passed = Choice(attention={"bf16": ("flash", "math", "eager")}, libraries={"bf16": ("cudnn",)})
    found = choose_attention("cudnn", "sm_90", "bf16", passed)
    assert found.cudnn and found.notice is None and found.as_dict() == {"kernels": ["cudnn", "flash", "math"]}
    assert not choose_attention("auto", "sm_90", "bf16", passed).cudnn
    without = choose_attention("cudnn", "gfx942", "bf16", Choice(attention={"bf16": ("flash", "math", "eager")}))
    assert not without.cudnn and "cuDNN" in (without.notice or "") and without.allowed == ("flash", "math")
    names = [check.name for check in library_checks("sm_120")]
    assert names == ["library.cudnn.bf16", "library.cudnn.fp16"]


def test_what_a_run_has_set_is_gone_in_the_next() -> None:
    choice = Choice(attention={"bf16": ("flash", "math", "eager")}, libraries={"bf16": ("aiter",)})
    try:
        choose_attention("auto", "gfx950", "bf16", choice).apply()
        assert packed.Varlen.libraries == ("aiter",) and packed.Varlen.by is None
    finally:
        choose_attention("auto", "cpu", "fp32", Choice()).apply()
    assert not packed.Varlen.libraries


def test_rows_are_of_known_architectures() -> None:
    from core.hardware.tables.arch import lookup

    for row in LIBRARIES:
        for arch in row.arches:
            about = lookup(arch)
            assert about is not None and about.attention == "flash"
            names = [each.name for each in libraries_for(arch)]
            assert row.name in names and len(names) == len(set(names))


# --- padded rows -----------------------------------------------------------------------------------------


@pytest.fixture
def by_itself() -> Iterator[None]:
    """What a run sets for its process is taken back."""
    yield
    choose_attention("auto", "cpu", "fp32", Choice()).apply()


def narrow_engine(window: int | None = None) -> Engine:
    config: Any = MistralConfig(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=window,
    )  # fmt: skip
    seed_all(1)
    return build_engine(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), AdamW(learning_rate=1e-3))


def gradients_of(engine: Engine, batch: Batch) -> list[Tensor]:
    for parameter in engine.model.parameters():
        parameter.grad = None
    with engine.training_pass():
        loss = engine.policy.cross_entropy(batch) / batch.label_tokens
    loss.backward()
    return [loss.detach(), *(p.grad.float() for p in engine.model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("answer", [RIGHT, WITH_SUMS])
def test_padded_rows_are_computed_by_it(installed: Path, answer: str) -> None:
    install(installed, "flash_attn", answer)
    q, k, v = (torch.randn(3, heads, 7, 16).requires_grad_() for heads in (4, 2, 2))
    found = side_by_side(q, k, v, 0.3, "flash_attn")
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, wanted.transpose(1, 2))
    gradients = [torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("by_itself")
@pytest.mark.parametrize("window", [None, 8], ids=["causal", "window"])
def test_a_run_of_padded_rows_takes_the_library_that_passed(installed: Path, window: int | None) -> None:
    """With a window that is shorter than the rows, layers have a mask, which PyTorch's attention takes."""
    install(installed, "flash_attn", "calls.append(1) or out", MODULE.replace("import torch\n", "calls = []\n"))
    engine, rows = narrow_engine(window), token_rows(13, 5, 30)
    batch = rows.collate(range(3), 0)
    assert prepare_padded(engine) is None, "no library passed a self-test"
    wanted = gradients_of(engine, batch)
    choose_attention("auto", "sm_80", "bf16", choose(verdict("sm_80"))).apply()
    assert prepare_padded(engine) == {"attention": "flash_attn"}
    calls = sys.modules["flash_attn"].calls
    before = len(calls)
    found = gradients_of(engine, batch)
    assert len(calls) - before == (2 if window is None else 0), "one call a layer"
    torch.testing.assert_close(found, wanted, rtol=4e-2, atol=4e-3)


@pytest.mark.usefixtures("by_itself")
def test_a_library_that_is_wrong_for_a_model_leaves_padded_rows_to_pytorch(installed: Path) -> None:
    install(installed, "flash_attn")
    choice = choose(verdict("sm_80"))
    install(installed, "flash_attn", "out if q.shape[-1] != 16 else out * 1.5")
    sys.modules.pop("flash_attn")
    engine = narrow_engine()
    choose_attention("auto", "sm_80", "bf16", choice).apply()
    found = prepare_padded(engine)
    assert found is not None and found["attention"] == "sdpa" and "is off by" in found["not"]["flash_attn"]
    assert engine.model.config._attn_implementation == "sdpa"
    assert packed.Varlen.by is None and not packed.Varlen.padded
