"""Random faults of processes, store and disk: the final weights are those of the undisturbed run, and no bad checkpoint
is used. A handful of seeds; `python -m bench.faults` takes as many as are asked for."""

from __future__ import annotations

from pathlib import Path

from tests.support.random_faults import OF_DISK, OF_PROCESS, OF_STORE, faults

SEEDS = ((3, 5, 6), (13, 14, 15), (17, 18, 19))
"""The first three always; more where the machine is so busy that a kill at a moment leaves no checkpoint to damage."""


def test_faults_of_fixed_seeds_change_no_bit(tiny_dir: Path, tmp_path: Path) -> None:
    met: set[str] = set()
    for number, seeds in enumerate(SEEDS):
        told = list(faults(tiny_dir, tmp_path / f"runs-{number}", seeds))
        assert len(told) == len(seeds) and not any(one["wrong"] for one in told), told
        met |= {fault for one in told for fault in one["faults"]}
        if met & set(OF_PROCESS) and met >= set(OF_STORE) and met & set(OF_DISK):
            return
    raise AssertionError(f"the seeds are no good any more: {met}")
