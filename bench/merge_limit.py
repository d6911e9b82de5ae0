"""A merge of a model that is twice as large as the memory that is left: `python -m bench.merge_limit [--model DIR]`.

Each merge runs in a process of its own, which joins a control group of the kernel once everything is imported. The
group leaves half of the bytes of the model's files, page cache included. Run as root, where memory groups can be made.
In turn: eft's merge (`write_merged_model`) without a limit, and in the group; and by hand in the group, which is PEFT's
`merge_and_unload` and `save_pretrained`. eft's files must be the same to the bit. The last line is one JSON object; the
exit code is 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import wheel
from bench.report import hardware

ROOT = Path(__file__).resolve().parent.parent
GROUPS = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max"),
)
"""Where the kernel shows memory groups (version 1, version 2), and the names of their limits."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    model = asked.model or wheel.model()
    if asked.side:
        merge(asked.side, model, asked.work / "adapter", asked.into, asked.group)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = in_half(model, Path(folder))
    print(json.dumps(found, sort_keys=True))
    return int(not found["same_files"])


def in_half(model: Path, work: Path) -> dict[str, Any]:
    """What became of the merges; a line for each is printed."""
    from core.base.files import sha256

    made = subprocess.run(
        [sys.executable, "-c", ADAPTER, str(model), str(work / "adapter")], cwd=ROOT, capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(made.stderr)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    found: dict[str, Any] = {"model_bytes": size, "limit_bytes": size // 2, "hardware": hardware()}
    hashes = {}
    with limited(size // 2) as group:
        for name, side, inside in (("free", "ours", None), ("limited", "ours", group), ("by hand", "peer", group)):
            command = [sys.executable, "-m", "bench.merge_limit", "--model", model, "--side", side, "--work", work]
            command += ["--into", work / name] + ([] if inside is None else ["--group", inside])
            done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
            files = sorted((work / name).glob("*.safetensors")) if done.returncode == 0 else []
            hashes[name] = [(file.name, sha256(file)) for file in files]
            found[name] = "merged" if files else ended(done)
            where = "without a limit" if inside is None else f"in {size / 2e6:.0f} MB"
            print(f"merge of {size / 1e6:.0f} MB, {side}, {where}: {found[name]}", flush=True)
    found["same_files"] = bool(hashes["limited"]) and hashes["limited"] == hashes["free"]
    return found


def ended(done: subprocess.CompletedProcess[str]) -> str:
    """-9 is the kernel's word for a group without memory."""
    return "killed by the kernel" if done.returncode == -9 else f"exit code {done.returncode}: {done.stderr[-300:]}"


ADAPTER = """
import sys, torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from core.train.model.load import load_model, saved_dtype
model = load_model(Path(sys.argv[1]), saved_dtype(Path(sys.argv[1])))
torch.manual_seed(0)
config = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
get_peft_model(model, config).save_pretrained(sys.argv[2])
"""


@contextmanager
def limited(limit: int) -> Iterator[Path]:
    """A memory group of so many bytes, swap included."""
    for root, of_memory, of_swap in GROUPS:
        group = root / f"eft-bench-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / of_memory).exists():
                (group / of_memory).write_text(str(limit))
                if (group / of_swap).exists():
                    (group / of_swap).write_text("0" if of_swap == "memory.swap.max" else str(limit))
                yield group
                return
        finally:
            group.rmdir()
    raise SystemExit("no memory group can be made here: run it as root, where the kernel shows them writable")


def merge(side: str, model: Path, adapter: Path, into: Path, group: Path | None) -> None:
    """In a process of its own."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from core.train.export.merge_first import write_merged_model
    from core.train.model.load import saved_dtype

    torch.set_num_threads(1)
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    if side == "ours":
        write_merged_model(model, adapter, None, into)
        return
    over: Any = AutoModelForCausalLM.from_pretrained(model, dtype=saved_dtype(model))
    PeftModel.from_pretrained(over, str(adapter)).merge_and_unload().save_pretrained(into)


if __name__ == "__main__":
    sys.exit(main())
