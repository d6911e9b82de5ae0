"""The Dockerfiles, without an engine: parsed, linted, and held against what is here.

That their RUN lines work is tried by hand, in a chroot (`python -m deploy.check.chroot`), and by the CI job that builds
them; that their commands work against a real database and broker is tests/e2e/test_images.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML  # 1.2, where `on` is a word

from core import HOME
from core.hardware.tables import wheels
from deploy.check.chroot import Context
from deploy.check.dockerfile import Dockerfile, Malformed, read
from tests.support.official import validator

DEPLOY = HOME / "deploy"
FILES = {name: read(HOME / name) for name in ("Dockerfile", "Dockerfile.rocm", "Dockerfile.cuda")}
IMAGES = [("Dockerfile", "api"), ("Dockerfile", "worker"), ("Dockerfile.rocm", None), ("Dockerfile.cuda", None)]
"""File and stage of each image that is made for use."""
each_image = pytest.mark.parametrize(("name", "stage"), IMAGES, ids=lambda value: value or "last")


def every(file: Dockerfile, stage: str | None, instruction: str) -> list[str]:
    return [one.text for part in file.chain(stage) for one in part.instructions if one.name == instruction]


def test_hadolint_has_nothing_to_say() -> None:
    program = Path(sys.executable).with_name("hadolint")
    files = [*FILES, "deploy/check/Dockerfile.base"]
    done = subprocess.run([program, "--no-color", *files], cwd=HOME, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_bases_are_pinned_and_those_of_the_table() -> None:
    table = {image for build in wheels.BUILDS if (image := build.image)}
    for name, file in FILES.items():
        base = file.arguments["BASE"]
        assert re.search(r":[\w.-]*\d{2}[\w.-]*(@sha256:[0-9a-f]{64})?$", base), f"{name}: {base} may change any day"
        assert all(stage.base in ("${BASE}", *(other.name for other in file.stages)) for stage in file.stages)
        if name != "Dockerfile":
            assert base in table, f"{name}: {base} is not in core/hardware/tables/wheels.py"


@each_image
def test_nobody_is_root_and_somebody_reaps(name: str, stage: str | None) -> None:
    file = FILES[name]
    user, entrypoint = file.effective("USER", stage), file.effective("ENTRYPOINT", stage)
    assert user is not None and user.text == "10001:10001"
    assert entrypoint is not None and entrypoint.words() == ["/usr/bin/tini", "-s", "--"]
    assert any(" tini" in text for text in every(file, stage, "RUN"))
    after = file.stages[[s.name for s in file.stages].index(stage) if stage else -1].instructions
    last_user = max(n for n, one in enumerate(after) if one.name == "USER")
    assert not [one.text for one in after[last_user:] if one.name in ("RUN", "COPY")], "written after USER: not root's"


@each_image
def test_labels_and_health(name: str, stage: str | None) -> None:
    labels = " ".join(every(FILES[name], stage, "LABEL"))
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in labels
    health = FILES[name].effective("HEALTHCHECK", stage)
    assert health is not None
    words = json.loads(health.text.partition("CMD ")[2])
    assert words[:3] == ["python", "-m", "box.healthy"]
    assert words[3:] == {"api": ["api"], "worker": ["worker"], None: ["worker", "--gpu"]}[stage]


@each_image
def test_the_command_is_a_module_that_is_copied(name: str, stage: str | None) -> None:
    command = FILES[name].effective("CMD", stage)
    assert command is not None
    python, flag, module = command.words()
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None
    copied = every(FILES[name], stage, "COPY")
    for package in {module, "box", "core", "migrations"}:
        assert f"{package} ./{package}" in copied


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_exists_and_is_let_in(name: str, tmp_path: Path) -> None:
    context = Context(HOME)
    for stage in FILES[name].stages:
        for one in stage.instructions:
            if one.name == "COPY" and not one.text.startswith("--from="):
                for number, source in enumerate(one.words()[:-1]):
                    folder = tmp_path / f"{stage.name}-{one.line}-{number}"
                    folder.mkdir(parents=True)
                    assert context.copy(source, folder), f"{name}:{one.line}: nothing of {source}"
    found = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert not [path for path in found if path.name in (".venv", "__pycache__", ".git", "tests", ".env", "secrets")]


def test_secrets_and_data_are_never_let_in() -> None:
    context = Context(HOME)
    for path in ("deploy/secrets/database_password", ".env", "deploy/eft.env", ".eft/eft.db", ".git/config"):
        assert not context.leaves(Path(path)), path
    for path in ("core/settings/fields.py", "locks/app.txt", "client/eft/cli.py", "deploy/base_torch.py"):
        assert context.leaves(Path(path)), path


@pytest.mark.parametrize("name", FILES)
def test_pip_installs_by_hash_or_from_this_checkout(name: str) -> None:
    lines = [text for stage in FILES[name].stages for text in every(FILES[name], stage.name or None, "RUN")]
    installs = {
        " ".join(line.split()) for line in lines if "pip" in line and " install " in line and "apt-get" not in line
    }
    assert installs
    for line in installs:
        assert "--no-deps" in line and "--no-cache-dir" in line, line
        assert "--require-hashes" in line or line.endswith(("--no-build-isolation /opt/eft/client",)), line
        for lock in re.findall(r"-r /opt/eft/(\S+)", line):
            pins = (HOME / lock).read_text()
            assert "--hash=sha256:" in pins
            gpu = name != "Dockerfile" and re.search(r"^(torch|triton|pytorch-triton)[=\[ ]", pins, re.MULTILINE)
            assert not gpu, f"{lock} would replace the base's PyTorch"
    api = " ".join(every(FILES["Dockerfile"], "api", "RUN") + every(FILES["Dockerfile"], "build-api", "RUN"))
    assert not re.search(r"-r \S*(torch|app)", api)
    assert not re.search(r"^torch", (HOME / "locks/s3.txt").read_text(), re.MULTILINE)


def test_the_parser_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    for text, words in (
        ("FROM a\nADD x y\n", "ADD is not understood"),
        ("FROM a\nRUN <<EOF\n", "here-documents"),
        ("RUN a\n", "before FROM"),
        ("FROM a \\\n", "ends within"),
        ("# nothing\n", "no FROM"),
    ):
        path.write_text(text)
        with pytest.raises(Malformed, match=words):
            read(path)


def test_the_ci_job_is_one_and_builds_each_file() -> None:
    path = HOME / ".github" / "workflows" / "images.yml"
    assert not list(validator("github-workflows").iter_errors(YAML(typ="safe").load(path)))
    text = path.read_text()
    assert "Dockerfile.$WHICH" in text and "deploy/start.sh cpu --build" in text
    assert all(f"which: {which}" in text for which in ("cuda", "rocm"))


# --- base_torch.py ---------------------------------------------------------------------------------------------


class Base:
    """A made-up base image: an interpreter's environment with a torch, and one of ours beside it."""

    def __init__(self, folder: Path) -> None:
        self.base, self.venv, self.note = folder / "base", folder / "venv", folder / "note.json"
        for environment in (self.base, self.venv):
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        self.bring(self.base, "torch", "2.13.0+rocm10.0", hip="10.0", flags="gfx942 gfx1100")
        self.bring(self.base, "peft", "0.1")  # older than ours, as images have them
        for name in ("transformers", "peft", "safetensors", "accelerate", "pydantic", "sqlalchemy", "celery"):
            self.bring(self.venv, name, "9.9")

    @staticmethod
    def bring(environment: Path, name: str, version: str, hip: str = "", flags: str = "") -> None:
        packages = next(environment.glob("lib/python*/site-packages"))
        shutil.rmtree(packages / name, ignore_errors=True)
        for old in packages.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(
            f"__version__ = {version!r}\nfrom types import SimpleNamespace as N\n"
            f"version = N(hip={hip or None!r}, cuda=None)\n_C = N(_cuda_getArchFlags=lambda: {flags!r})\n"
        )
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{name}/__init__.py,,\n")

    def run(self, environment: Path, *words: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import base_torch as b; from pathlib import Path\n"
            f"b.NOTE, b.VENV = Path({str(self.note)!r}), Path({str(self.venv)!r}); b.main()"
        )
        return subprocess.run(
            [environment / "bin" / "python", "-c", code, *words], capture_output=True, text=True, check=False
        )


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return Base(tmp_path)


def test_the_bases_torch_is_kept_and_our_packages_come_first(base: Base) -> None:
    assert base.run(base.base, "note").returncode == 0
    assert base.run(base.base, "join").returncode == 0
    checked = base.run(base.venv, "check", "--build", "rocm", "--targets", "gfx942,gfx1100")
    assert "torch 2.13.0+rocm10.0 is the base's; kernels for gfx942 gfx1100" in checked.stdout, checked.stderr
    assert "peft 9.9" in checked.stdout
    for words, refusal in (
        (("--build", "cuda"), "is built for rocm, and this image is for cuda"),
        (("--build", "rocm", "--targets", "gfx942 gfx906"), "no kernels for gfx906"),
    ):
        refused = base.run(base.venv, "check", *words)
        assert refused.returncode == 1 and refusal in refused.stderr


def test_a_replaced_torch_fails_the_build(base: Base) -> None:
    base.run(base.base, "note")
    base.bring(base.venv, "torch", "2.13.0")
    joined = base.run(base.base, "join")
    assert joined.returncode == 1 and "pip installed a torch of its own" in joined.stderr
    shutil.rmtree(next(base.venv.glob("lib/*/site-packages/torch")))
    shutil.rmtree(next(base.venv.glob("lib/*/site-packages/torch-*")))
    assert base.run(base.base, "join").returncode == 0
    base.bring(base.base, "torch", "2.14.0", hip="10.1")  # a later layer went at the base itself
    checked = base.run(base.venv, "check", "--build", "rocm")
    assert checked.returncode == 1 and "torch was replaced" in checked.stderr


def test_a_base_without_torch_is_told_so(base: Base) -> None:
    refused = base.run(base.venv, "note")
    assert refused.returncode == 1 and "has no torch" in refused.stderr
