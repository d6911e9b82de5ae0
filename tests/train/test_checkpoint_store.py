"""A checkpoint is complete or it is not there; a damaged one is found out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from core.storage.checkpoints import name_for
from core.train.checkpoint import store


def fill(folder: Path) -> None:
    (folder / "a.weights").write_bytes(b"weights")
    (folder / "state.json").write_text("{}")


def test_newest_first_over_folders(tmp_path: Path) -> None:
    own, old = tmp_path / "own", tmp_path / "old"
    for root, step, micro in ((own, 5, 0), (old, 5, 2), (old, 5, 0), (old, 12, 0)):
        store.write(root, name_for(root, step, micro), fill)
    (own / "tmp-step-00000099-1").mkdir()
    (own / "bad-step-00000098").mkdir()
    found = store.newest_first([own, old, tmp_path / "missing"])
    assert [(item.path.parent.name, item.step, item.micro) for item in found] == [
        ("old", 12, 0),
        ("old", 5, 2),
        ("own", 5, 0),
        ("old", 5, 0),
    ]
    assert all(store.fault(item.path) is None for item in found)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "add", "manifest", "no manifest"])
def test_damage_is_found_and_quarantined(tmp_path: Path, damage: str) -> None:
    path = store.write(tmp_path, name_for(tmp_path, 1, 0), fill)
    match damage:
        case "flip":
            (path / "a.weights").write_bytes(b"Weights")
        case "cut":
            (path / "a.weights").write_bytes(b"weight")
        case "remove":
            (path / "state.json").unlink()
        case "add":
            (path / "more").touch()
        case "manifest":
            (path / store.MANIFEST).write_text("{")
        case _:
            (path / store.MANIFEST).unlink()
    assert store.fault(path) is not None
    assert store.quarantine(path).name == "bad-step-00000001"
    assert store.newest_first([tmp_path]) == []


def test_a_failing_write_leaves_the_old_ones(tmp_path: Path) -> None:
    store.write(tmp_path, name_for(tmp_path, 1, 0), fill)

    def disk_full(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.write(tmp_path, name_for(tmp_path, 2, 0), disk_full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("name", ["a.safetensors", "state.json"])
def test_a_torn_file_never_becomes_a_checkpoint(tmp_path: Path, name: str) -> None:
    """What was written is opened again before the manifest is made."""

    def torn(folder: Path) -> None:
        fill(folder)
        whole = save({"weight": torch.zeros(9)}) if name.endswith("safetensors") else b'{"steps": 3}'
        (folder / name).write_bytes(whole[:-1])

    with pytest.raises(store.Unreadable, match=name):
        store.write(tmp_path, "step-00000001", torn)
    assert not list(tmp_path.iterdir())


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        store.write(tmp_path, name_for(tmp_path, step, 0), fill)
    store.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_later_version_takes_the_place_of_one_of_the_same_progress(tmp_path: Path) -> None:
    for step, content in ((2, b"two"), (4, b"four"), (4, b"four, later")):
        store.write(tmp_path, name_for(tmp_path, step, 0), filled(content))
    assert [found.path.name for found in store.newest_first([tmp_path])] == [
        "step-00000004-v2", "step-00000004", "step-00000002",
    ]  # fmt: skip
    store.prune(tmp_path, 2)  # two moments of the run, not two versions of one
    assert [found.path.name for found in store.newest_first([tmp_path])] == ["step-00000004-v2", "step-00000002"]
    with pytest.raises(FileExistsError):
        store.write(tmp_path, "step-00000002", fill)


def filled(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "state.json").write_text("{}")
        (folder / "a.weights").write_bytes(content)

    return write


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Do `work` in a process of its own that kills itself before its `point`-th call that changes or opens a file.
    False when the work was done before that."""
    child = os.fork()
    if child == 0:
        left = point

        def count(event: str, arguments: object) -> None:
            nonlocal left
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_kill_at_any_point_of_a_second_save_of_a_step_loses_nothing(tmp_path: Path, keep_last: int) -> None:
    """A stop request right after a periodic save writes the same step once more."""

    def save(root: Path, step: int, content: bytes) -> None:
        store.write(root, name_for(root, step, 0), filled(content))
        store.prune(root, keep_last)

    point, seen = 1, set[bytes]()
    while True:
        root = tmp_path / str(point)
        save(root, 2, b"two")
        save(root, 4, b"four")
        killed = killed_at(point, lambda root=root: save(root, 4, b"four, later"))
        whole = store.newest_first([root])
        assert [one for one in whole if store.fault(one.path) is not None] == [], f"killed at {point}"
        assert whole[0].step == 4, f"killed at {point}"
        seen.add((whole[0].path / "a.weights").read_bytes())
        save(root, 4, b"once more")
        assert (store.newest_first([root])[0].path / "a.weights").read_bytes() == b"once more"
        assert len(list(root.iterdir())) == keep_last, "nothing is left aside"
        if not killed:
            break
        point += 1
    assert point > 20
    assert seen == {b"four", b"four, later"}
