"""What the emulator reports: programs that leave their memory, use what nothing has written, or race; and changes of
the compiled kernels in one place."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.machine import assembly
from tests.support.machine.assembly import Fault, Unknown
from tests.support.machine.launch import launch
from tests.support.machine.memory import Memory
from tests.support.machine_process import machine

LOAD = """
s_load_dwordx4 s[4:7], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
v_lshlrev_b32_e32 v1, 2, v0
global_load_dword v2, v1, s[4:5]
"""
STORE = "global_store_dword v1, v2, s[6:7]\ns_endpgm"
TEMPLATE = """\t.amdgcn_target "amdgpu9.42-amd-amdhsa-unknown-gfx942"
\t.text
small:
{code}
\t.section\t.rodata
\t.amdhsa_kernel small
\t\t.amdhsa_kernarg_size 16
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_next_free_vgpr 8
\t.end_amdhsa_kernel
"""


def _run(code: str, count: int = 128, written: bool = True) -> np.ndarray[Any, Any]:
    """Two waves of 64 lanes over `count` float32 in and 128 out; what they wrote."""
    memory = Memory()
    given, out = np.arange(count, dtype=np.float32), np.zeros(128, np.float32)
    addresses = memory.add("in", given.view(np.uint8), written), memory.add("out", out.view(np.uint8))
    program = assembly.read(TEMPLATE.format(code=code))
    launch(program, memory, struct.pack("<QQ", *addresses), 128, 512, [0])
    return out


def test_a_program_copies_its_input() -> None:
    assert (_run(LOAD + STORE) == np.arange(128)).all()


def test_a_load_past_the_end_is_a_fault() -> None:
    with pytest.raises(Fault, match=r"small on gfx942, line \d+, global_load_dword .*out of bounds"):
        _run(LOAD + STORE, count=127)


def test_a_load_of_memory_that_nothing_has_written_is_a_fault() -> None:
    with pytest.raises(Fault, match="reads byte 0 of in, which nothing has written"):
        _run(LOAD + STORE, written=False)


def test_an_address_without_its_high_half_is_a_fault() -> None:
    with pytest.raises(Fault, match="in no buffer"):
        _run(LOAD.replace("global_load", "s_mov_b32 s5, 0\nglobal_load") + STORE)


def test_a_register_that_nothing_has_written_is_a_fault() -> None:
    with pytest.raises(Fault, match="reads v3 of lane 0 of wave 0"):
        _run(LOAD + "v_add_f32_e32 v2, v2, v3\n" + STORE)
    with pytest.raises(Fault, match="reads scalar register 9"):
        _run(LOAD + "s_add_u32 s8, s9, s9\n" + STORE)


def test_half_a_register_may_be_shifted_out_but_not_stored() -> None:
    half = "global_load_short_d16 v3, v1, s[4:5]\n"
    _run(LOAD + half + "v_lshlrev_b32_e32 v2, 16, v3\n" + STORE)
    with pytest.raises(Fault, match="reads v2"):
        _run(LOAD + half + "v_lshlrev_b32_e32 v2, 8, v3\n" + STORE)


EXCHANGE = "ds_write_b32 v1, v2\n{between}\nv_xor_b32_e32 v3, 0x1fc, v1\nds_read_b32 v2, v3\n"


def test_waves_exchange_by_local_memory_and_a_barrier_between_them() -> None:
    assert (_run(LOAD + EXCHANGE.format(between="s_barrier") + STORE) == np.arange(128)[::-1]).all()


def test_without_the_barrier_it_is_a_race() -> None:
    with pytest.raises(Fault, match="local memory that another wave has written since the last barrier"):
        _run(LOAD + EXCHANGE.format(between="") + STORE)


def test_local_memory_has_an_end_and_begins_unwritten() -> None:
    with pytest.raises(Fault, match="out of bounds"):
        _run(LOAD + EXCHANGE.format(between="s_barrier").replace("v3\n", "v3 offset:4\n") + STORE)
    with pytest.raises(Fault, match="byte of local memory that nothing has written"):
        _run(LOAD + "ds_read_b32 v2, v1\n" + STORE)


def test_a_wait_at_a_barrier_without_its_signal_is_a_fault() -> None:
    with pytest.raises(Fault, match="waits at a barrier that it has not signalled"):
        _run(LOAD + "s_barrier_wait -1\n" + STORE)


def test_an_instruction_that_is_not_known_is_named() -> None:
    with pytest.raises(Unknown, match=r"line \d+, v_frobnicate_b32 v2, v2: .*does not know"):
        _run(LOAD + "v_frobnicate_b32 v2, v2\n" + STORE)


# --- a change of the compiled kernels in one place ------------------------------------------------

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with machine() as run:
        yield run


MUTANTS = [
    ("gfx942", "nf4 to bfloat16", "v_mul_f32_e32", "v_add_f32_e32"),
    ("gfx942", "nf4 to bfloat16", "0x7fff", "0x8000"),  # ties to even
    ("gfx942", "int8 to float16", "v_cmp_gt_i32_e32 vcc", "v_cmp_lt_i32_e32 vcc"),  # the mask of the ragged end
    ("gfx942", "int8 to float16", "0x7ffffffe", "0xfffffffe"),  # the size of a buffer
    ("gfx942", "gemv int8, 8 rows", "row_mask:0xf", "row_mask:0xe"),
    ("gfx942", "gemv int8, 8 rows", "s_barrier", "s_nop 0"),
    ("gfx90a", "loss float32", "s_barrier", "s_nop 0"),
    ("gfx90a", "loss bfloat16", "v_exp_f32_e32", "v_log_f32_e32"),
    ("gfx1100", "gemv int8, 1 row", "row_xmask:4", "row_xmask:2"),
    ("gfx1100", "loss float32", "v_permlanex16_b32", "v_permlanex32_b32"),
    ("gfx1100", "nf4 to float16", "v_dual_mul_f32", "v_dual_add_f32"),
    ("gfx1201", "gemv nf4, 8 rows", "v_dual_fmac_f32", "v_dual_mul_f32"),
    ("gfx1201", "loss bfloat16", "s_barrier_wait -1", "s_nop 0"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
@pytest.mark.parametrize(("target", "case", "old", "new"), MUTANTS)
def test_a_changed_instruction_is_found(run: Run, target: str, case: str, old: str, new: str) -> None:
    wrong, _ = run("tests.support.machine.kernels:execute", target, [case], change=(old, new))
    assert case in wrong and "no '" not in wrong[case], wrong
