"""A checkpoint is complete or it is not there; a damaged one is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.train.checkpoint import store


def fill(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"weights")
    (folder / "state.json").write_text("{}")


def test_newest_first_over_folders(tmp_path: Path) -> None:
    own, old = tmp_path / "own", tmp_path / "old"
    for root, step, micro in ((own, 5, 0), (old, 5, 2), (old, 5, 0), (old, 12, 0)):
        store.write(root, store.name_of(step, micro), fill)
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
    path = store.write(tmp_path, store.name_of(1, 0), fill)
    match damage:
        case "flip":
            (path / "a.safetensors").write_bytes(b"Weights")
        case "cut":
            (path / "a.safetensors").write_bytes(b"weight")
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
    store.write(tmp_path, store.name_of(1, 0), fill)

    def disk_full(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        store.write(tmp_path, store.name_of(2, 0), disk_full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        store.write(tmp_path, store.name_of(step, 0), fill)
    store.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
