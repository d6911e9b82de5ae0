"""Folders that go with a transaction: deleted when it ends, back in their place when it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.removal import removing


def folders(root: Path) -> list[Path]:
    made = [root / "one", root / "two"]
    for folder in made:
        folder.mkdir()
        (folder / "weights").write_text("1")
    return made


def test_what_was_set_aside_is_deleted_after_the_block(tmp_path: Path) -> None:
    one, two = folders(tmp_path)
    with removing(".gone-") as set_aside:
        set_aside(one)
        set_aside(tmp_path / "never-there")
        assert [path.name.split("-")[0] for path in tmp_path.iterdir() if path != two] == [".gone"]
    assert list(tmp_path.iterdir()) == [two]


def test_all_of_it_is_back_when_the_block_fails(tmp_path: Path) -> None:
    one, two = folders(tmp_path)
    with pytest.raises(RuntimeError, match="disk full"), removing(".gone-") as set_aside:
        set_aside(one)
        set_aside(two)
        raise RuntimeError("disk full")
    assert sorted(tmp_path.iterdir()) == [one, two]
    assert (one / "weights").read_text() == (two / "weights").read_text() == "1"
