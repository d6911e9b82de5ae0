"""Files on their way: downloads that go on, damage that does not arrive, uploads that need no memory."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eft import DownloadError
from eft.archive import save

from core.jobs.lifecycle.finish import Succeeded
from tests.support.client import Cutter, client, eft, environment


@pytest.fixture
def cutter(api: Any) -> Iterator[Cutter]:
    proxy = Cutter(api.url)
    yield proxy
    proxy.close()


BLOB = b"".join(hashlib.sha256(str(n).encode()).digest() for n in range(40_000))  # 1.28 MB that does not compress
SMALL = b'{"r": 8}\n'


@pytest.fixture(scope="module")
def done(api: Any) -> tuple[str, Path]:
    """A finished job with artifacts, and where they lie on the server."""
    job_id, token = api.start_job()
    folder = api.layout.artifacts(job_id, token.attempt)
    listed = []
    for path, data in {
        "adapter/weights.safetensors": BLOB,
        "adapter/adapter_config.json": SMALL,
        "a b ü.txt": b"",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        listed.append({"path": path, "kind": "adapter", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    api.end(token, Succeeded({}, listed))
    return job_id, folder


def part_of(folder: Path) -> Path:
    return folder / "adapter" / f".weights.safetensors.{hashlib.sha256(BLOB).hexdigest()[:12]}.part"


def test_download_all_and_some(api: Any, done: tuple[str, Path], tmp_path: Path) -> None:
    job_id, _ = done
    first = eft(api, "download", job_id, "-o", str(tmp_path / "all"), "--json")
    assert first.returncode == 0, first.stderr
    names = sorted(str(p.relative_to(tmp_path / "all")) for p in (tmp_path / "all").rglob("*") if p.is_file())
    assert names == ["a b ü.txt", "adapter/adapter_config.json", "adapter/weights.safetensors"]
    assert (tmp_path / "all" / "adapter" / "weights.safetensors").read_bytes() == BLOB
    assert {f["sha256"] for f in json.loads(first.stdout)["files"]} >= {hashlib.sha256(BLOB).hexdigest()}
    some = eft(api, "download", job_id, "adapter/adapter_config.json", "-o", str(tmp_path / "some"))
    assert some.stdout.splitlines() == [str(tmp_path / "some" / "adapter" / "adapter_config.json")]
    assert eft(api, "download", job_id, "nothing").returncode == 2


@pytest.mark.parametrize("left", ["half", "garbage", "too long", "whole"])
def test_a_download_goes_on_where_it_broke_off(api: Any, done: tuple[str, Path], tmp_path: Path, left: str) -> None:
    job_id, _ = done
    parts = {"half": BLOB[:700_001], "garbage": b"x" * 700_001, "too long": BLOB + b"x", "whole": BLOB}
    part_of(tmp_path).parent.mkdir()
    part_of(tmp_path).write_bytes(parts[left])
    logged = len(api.log())
    counted: list[int] = []
    with client(api) as here:
        here.download(job_id, into=tmp_path, advance=counted.append)
    assert (tmp_path / "adapter" / "weights.safetensors").read_bytes() == BLOB
    assert not part_of(tmp_path).exists()
    assert sum(counted) == len(BLOB) + len(SMALL)
    gets = re.findall(r"GET \S+/weights\.safetensors (\d+)", api.log()[logged:])
    assert gets == {"half": ["206"], "garbage": ["206", "200"], "too long": ["200"], "whole": []}[left]


def test_a_download_over_a_bad_line(api: Any, done: tuple[str, Path], tmp_path: Path, cutter: Cutter) -> None:
    job_id, _ = done
    with client(api, cutter.url) as here:
        artifacts = here.artifacts(job_id)
        here.close()
    cutter.cuts = [200_000, 0, 400_000, 10, 500_000]
    with client(api, cutter.url) as here:
        here.download(job_id, artifacts, into=tmp_path)
    assert (tmp_path / "adapter" / "weights.safetensors").read_bytes() == BLOB and cutter.cuts == []


def test_a_damaged_file_does_not_arrive(api: Any, done: tuple[str, Path], tmp_path: Path) -> None:
    job_id, folder = done
    stored = folder / "adapter" / "weights.safetensors"
    try:
        stored.write_bytes(BLOB[:-1] + bytes([BLOB[-1] ^ 1]))
        failed = eft(api, "download", job_id, "adapter/weights.safetensors", "-o", str(tmp_path))
    finally:
        stored.write_bytes(BLOB)
    assert failed.returncode == 7 and "SHA-256" in failed.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    with client(api) as here, pytest.raises(DownloadError):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "adapter").symlink_to("/tmp")
        here.download(job_id, into=tmp_path / "out")


def test_an_upload_never_lies_in_memory(api: Any, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    with big.open("w") as stream:
        for number in range(1500):
            stream.write(json.dumps({"text": f"{number} " + "x" * 32_000}) + "\n")
    program = (
        "import sys; from eft import Client\n"
        # its ru_maxrss would begin with what pytest has in memory
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) // 1024\n"
        "with Client() as client:\n"
        "    client.jobs(limit=1); before = peak(); file = client.upload(sys.argv[1])\n"
        "    print(file.rows, peak() - before)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, big], env=environment(api), capture_output=True, text=True, check=True
    )
    rows, grown = map(int, ran.stdout.split())
    assert rows == 1500 and grown < 16, f"{grown} MiB more for a file of {big.stat().st_size >> 20} MiB"


def test_a_project_is_exported_whole_or_not_at_all(api: Any, done: tuple[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "lab.tar"
    first = eft(api, "project", "export", "lab", "--out", str(target), "--json")
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert (told["path"], told["bytes"]) == (str(target), target.stat().st_size)
    assert not [name for name in told["missing"] if done[0] in name], "other tests' jobs may lack files"
    whole = target.read_bytes()
    assert BLOB in whole and SMALL in whole
    with pytest.raises(DownloadError, match="broke off"):
        save([whole[: len(whole) // 2]], tmp_path / "half.tar")
    at = whole.index(SMALL)
    with pytest.raises(DownloadError, match="is damaged: "):
        save([whole[:at], b"x", whole[at + 1 :]], tmp_path / "changed.tar")
    assert not (tmp_path / "half.tar").exists() and not (tmp_path / "changed.tar").exists()
