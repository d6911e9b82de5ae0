"""Every setting with bad values of every kind: refused in words that name the variable, and secrets are not shown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from core import HOME
from core.settings import Settings, SettingsError, make_root, read_settings

LONG = "9" * 400
BAD: dict[str, tuple[str, ...]] = {
    "int": ("abc", "1.5", "", "-1", "1e3", "0x10", LONG, "nan", "١x", "1 2"),
    "float": ("abc", "", "-1", "nan", "inf", "1e400", LONG, "1,5", "ten"),
    "bool": ("maybe", "", "2", "tru"),
    "url": ("nonsense", "://", "mysql://u:hunter2@h/x", "http://[", "redis://h:99999", "postgresql://u:hun/ter2@h/x"),
    "path": ("~nobody-by-this-name/x",),
    "name": ("", "a b", "a\nb"),
    "choice": ("", "fp16", "32"),
    "header": ("token", "=x", "a b=c", "a=", "ä=b"),
}
"""By kind of setting."""
KINDS: dict[str, str] = {
    **dict.fromkeys(("database_url", "broker_url", "public_url", "s3_endpoint", "otlp_endpoint"), "url"),
    **dict.fromkeys(
        (
            "data",
            "work",
            "log_file",
            "model_roots",
            "data_roots",
            "tracking_dir",
            "lm_eval_tasks",
            "reward_tokens",
            "snapshots",
        ),
        "path",
    ),
    **dict.fromkeys(("host", "node"), "name"),
    "gpus": "int",
    "otlp_headers": "header",
    "tinker_precision": "choice",
    "webhook_retry_seconds": "float",
}
ANY = {
    *("s3_region", "s3_access_key_id", "s3_secret_access_key", "database_password", "broker_password"),
    *("sysfs", "webhook_allow", "reward_allow", "node_labels", "trusted_proxies"),
}
"""Any text may be one."""
NO_FAULT = {
    ("gpus", ""),  # all of them
    ("webhook_retry_seconds", ""),  # none
    ("webhook_retry_seconds", "1,5"),  # two of them
}


def kind_of(name: str) -> str:
    annotation = Settings.model_fields[name].annotation
    inner = next((part for part in get_args(annotation) if part is not type(None)), annotation)
    return KINDS.get(name) or {int: "int", float: "float", bool: "bool"}[inner]


def cases() -> Iterator[tuple[str, str]]:
    for name in Settings.model_fields:
        if name not in ANY:
            for value in BAD[kind_of(name)]:
                if (name, value) not in NO_FAULT:
                    yield name, value


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EFT_")]:
        monkeypatch.delenv(name)


def refused() -> str:
    with pytest.raises(SettingsError) as caught:
        read_settings()
    words = str(caught.value)
    assert caught.value.faults and "pydantic" not in words and "hunter2" not in words and "ter2" not in words
    assert len(words) < 400
    return words


def test_every_setting_has_bad_values_or_takes_any_text() -> None:
    assert {name for name, _ in cases()} | ANY == set(Settings.model_fields)


@pytest.mark.parametrize("name", sorted({name for name, _ in cases()}))
def test_a_bad_value_names_its_variable(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    variable, file = f"EFT_{name.upper()}", tmp_path / "value"
    for value in [value for named, value in cases() if named == name]:
        monkeypatch.setenv(variable, value)
        assert refused().startswith(f"{variable}: "), value
        monkeypatch.delenv(variable)
        if value:
            file.write_text(value)
            monkeypatch.setenv(f"{variable}_FILE", str(file))
            assert refused().startswith(f"{variable}_FILE: "), value
            monkeypatch.delenv(f"{variable}_FILE")


@pytest.mark.parametrize("name", sorted(ANY))
def test_any_text_is_taken_or_refused_in_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "x y", "\udcff", "a,,b", LONG):
        monkeypatch.setenv(f"EFT_{name.upper()}", value)
        try:
            read_settings()
        except SettingsError as error:
            assert f"EFT_{name.upper()}" in str(error), value


@pytest.mark.parametrize("name", Settings.model_fields)
def test_bytes_of_another_encoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"EFT_{name.upper()}", "\udcff\udcfe")
    try:
        read_settings()
    except SettingsError as error:
        assert f"EFT_{name.upper()}" in str(error)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"EFT_PORT": "abc"}, "EFT_PORT: 'abc' is not a whole number"),
        ({"EFT_PORT": "99999"}, "EFT_PORT: must be at most 65,535"),
        ({"EFT_CPU_SLOTS": "0"}, "EFT_CPU_SLOTS: must be at least 1"),
        ({"EFT_LEASE_SECONDS": "ten"}, "EFT_LEASE_SECONDS: 'ten' is not a number"),
        ({"EFT_FENCE_SECONDS": "500"}, "EFT_FENCE_SECONDS"),
        ({"EFT_BROKER_PASSWORD": "hunter2"}, "EFT_BROKER_PASSWORD is for a server at EFT_BROKER_URL"),
        ({"EFT_DATABASE_URL": "mysql://u:hunter2@h/x"}, "`mysql` is not a database that eft runs on"),
        ({"EFT_DATABASE_URL": "sqlite://"}, "an SQLite database is a file"),
        ({"EFT_BROKER_URL": "amqp://h"}, "`amqp` is not a broker that eft speaks to"),
        ({"EFT_PORT": "x", "EFT_OFFLINE": "maybe"}, "EFT_OFFLINE: 'maybe' is neither"),
    ],
)
def test_what_is_said(variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert words in refused()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_postgresql_is_one(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFT_DATABASE_URL", f"{scheme}://eft@db:5432/eft?sslmode=require")
    monkeypatch.setenv("EFT_DATABASE_PASSWORD", "hunter2")
    assert read_settings().sqlalchemy_url == "postgresql+psycopg://eft:hunter2@db:5432/eft?sslmode=require"


def test_a_data_root_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file", "is a file, not a folder"), (tmp_path / "file" / "x", "cannot be made"),
                        (Path("/proc/nope"), "cannot be made")):  # fmt: skip
        with pytest.raises(SettingsError, match=f"EFT_DATA: {path} {words}"):
            make_root(Settings(data=str(path)))
    assert make_root(Settings(data=str(tmp_path / "new" / "root"))).stat().st_mode & 0o777 == 0o700


PROGRAMS: tuple[tuple[str, list[str]], ...] = (
    ("box.up", []),
    ("api", []),
    ("worker", []),
    ("core.db.migrate", []),
    ("box.db", ["status"]),
    ("box.adopt", []),
    ("box.backup", ["create", "there"]),
    ("box.restore", ["there"]),
    ("box.healthy", ["api"]),
    ("api.auth.keys", ["list"]),
)
ALL = """
import contextlib, io, json, os, runpy, sys
from core.settings import settings
told = []
for module, arguments, environment in json.loads(sys.argv[1]):
    for name in [name for name in os.environ if name.startswith("EFT_")]:
        del os.environ[name]
    os.environ.update(environment)
    settings.cache_clear()
    sys.argv = [module, *arguments]
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = "it went on"
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        code = repr(error)
    told.append([module, environment, code, err.getvalue()])
print(json.dumps(told))
"""
"""One process for all of them: it is what they import that takes its time."""


def test_every_program_ends_in_words(tmp_path: Path) -> None:
    """Status 78 for a setting; 1 for what the setting names and cannot be used."""
    (tmp_path / "file").write_text("")
    wrong: list[tuple[dict[str, str], set[Any], str]] = [
        ({"EFT_PORT": "abc"}, {78}, "EFT_PORT: 'abc' is not a whole number"),
        ({"EFT_DATABASE_URL": "mysql://u:hunter2@h/x"}, {78}, "EFT_DATABASE_URL: `mysql`"),
        ({"EFT_BROKER_PASSWORD": "hunter2"}, {78}, "EFT_BROKER_PASSWORD"),
        ({"EFT_DATA": str(tmp_path / "file")}, {1, 78}, "EFT_DATA"),
        ({"EFT_DATABASE_URL": "postgres://u:hunter2@127.0.0.1:1/x"}, {1, 75, 78}, "EFT_DATABASE_URL"),
    ]
    asked = []
    for module, arguments in PROGRAMS:
        for variables, _, _ in wrong:
            if module in ("worker", "box.healthy") and ("EFT_DATA" in variables or "postgres" in str(variables)):
                continue  # becomes Celery; asks neither of the API
            if module in ("box.up", "api") and "postgres" in str(variables):
                continue  # waits for the database
            asked.append((module, arguments, {"EFT_DATA": str(tmp_path / "data"), **variables}))
    done = subprocess.run(
        [sys.executable, "-c", ALL, json.dumps(asked)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(HOME)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for module, environment, code, err in json.loads(done.stdout):
        variables = {name: value for name, value in environment.items() if value != str(tmp_path / "data")}
        codes, words = next((codes, words) for given, codes, words in wrong if given == variables)
        assert code in codes and "Traceback" not in err and "hunter2" not in err, (module, variables, code, err)
        assert re.search(rf"{re.escape(words)}(?!_)", err) or module == "box.restore", (module, err)
