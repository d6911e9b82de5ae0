"""No process that answers strangers holds a token that is there for another one."""

from __future__ import annotations

from box import member_environment

GIVEN = {
    "PATH": "/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/home/eft",
    "EFT_DATA": "/srv/eft",
    "EFT_DATABASE_PASSWORD_FILE": "/run/password",
    "PYTHONPATH": "/opt/eft",
    "PGSSLMODE": "require",
    "AWS_REGION": "eu",
    "XDG_RUNTIME_DIR": "/run/user/1",
    "HF_TOKEN": "hf_secret",
    "GITHUB_TOKEN": "ghp_secret",
    "LD_PRELOAD": "/evil.so",
    "WANDB_API_KEY": "secret",
    "HIP_VISIBLE_DEVICES": "0",
}


def test_the_api_gets_what_it_needs() -> None:
    found = member_environment.of("api", GIVEN)
    assert not {"HF_TOKEN", "GITHUB_TOKEN", "LD_PRELOAD", "WANDB_API_KEY", "HIP_VISIBLE_DEVICES"} & found.keys()
    assert {"PATH", "HOME", "EFT_DATA", "EFT_DATABASE_PASSWORD_FILE", "PYTHONPATH", "PGSSLMODE", "AWS_REGION"} <= set(
        found
    )


def test_the_broker_gets_next_to_nothing() -> None:
    assert set(member_environment.of("broker", GIVEN)) == {"PATH", "LC_ALL"}


def test_the_worker_gets_all_of_it() -> None:
    assert member_environment.of("worker", GIVEN) == GIVEN
