"""docker-compose.yml against the official schema, our settings and our images; and deploy/start.sh, run for real with
a `docker` on the PATH that only writes down what it is asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from box.systemd import units
from core import HOME
from core.settings import Settings
from deploy.check.dockerfile import read
from tests.support.compose import COMPOSE, INTERPOLATED, PATH, SERVICES, TEXT, default
from tests.support.official import validator

OURS = [name for name in SERVICES if name not in ("database", "broker")]
WORKERS = [name for name in SERVICES if name.startswith("worker-")]
COMPOSES_OWN = {
    "EFT_SHM_SIZE", "EFT_STOP_GRACE_PERIOD", "EFT_DATA_ROOT", "EFT_PUBLISH", "EFT_RENDER_GID", "EFT_VIDEO_GID",
    "EFT_POSTGRES_IMAGE", "EFT_VALKEY_IMAGE", "EFT_API_IMAGE", "EFT_ROCM_IMAGE", "EFT_CUDA_IMAGE", "EFT_CPU_IMAGE",
    "EFT_ROCM_BASE", "EFT_CUDA_BASE", "EFT_GFX_TARGETS", "EFT_SM_TARGETS",
}  # fmt: skip
"""Variables of .env that are no settings of eft; docs/containers.md has a row for each."""


def seconds(text: str) -> float:
    assert text.endswith("s"), text
    return float(text.removesuffix("s"))


def test_it_fits_the_official_schema() -> None:
    errors = [
        f"{'/'.join(map(str, error.path))}: {error.message}" for error in validator("compose-spec").iter_errors(COMPOSE)
    ]
    assert not errors


def test_every_setting_in_it_is_one() -> None:
    known = {f"EFT_{name.upper()}" for name in Settings.model_fields}
    known |= {f"{name}_FILE" for name in known}
    for name in OURS:
        assert set(SERVICES[name]["environment"]) <= known, name
    outside = {match[1] for match in INTERPOLATED.finditer(TEXT)}
    assert outside - known == COMPOSES_OWN


def test_every_variable_has_a_default_and_a_row_in_the_page() -> None:
    page = (HOME / "docs" / "containers.md").read_text(encoding="utf-8")
    for match in INTERPOLATED.finditer(TEXT):
        assert match[2] and match[2].startswith(":-"), f"{match[0]} would be empty, or stop the other profiles"
        assert f"`{match[1]}`" in page, f"{match[1]} is not in docs/containers.md"


def test_there_is_no_password_in_it() -> None:
    assert set(COMPOSE["secrets"]) == {"database_password", "broker_password"}
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if "PASSWORD" in variable:
                assert variable.endswith("_FILE") and value.removeprefix("/run/secrets/") in service["secrets"], name
            assert not re.search(r"://[^/@]*:[^/@]*@", str(value)), f"{name}: a password in {variable}"
    assert subprocess.run(["git", "ls-files", "deploy/secrets"], cwd=HOME, capture_output=True).stdout == b""


def test_order_is_by_health() -> None:
    for name in OURS:
        for other, how in SERVICES[name]["depends_on"].items():
            once = SERVICES[other].get("restart") == "no"
            assert how["condition"] == ("service_completed_successfully" if once else "service_healthy")
    assert set(SERVICES["api"]["depends_on"]) == {"database", "broker", "migrate"}
    assert SERVICES["migrate"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    for name in ("database", "broker"):
        assert SERVICES[name]["healthcheck"]["test"], "others wait for it"
    for name in WORKERS:
        assert set(SERVICES[name]["depends_on"]) == {"broker", "migrate", "api"}


def test_profiles_and_what_each_is_given() -> None:
    assert {name: SERVICES[name]["profiles"] for name in WORKERS} == {
        "worker-rocm": ["rocm"], "worker-cuda": ["cuda"], "worker-cpu": ["cpu"],
    }  # fmt: skip
    assert not [name for name in SERVICES if name not in WORKERS and "profiles" in SERVICES[name]]
    rocm, cuda = SERVICES["worker-rocm"], SERVICES["worker-cuda"]
    assert rocm["devices"] == ["/dev/kfd", "/dev/dri"]
    assert [default(group).isdecimal() for group in rocm["group_add"]] == [True, True], "names mean others inside"
    assert cuda["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    for name in WORKERS:
        service = SERVICES[name]
        assert service["ulimits"]["memlock"] == -1
        assert default(service["shm_size"]) == "8gb"
        assert "init" not in service, "the image brings tini"
    assert len({default(SERVICES[name]["environment"]["EFT_NODE"]) for name in WORKERS}) == len(WORKERS)


def test_a_worker_is_given_the_time_that_its_checkpoints_take() -> None:
    for name in WORKERS:
        service = SERVICES[name]
        grace = float(default(service["environment"]["EFT_STOP_GRACE_SECONDS"]))
        assert grace == Settings.model_fields["stop_grace_seconds"].default
        assert seconds(default(service["stop_grace_period"])) >= units.stop_seconds("worker", grace)
    assert seconds(SERVICES["api"]["stop_grace_period"]) > 10, "what the API gives to open requests"


def test_only_the_api_can_be_reached_and_only_from_this_box() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["api"]
    assert default(SERVICES["api"]["ports"][0]) == "127.0.0.1:8321:8321"
    assert COMPOSE["networks"]["inside"]["internal"] is True
    for name in ("database", "broker", "migrate"):
        assert SERVICES[name]["networks"] == ["inside"]


def test_ours_are_confined() -> None:
    for name in OURS:
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "user", "pid", "ipc", "network_mode"} & set(SERVICES[name])
    assert SERVICES["api"]["read_only"] is True


def test_images_are_pinned_and_ours_are_what_the_dockerfiles_make() -> None:
    for name in ("database", "broker"):
        assert re.search(r":\d+\.\d+(\.\d+)?$", default(SERVICES[name]["image"])), name
    for name in OURS:
        build = SERVICES[name]["build"]
        file = read(PATH.parent / build["context"] / build.get("dockerfile", "Dockerfile"))
        command = file.effective("CMD", build.get("target"))
        assert command is not None
        if name != "migrate":
            assert SERVICES[name]["command"] == command.words(), "as the image has it"
        for argument, value in build.get("args", {}).items():
            there = file.arguments | {
                key: text
                for one in file.stages[-1].instructions
                if one.name == "ARG"
                for key, text in one.pairs({}).items()
            }
            assert there[argument] == default(value), argument


# --- start.sh ------------------------------------------------------------------------------------------------


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    """A checkout with the files of a deployment, and a `docker` that writes down its arguments."""
    checkout = tmp_path / "checkout"
    (checkout / "deploy").mkdir(parents=True)
    for name in ("docker-compose.yml", "deploy/start.sh"):
        shutil.copy(HOME / name, checkout / name)
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/asked\nprintf "%s\\n" "$PWD" >> {tmp_path}/where\n'
    )
    docker.chmod(0o755)
    return checkout


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{folder.parent / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        [folder / "deploy/start.sh", *words], env=environment, capture_output=True, text=True, check=False, umask=0o077
    )


def test_one_command_makes_secrets_and_starts(deployed: Path) -> None:
    done = start(deployed, "cpu", "--build")
    assert done.returncode == 0, done.stderr
    secrets = sorted((deployed / "deploy/secrets").iterdir())
    assert [path.name for path in secrets] == ["broker_password", "database_password"]
    assert (deployed / "deploy/secrets").stat().st_mode & 0o777 == 0o700, "nobody else on this box comes to the files"
    texts = [path.read_text() for path in secrets]
    assert len(set(texts)) == 2 and all(re.fullmatch(r"[A-Za-z0-9]{32,}", text) for text in texts)
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o644}, "the container's user reads them"
    assert "COMPOSE_PROFILES=cpu" in (deployed / ".env").read_text()
    asked = (deployed.parent / "asked").read_text().splitlines()
    assert asked[:2] == ["compose version", "compose --profile cpu up --detach --build"]
    assert "api.auth.keys create" in asked[2]
    # Compose finds docker-compose.yml and docker-compose.override.yml in the folder where it is called, unless --file
    # names others. So a person who calls it there asks about the same project.
    assert not [line for line in asked if "--file" in line or " -f " in line]
    assert set((deployed.parent / "where").read_text().splitlines()) == {str(deployed)}

    (deployed / ".env").write_text("EFT_NODE=mine\n")
    assert start(deployed, "cpu").returncode == 0
    assert [path.read_text() for path in secrets] == texts and (deployed / ".env").read_text() == "EFT_NODE=mine\n"


def test_what_an_older_checkout_kept_in_deploy_is_moved_and_counts(deployed: Path) -> None:
    (deployed / "deploy" / ".env").write_text("EFT_DATA_ROOT=/srv/eft\n")
    done = start(deployed, "cpu")
    assert done.returncode == 0 and "moved deploy/.env to .env" in done.stdout
    assert (deployed / ".env").read_text() == "EFT_DATA_ROOT=/srv/eft\n" and not (deployed / "deploy" / ".env").exists()


def test_without_an_engine_nothing_is_made(deployed: Path) -> None:
    (deployed.parent / "bin/docker").write_text("#!/bin/sh\nexit 1\n")
    done = start(deployed, "cpu")
    assert done.returncode == 1 and "Docker Engine with compose" in done.stderr
    assert not (deployed / "deploy/secrets").exists()


def test_a_wrong_profile_starts_nothing(deployed: Path) -> None:
    done = start(deployed, "gpu")
    assert done.returncode == 2 and "usage" in done.stderr
    assert not (deployed / "deploy/secrets").exists() and not (deployed.parent / "asked").exists()
