"""The runtime itself, and the product's rooms that talk to it: memory, streams, errors, several devices."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import EftError
from core.hardware import device_mask
from core.spec.axes.method import LoRA
from core.spec.axes.optim.optimizers import AdamW
from core.spec.axes.runtime import Resources
from core.spec.axes.training import Training
from core.train.base.rng import capture_rng, restore_rng
from core.train.engine import build_engine
from core.train.export.formats.lm_eval import place_of_score
from core.train.linalg.singular import by_eigenvectors, largest_singular
from core.train.memory.transfer.pinned import page_lock, unlock, whole_pages
from core.train.memory.transfer.transfer import StagedTransfer, Transfer
from core.train.model.load import load_model, saved_dtype
from core.train.model.placement import DeviceMissing, place
from tests.rehearsal import branches, numbers
from tests.rehearsal.environment import variables
from tests.rehearsal.forking import ForkedProgram
from tests.rehearsal.support import bare, python, visible
from tests.support.trainer import ROOT

GPU = torch.device("cuda", 0)


# --- devices and memory ------------------------------------------------------------------------------


def test_the_host_cannot_touch_device_memory() -> None:
    program = """
at = ctypes.c_void_p()
print(cuda.cudaMalloc(ctypes.byref(at), 16), flush=True)
ctypes.string_at(at.value, 16)
"""
    ended = bare(program, devices=1)
    assert ended.stdout.split() == ["0"] and ended.returncode == -signal.SIGSEGV


def test_memory_is_as_large_as_the_device_and_no_larger() -> None:
    program = """
def refused(megabytes, into=ctypes.c_void_p()):
    return cuda.cudaMalloc(ctypes.byref(into), ctypes.c_size_t(megabytes << 20))
kept, other = ctypes.c_void_p(), ctypes.c_void_p()
print(refused(1016, kept), refused(16), cuda.cudaGetLastError(), cuda.cudaGetLastError())
print(cuda.cudaSetDevice(1), refused(16), cuda.cudaSetDevice(2), cuda.cudaSetDevice(0))
print(cuda.cudaFree(kept), refused(16))
"""
    ended = bare(program, devices=2, bytes=1 << 30)
    assert ended.stdout.split() == ["0", "2", "2", "0", "0", "0", "101", "0", "0", "0"], ended.stderr


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device=GPU) + torch.ones(4)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device=GPU) + torch.ones(4, device="cuda:1")


def test_fresh_memory_holds_no_zeros() -> None:
    torch.cuda.empty_cache()
    fresh = torch.empty(1 << 20, device=GPU)
    assert bool(fresh.cpu().isnan().all())


def test_an_operation_without_a_cpu_form_says_so() -> None:
    with pytest.raises(NotImplementedError):
        torch.ops.aten._thnn_fused_lstm_cell(
            *(torch.zeros(2, 8, device=GPU) for _ in range(2)), torch.zeros(2, 2, device=GPU)
        )


@pytest.mark.parametrize("mask", ["", "-1", "1,0"])
def test_a_mask_shows_the_devices_that_it_names(mask: str) -> None:
    expected = [int(part) for part in mask.split(",") if part and part != "-1"]
    assert visible({"CUDA_VISIBLE_DEVICES": mask}, devices=2) == expected


# --- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["late", "early", "prompt"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_gives_stale_numbers(order: str, waits: bool) -> None:
    """Into the device: whoever computes waits for the copy. Out of it: the copy waits for what is computed."""
    with numbers.order(order):
        side = torch.cuda.Stream()
        there, back = torch.ones(8).pin_memory(), torch.zeros(8).pin_memory()
        first, second = torch.zeros(8, device=GPU), torch.zeros(8, device=GPU)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            first.copy_(there, non_blocking=True)
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        total = first + 1
        second.fill_(3)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            back.copy_(second, non_blocking=True)
        side.synchronize()
        found = total.sum().item(), back.sum().item()
    stale = {"late": (8, 24), "early": (16, 0), "prompt": (16, 24)}
    assert found == ((16, 24) if waits else stale[order])


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("pinned", [True, False])
def test_staged_transfers_move_what_is_there_after_the_event(order: str, pinned: bool) -> None:
    with numbers.order(order):
        transfer = StagedTransfer(GPU, 4096, pinned=pinned, field="x")
        source = torch.arange(5000, dtype=torch.float32)
        target = torch.zeros(5000, dtype=torch.bfloat16, device=GPU)
        transfer.send(source, target, after=transfer.computed())
        transfer.wait(transfer.copied())
        doubled = target * 2
        found = torch.empty(5000, dtype=torch.bfloat16)
        for place_, piece in transfer.fetch(doubled, after=transfer.computed()):
            found[place_] = piece
        transfer.close()
    assert torch.equal(found, source.to(torch.bfloat16) * 2)


def test_torchs_sanitizer_finds_no_race_in_transfers_and_finds_what_is_taken_out() -> None:
    """Intact, without the waits before the copies, and without the waits for them."""
    command = [sys.executable, "-m", "tests.rehearsal.sanitized"]
    ended = subprocess.run(
        command, cwd=ROOT, env=variables(numbers=0), capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout)
    assert found.pop("gradient changed behind its event") == ["race"]
    assert found == {name: ["clean", "race", "race"] for name in ("optimizer", "blocks", "activations")}


def test_random_numbers_are_those_of_the_generators_state() -> None:
    torch.manual_seed(3)
    state = capture_rng()
    first = torch.rand(64, device=GPU)
    second = torch.rand(64, device=GPU)
    restore_rng(*state)
    assert torch.equal(torch.rand(64, device=GPU), first) and not torch.equal(first, second)


# --- host memory -------------------------------------------------------------------------------------


def test_a_refused_registration_leaves_no_error_to_the_next_kernel() -> None:
    """The runtime remembers the error, and a check after any launch would raise it as that kernel's."""
    buffer = whole_pages(1 << 20)
    page_lock(buffer)
    try:
        with pytest.raises(EftError, match="cudaHostRegister") as told:
            page_lock(buffer)
        assert told.value.code == "pinned_memory_refused"
        assert (torch.ones(4, device=GPU) + 1).sum().item() == 8
    finally:
        unlock(buffer)


def test_a_copy_behind_an_event_is_made_of_a_gradient_as_it_was_then() -> None:
    """A gradient that is not contiguous is made so before the event: behind it, the copy would race with that."""
    from core.train.memory.offload.optimizer import OptimizerOffload

    class Turned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight @ x).sum()

    with numbers.order("early"):
        model = Turned()
        offload = OptimizerOffload(model, GPU)
        parameter = model.weight
        gradient = torch.arange(12.0, device=GPU).view(4, 3).t()
        parameter.grad = gradient
        next(iter(parameter._post_accumulate_grad_hooks.values()))(parameter)  # as autograd calls it
        offload.synchronize()
        (master,) = offload.parameters.values()
        assert torch.equal(master.grad, torch.arange(12.0).view(4, 3).t())
        offload.close()


# --- several devices ---------------------------------------------------------------------------------


def test_each_rank_is_placed_on_its_device() -> None:
    resources, training, method = Resources(accelerator="gpu"), Training(), LoRA()
    try:
        for rank in range(2):
            found = place(resources, training, method, local_rank=rank)
            assert found.device == torch.device("cuda", rank) and torch.cuda.current_device() == rank
            assert (found.arch, found.precision) == ("sm_80", "bf16")
            assert Transfer(found.device).computed() is not None
        with pytest.raises(DeviceMissing, match="rank 2"):
            place(resources, training, method, local_rank=2)
    finally:
        torch.cuda.set_device(0)
        torch.use_deterministic_algorithms(False)


def test_lm_eval_scores_on_a_gpu_with_room(tiny_dir: Path) -> None:
    """Beside the trained model, in the dtype of its files. On a CPU: tests/service/test_serving.py."""
    model = load_model(tiny_dir, saved_dtype(tiny_dir))
    model.to("cuda:0")
    subject: Any = SimpleNamespace(model=model, device=torch.device("cuda", 0), model_dir=tiny_dir)
    assert place_of_score(subject) == ("cuda:0", str(saved_dtype(tiny_dir)).removeprefix("torch."))


def test_the_spare_heeds_the_number_that_comes_with_its_order() -> None:
    """It has imported all that a run needs with all GPUs hidden; and torchao, which asks for GPUs, is installed."""
    program = """
import sys
from core.train.entry import standby
standby.imports()
print("torchao" in sys.modules, standby._change_environment({"CUDA_VISIBLE_DEVICES": "1"}))
print(torch.cuda.get_device_properties(0).pci_bus_id)
"""
    ended = python(program, CUDA_VISIBLE_DEVICES=device_mask.NO_GPU)
    assert ended.stdout.split() == ["True", "True", "1"], ended.stderr[-2000:]


def test_the_spare_starts_cold_where_a_library_has_read_the_number() -> None:
    """And a GPU that a variable names and torch does not see is missed, and not replaced by the CPU."""
    program = """
torch.cuda.is_available()
from core.train.entry import standby
print(standby._change_environment({"CUDA_VISIBLE_DEVICES": "1"}))
from core.spec.axes.method import LoRA
from core.spec.axes.runtime import Resources
from core.spec.axes.training import Training
from core.train.model.placement import DeviceMissing, place
for accelerator in ("gpu", "any"):
    try:
        print(place(Resources(accelerator=accelerator), Training(), LoRA()).device)
    except DeviceMissing:
        print("missing")
"""
    ended = python(program, CUDA_VISIBLE_DEVICES=device_mask.NO_GPU)
    assert ended.stdout.split() == ["False", "missing", "missing"], ended.stderr[-2000:]


# --- the list of branches ----------------------------------------------------------------------------


def test_a_branch_that_was_not_taken_and_an_exception_without_need_are_named(tmp_path: Path) -> None:
    """This is what fails a run of the whole suite (environment.py)."""
    found = sorted(set(branches.device_tests()) - set(branches.EXCEPTIONS))
    assert len(found) > 40
    noted = tmp_path / "1"
    noted.write_text("".join(f"{module}\t{source}\n" for module, source in found))
    assert branches.faults(tmp_path) == []
    module, source = next(iter(branches.EXCEPTIONS))
    noted.write_text("".join(f"{module}\t{source}\n" for module, source in [*found[1:], (module, source)]))
    assert branches.faults(tmp_path) == [
        f"{found[0][1]} of {found[0][0]} never came out as on a GPU",
        f"{source} of {module} is an exception without need",
    ]


# --- the self-test -----------------------------------------------------------------------------------


@pytest.mark.xdist_group("forks")
def test_the_self_test_runs_on_the_device(tmp_path: Path) -> None:
    """One part of each kind."""
    journal, log = tmp_path / "journal", tmp_path / "log"
    only = "matmul.bf16,optimizer.adamw,qlora.nf4.bf16,loss.portable.bf16,attention.flash.bf16"
    code = ForkedProgram("core.train.selftest", str(journal), "--only", only, log=log, devices=1).wait()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert code == 0, log.read_text()[-2000:]
    about = next(line["device"] for line in lines if "device" in line)
    assert about["device_name"] == "Rehearsal (no GPU)" and about["runtime"].startswith("cuda")
    assert lines[-1] == {"done": True}
    assert [line["part"]["status"] for line in lines if "part" in line] == ["passed"] * 5, lines


def test_an_engine_on_a_gpu_without_a_number_takes_batches_that_are_there() -> None:
    engine = build_engine(torch.nn.Linear(2, 2).cuda(), AdamW(learning_rate=1e-3), device=torch.device("cuda"))
    assert engine.device == GPU == torch.ones(1, device="cuda").device


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_singular_vectors_on_a_gpu_are_those_of_the_symmetric_product(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found, wanted = largest_singular(matrix.cuda(), 3), by_eigenvectors(matrix, 3)
    assert all(each.is_cuda and torch.equal(each.cpu(), other) for each, other in zip(found, wanted, strict=True))
