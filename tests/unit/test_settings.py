"""Settings come from the environment and refuse what could make two runs overlap."""

from pathlib import Path

import pytest
import redis.connection
from kombu.utils.url import parse_url
from pydantic import ValidationError
from sqlalchemy import make_url

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
    assert sorted(ids) == ids, "also within one millisecond"
    assert Layout(Path("/data")).job(ids[0]) == Path("/data/runs") / ids[0]


def test_any_setting_can_be_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("port", "9000\n"), ("gpus", "0, 2\n"), ("database_url", "postgresql+psycopg://eft@db/eft\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"EFT_{name.upper()}_FILE", str(tmp_path / name))
    read = Settings()
    assert (read.port, read.gpus, read.database_url) == (9000, (0, 2), "postgresql+psycopg://eft@db/eft")
    assert Settings(port=1).port == 1, "what the code gives counts more"


def test_a_setting_given_twice_or_in_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFT_PORT_FILE", str(tmp_path / "absent"))
    with pytest.raises(ValidationError, match=r"EFT_PORT_FILE=.*absent cannot be read by user \d+: No such file"):
        Settings()
    monkeypatch.setenv("EFT_PORT", "1")
    with pytest.raises(ValidationError, match="EFT_PORT and EFT_PORT_FILE are both set"):
        Settings()


@pytest.mark.parametrize("password", ["plain", "p@ss:/w?rd#%41 ü"])
def test_passwords_are_put_into_the_urls(password: str) -> None:
    read = Settings(
        database_url="postgresql+psycopg://eft@db:5432/eft?sslmode=require",
        database_password=password,
        broker_url="redis://broker:6379/0",
        broker_password=password,
    )
    database = make_url(read.sqlalchemy_url)
    assert (database.username, database.password, database.host, database.port) == ("eft", password, "db", 5432)
    assert database.query == {"sslmode": "require"}
    broker = parse_url(read.celery_broker_url)
    assert (broker["hostname"], broker["port"], broker["password"]) == ("broker", 6379, password)
    assert redis.connection.parse_url(read.celery_broker_url)["password"] == password
    assert password not in repr(read)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"database_password": "hunter2"}, "names no server"),
        ({"database_password": "hunter2", "database_url": "postgresql+psycopg://db/eft"}, "names no user"),
        (
            {"database_password": "hunter2", "database_url": "postgresql+psycopg://eft:x@db/eft"},
            "remove one of them",
        ),
        ({"broker_password": "hunter2", "broker_url": "redis+socket:///run/b.sock"}, "names no server"),
    ],
)
def test_a_password_that_has_no_place_is_refused_and_not_shown(given: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as refused:
        Settings(**given)
    assert "hunter2" not in str(refused.value)
