"""The sources of discovery one by one: programs that misbehave, permissions in words, the forms of the tools' JSON."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest

from core.hardware.discover import Gpu, discover
from core.hardware.sources import access, kfd, nvidia, rocm, tools
from core.hardware.tables import determinism, wheels
from core.hardware.tables.arch import ROWS
from tests.support.hardware import unpack


def program(folder: Path, name: str, script: str) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# --- programs that misbehave -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("echo '[]'", 0, None),
        ("echo broken >&2; exit 3", 3, "`smi -x` failed: broken"),
        ("exit 1", 1, "`smi -x` failed: exit status 1"),
        ("kill -SEGV $$", -11, "`smi -x` failed: exit status -11"),
        ("sleep 60 & echo half; sleep 60", None, "`smi -x` did not answer within 0 s and was killed"),
        ("exec /bin/cat /dev/zero", None, "`smi -x` did not end its output within 4 MiB and was killed"),
    ],
    ids=["well", "exit 3", "exit 1", "crash", "hang", "flood"],
)
def test_asking_a_program(tmp_path: Path, script: str, status: int | None, words: str | None) -> None:
    began = time.monotonic()
    seconds = 0.4 if "sleep" in script else 20.0
    answer = tools.ask(program(tmp_path, "smi", script), ["-x"], {"PATH": os.defpath}, seconds)
    assert (answer.failed, answer.status) == (words, status)
    assert time.monotonic() - began < 19


def test_what_a_hanging_program_started_goes_with_it(tmp_path: Path) -> None:
    """A pipe ends when the last one has gone that could write into it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    smi = program(tmp_path, "smi", f"( echo begun; exec sleep 900 ) > {pipe} & sleep 900")
    reader, said, seconds = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), b"", 0.2
    while b"begun" not in said:  # on a busy machine the program may be killed before it has come so far
        assert seconds < 120
        tools.ask(smi, [], {"PATH": os.defpath}, seconds)
        if select.select([reader], [], [], 0)[0]:
            said = os.read(reader, 100)
        seconds *= 2
    assert select.select([reader], [], [], 120)[0] and os.read(reader, 100) == b""
    os.close(reader)


def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "smi"
    path.write_bytes(b"\x7fELF\x02nonsense")
    path.chmod(0o755)
    answer = tools.ask(str(path), [], {})
    assert answer.failed is not None and answer.failed.startswith("smi cannot be run: Exec format error")


@pytest.mark.parametrize(
    ("output", "value"),
    [
        ('[{"gpu": 0}]\n', [{"gpu": 0}]),
        ('WARNING: user is in no group [render]\n\n{"card0": {}}\ntrailing', {"card0": {}}),
        ("[not json\n[1]\n", [1]),
        ("", None),
        ("\x00\xff[[[[", None),
        ("[" * 200_000, None),
    ],
)
def test_json_among_other_words(output: str, value: object) -> None:
    found, why = tools.as_json(tools.ToolOutput(("smi", "-j"), output, None, 0))
    assert found == value and (why is None) is (value is not None)
    if why is not None:
        assert why.startswith("`smi -j` did not answer in JSON")


def test_a_tool_that_hangs_is_a_notice_and_is_asked_once(tmp_path: Path) -> None:
    root = unpack("mi300x", tmp_path)
    asked = tmp_path / "asked"
    for name in ("amd-smi", "nvidia-smi"):
        program(root / "bin", name, f'echo "{name} $*" >> {asked}; exec sleep 60')
    path, names = f"{root / 'bin'}:{os.defpath}", list[str]()
    for seconds in (1, 4, 16, 64):  # each has to come as far as its first line, which takes longer on a busy machine
        asked.write_text("")
        box = discover(root / "sys", {"PATH": path}, seconds=float(seconds))
        assert [gpu.arch for gpu in box.gpus] == ["gfx942"]
        words = f"did not answer within {seconds} s and was killed"
        assert len(box.notes) == 2 and all(words in note for note in box.notes)
        names = [line.split()[0] for line in asked.read_text().splitlines()]
        if len(names) >= 2:
            break
    assert names == ["amd-smi", "nvidia-smi"]


# --- permissions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "group", "groups", "inside", "words"),
    [
        (0o660, 64993, (0,), True, "--device /dev/kfd --device /dev/dri --group-add 64993`"),
        (0o660, 64993, (0,), False, "`sudo groupadd -g 64993 render`"),
        (0o660, 0, (5,), False, "the group root (0) is missing; `sudo usermod -aG root "),
        (0o660, 0, (5,), True, "the container lacks the group root (0); start it with"),
        (0o600, 0, (0,), False, "by any group (mode 600)"),
        (0o660, 7, (7, 9), True, "although this process is in its group"),
    ],
)
def test_why_a_device_may_not_be_opened(
    mode: int, group: int, groups: tuple[int, ...], inside: bool, words: str
) -> None:
    assert words in access.explain(mode, group, groups, inside=inside)


@pytest.mark.parametrize(
    ("file", "environ", "expected"),
    [
        (None, {}, False),
        (".dockerenv", {}, True),
        ("run/.containerenv", {}, True),
        (None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
        (None, {"container": "lxc"}, True),
    ],
)
def test_whether_this_is_a_container(tmp_path: Path, file: str | None, environ: dict[str, str], expected: bool) -> None:
    if file is not None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert access.contained(tmp_path, environ) is expected
    why = access.refusal(tmp_path / "dev/kfd", tmp_path, environ)
    assert why is not None and why.startswith("is not in this container" if expected else "is missing")


# --- forms of the tools' JSON ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ({"value": 196592, "unit": "MB"}, 196592 << 20),
        ({"value": "24", "unit": "GB"}, 24 << 30),
        ("24560 MB", 24560 << 20),
        (25753026560, 25753026560),
        ("N/A", 0),
        ({"value": "N/A", "unit": "MB"}, 0),
        ({"value": 5, "unit": "apples"}, 0),
        (None, 0),
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert rocm._bytes(value) == size


@pytest.mark.parametrize(
    ("value", "arch"),
    [
        ("gfx942", "gfx942"),
        ("gfx9010", "gfx90a"),
        ("gfx90402", "gfx942"),
        ("GFX1100", "gfx1100"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx1300", "gfx1300"),
        ("N/A", ""),
        (None, ""),
        (942, ""),
    ],
)
def test_architectures_as_tools_spell_them(value: object, arch: str) -> None:
    assert rocm._arch(value) == arch


USE = {
    rocm.LIST: '[{"gpu": 0, "bdf": "0000:03:00.0"}, {"gpu": 1, "bdf": "0000:83:00.0"}, {"gpu": 2, "bdf": "N/A"}]',
    rocm.METRIC: '{"gpu_data": [{"gpu": 0, "mem_usage": {"used_vram": {"value": 2531, "unit": "MB"}}}, {"gpu": 1}]}',
    rocm.PROCESS: """[
      {"gpu": 0, "process_list": [
        {"process_info": {"name": "a", "pid": 11, "memory_usage": {"vram_mem": {"value": 3, "unit": "MB"}}}},
        {"process_info": {"name": "b", "pid": 12, "mem_usage": {"value": 2353860608, "unit": "B"}}},
        {"process_info": {"name": "c", "pid": "N/A"}}, 7]},
      {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]}]""",
}


def test_use_as_amd_smi_tells_it(tmp_path: Path) -> None:
    arms = "\n".join(f"\"{' '.join(command)}\") echo '{said}';;" for command, said in USE.items())
    program(tmp_path / "bin", "amd-smi", f'case "$*" in\n{arms}\nesac')
    use, why = rocm.usage({"PATH": str(tmp_path / "bin")}, tmp_path, 10)
    assert why is None
    assert use == {
        "0000:03:00.0": kfd.ProcessUsage(2531 << 20, {11: 3 << 20, 12: 2353860608}),
        "0000:83:00.0": kfd.ProcessUsage(None, {}),
    }
    assert rocm.usage({"PATH": "/nowhere"}, tmp_path, 10) == ({}, None)


def test_use_as_nvidia_smi_tells_it(tmp_path: Path) -> None:
    script = f"""case "$*" in
"{" ".join(nvidia.USED_QUERY)}") echo "GPU-1, 1024"; echo "GPU-2, [N/A]";;
"{" ".join(nvidia.APPS_QUERY)}") echo "GPU-1, 77, 900"; echo "MIG-9, 78, [N/A]"; echo nonsense;;
esac"""
    program(tmp_path / "bin", "nvidia-smi", script)
    use, why = nvidia.usage({"PATH": str(tmp_path / "bin")}, tmp_path, 10)
    assert why is None
    assert use == {"GPU-1": kfd.ProcessUsage(1 << 30, {77: 900 << 20}), "MIG-9": kfd.ProcessUsage(None, {78: 0})}


def test_use_as_the_kernel_tells_it(tmp_path: Path) -> None:
    root = unpack("mi300x", tmp_path)
    (gpu,) = discover(root / "sys", {}).gpus
    assert kfd.processes(gpu, root / "sys") is None, "no such folder in this recording"
    folder = root / "sys" / kfd.PROCESSES
    for pid, files in {"17": {"vram_47045": "4096"}, "18": {"vram_47045": "0", "vram_9": "5"}, "19": {}}.items():
        (folder / pid).mkdir(parents=True)
        for name, text in files.items():
            (folder / pid / name).write_text(text)
    assert kfd.processes(gpu, root / "sys") == {17: 4096}
    assert kfd.used_bytes(gpu, root / "sys") == 297795584
    part = discover(unpack("mi300x-cpx", tmp_path / "cpx") / "sys", {}).gpus[0]
    assert kfd.used_bytes(part, tmp_path / "cpx/sys") is None, "the file is the whole card's"


# --- builds of PyTorch, determinism ----------------------------------------------------------------------


def test_every_architecture_has_a_row_of_builds() -> None:
    assert sorted(arch for build in wheels.BUILDS for arch in build.arches) == sorted(row.arch for row in ROWS)
    for build in wheels.BUILDS:
        assert build.sources and all(source.startswith("https://") for source in build.sources)
        assert build.index.startswith("https://") or build.note
    build = wheels.lookup("gfx1031")
    assert build is not None
    assert build.install("gfx1031") == (
        "pip install 'torch[device-gfx1031]' --index-url https://repo.amd.com/rocm/whl-multi-arch/"
    )


@pytest.mark.parametrize(
    ("arch", "built_for", "fits"),
    [
        ("gfx906", "ROCm 7.2", False),
        ("gfx906", "ROCm 6.3", True),
        ("gfx942", "ROCm 7.2", True),
        ("sm_70", "CUDA 13.0", False),
        ("sm_70", "CUDA 12.6", True),
        ("sm_75", "CUDA 13.2", True),
        ("sm_70", "CPU", True),  # another fault, told elsewhere
    ],
)
def test_builds_without_kernels_for_a_card(arch: str, built_for: str, fits: bool) -> None:
    assert (wheels.misfit(arch, built_for) is None) is fits


def card(vendor: str, arch: str) -> Gpu:
    return Gpu(0, "amd" if vendor == "amd" else "nvidia", f"GPU-{arch}", "0000:03:00.0", "a card", arch, 1 << 35)


@pytest.mark.parametrize(
    ("gpus", "kind", "reasons"),
    [
        ([], determinism.EXACT, 1),
        ([card("nvidia", "sm_90")] * 2, determinism.REPEATABLE, 1),
        ([card("nvidia", "sm_80"), card("nvidia", "sm_75")], determinism.BEST_EFFORT, 1),
        ([card("amd", "gfx942")], determinism.BEST_EFFORT, 1),
        ([card("amd", "gfx942"), card("nvidia", "sm_90")], determinism.BEST_EFFORT, 2),
    ],
)
def test_one_class_a_box(gpus: list[Gpu], kind: determinism.DeterminismClass, reasons: int) -> None:
    found, why = determinism.classify(gpus)
    assert found is kind and len(why) == reasons
