"""Settings come from the environment and refuse what could make two runs overlap."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from core.ids import new_id
from core.settings import Settings
from core.storage.layout import Layout


def test_roots_are_split_at_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFT_MODEL_ROOTS", "/a:/b:")
    assert Settings().model_roots == (Path("/a"), Path("/b"))


@pytest.mark.parametrize(("renew", "fence", "lease"), [(15, 90, 60), (60, 60, 90), (15, 60, 60)])
def test_a_fence_outside_the_lease_is_refused(renew: float, fence: float, lease: float) -> None:
    with pytest.raises(ValidationError, match="runs could overlap"):
        Settings(renew_seconds=renew, fence_seconds=fence, lease_seconds=lease)


def test_the_default_database_lies_below_the_data_root(tmp_path: Path) -> None:
    assert Settings(data=tmp_path).sqlalchemy_url == f"sqlite:///{tmp_path}/eft.db"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "file-", "file-" + "0" * 25 + "/", "FILE-" + "0" * 26, "file-" + "0" * 26 + "\n"]
)
def test_no_foreign_text_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not an id"):
        Layout(tmp_path).file(name)


def test_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_id("job") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert sorted(ids, key=lambda value: value[:14]) == ids
    assert Layout(Path("/data")).job(ids[0]) == Path("/data/runs") / ids[0]
