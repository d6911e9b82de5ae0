"""`export: fp8` and `export: gptq`: merge, quantise the linear layers, read with compressed-tensors, compare."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.errors import ModelError
from core.plan.models.shape import Shape
from core.spec.axes.export import FP8, GPTQ, required_retention
from core.tools import pinned
from core.train.base.shards import INDEX_FILE, write_shards
from core.train.export.formats.merged import word
from core.train.export.formats.subject import Subject, Withheld, check_memory
from core.train.export.packed.blocks import one_after_another
from core.train.export.packed.gptq import quantise
from core.train.export.packed.layout import fp8_pieces, group_of, int4_pieces, quantization_config
from core.train.export.retention import Retention, measure
from core.train.model.load import load_model, saved_dtype
from core.train.quant.fill import read_tensors
from core.train.quant.skeleton import skeleton
from core.train.quant.targets import QuantOptions, choose_targets
from core.train.tools.install import ToolFailed, Tools, find

PROGRAM = Path(__file__).parent.parent / "packed" / "read_program.py"
ROWS = 64
"""Most training rows that GPTQ looks at; a row is cut as in training."""

Pieces = dict[str, dict[str, Tensor]]
"""Tensors of quantised layers by layer and last name."""


def write_fp8(item: FP8, subject: Subject, folder: Path) -> dict[str, Any]:
    """Write the format into `folder`, tensor by tensor; what is known of it. Withheld where the library that reads it
    does not find in it what was trained."""
    tools = _tools(subject)
    whole = subject.whole(item.merge_onto)
    dtype = _dtype(subject)
    targets, dense = _targets(whole)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(whole):
            module = name.removesuffix(".weight")
            if module in targets and name != module:
                for last, piece in fp8_pieces(tensor.float(), dtype).items():
                    yield f"{module}.{last}", piece
            else:
                yield name, _narrow(tensor, dtype)

    _write(folder, whole, tensors(), quantization_config("fp8", None, dense), dtype, subject)
    return {"dtype": word(dtype)} | _proven(item, subject, folder, tools)


def write_gptq(item: GPTQ, subject: Subject, folder: Path) -> dict[str, Any]:
    """The same in 4 bits, chosen by GPTQ over training rows."""
    tools = _tools(subject)
    check_memory(subject.model, torch.float32)
    whole = subject.whole(item.merge_onto)
    dtype = _dtype(subject)
    targets, dense = _targets(whole)
    model: Any = load_model(whole, torch.float32)
    path = Shape.of_folder(whole).list_name
    inputs = {name: model.get_submodule(name).in_features for name in targets if name.startswith(f"{path}.")}
    if (group := group_of(set(inputs.values()))) is None:
        # Layers whose inputs no group divides stay as they are.
        inputs = {name: count for name, count in inputs.items() if group_of({count}) is not None}
        group = group_of(set(inputs.values()))
    if not inputs or group is None:
        raise Withheld("no linear layer has a number of inputs that groups of 32 divide; take `fp8` instead")
    dense = sorted({*dense, *(targets - inputs.keys())})
    pieces: Pieces = {}

    def visit(name: str, block: Any, products: dict[str, Tensor]) -> None:
        for local, product in products.items():
            weight = block.get_submodule(local).weight
            subject.between()
            q, scales = quantise(weight.detach(), product, group, dtype)
            pieces[f"{name}.{local}"] = int4_pieces(q, scales, dtype)
            weight.copy_((q * scales.repeat_interleave(group, 1)).to(dtype))  # as it will be read

    one_after_another(model, path, subject.calibration[:ROWS], set(inputs), visit, subject.between)
    del model
    if missed := sorted(inputs.keys() - pieces.keys()):
        raise Withheld(f"no row of the calibration reaches {missed[0]}, so it cannot be quantised; take `fp8` instead")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(whole):
            module = name.removesuffix(".weight")
            if module in pieces and name != module:
                for last, piece in pieces.pop(module).items():
                    yield f"{module}.{last}", piece
            else:
                yield name, _narrow(tensor, dtype)

    _write(folder, whole, tensors(), quantization_config("gptq", group, dense), dtype, subject)
    about = {"bits": 4, "group_size": group, "calibration_rows": len(subject.calibration[:ROWS])}
    return {"dtype": word(dtype)} | about | _proven(item, subject, folder, tools)


def _tools(subject: Subject) -> Tools:
    tools = find("compressed", subject.cache_dir)
    if tools is None:
        raise Withheld(
            "the library that reads this format is not on this machine, although the model was prepared; submit the "
            "job again"
        )
    return tools


def _dtype(subject: Subject) -> torch.dtype:
    return torch.float16 if saved_dtype(subject.model_dir) is torch.float16 else torch.bfloat16


def _narrow(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _targets(whole: Path) -> tuple[set[str], list[str]]:
    """Linear layers that are quantised, and those that stay dense (the output head)."""
    try:
        model, _ = skeleton(whole, torch.float32)
        model.tie_weights()
        targets, kept = choose_targets(model, QuantOptions())
    except ModelError as error:
        raise Withheld(error.message) from error
    return targets, sorted(kept)


def _write(
    folder: Path,
    whole: Path,
    tensors: Iterator[tuple[str, Tensor]],
    about: dict[str, Any],
    dtype: torch.dtype,
    subject: Subject,
) -> None:
    folder.mkdir(parents=True)
    write_shards(tensors, folder, subject.between)
    for path in whole.iterdir():
        if (
            path.is_file()
            and path.suffix != ".safetensors"
            and path.name not in ("config.json", INDEX_FILE, "README.md")
        ):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((whole / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": str(dtype).removeprefix("torch."), "quantization_config": about}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _proven(item: FP8 | GPTQ, subject: Subject, folder: Path, tools: Tools) -> dict[str, Any]:
    tuned, base = subject.logits(item.merge_onto)
    found = measure(
        tuned,
        base,
        read_logits(folder, subject, tools),
        rows=len(subject.rows),
        rows_of=subject.rows_of,
        required=required_retention(item),
        reader=reader(),
    )
    if fault := found.fault():
        raise Withheld(
            f"in {item.type} {fault}; {_way(found)}", retention=found, kept_apart=found.kl_exported is not None
        )
    return {"retention": found.as_dict()}


def _way(found: Retention) -> str:
    if found.kl_exported is None:
        return "its weights are beyond the range of 16 bits"
    return "take a format with more bits per weight, or set `min_retention`"


def read_logits(folder: Path, subject: Subject, tools: Tools) -> Tensor:
    """Logits of the subject's rows, [positions, vocabulary] float32, as compressed-tensors reads the folder. Withheld
    where it does not."""
    with tempfile.TemporaryDirectory(dir=subject.artifacts, prefix=".proof-") as work:
        asked, logits = Path(work) / "rows.json", Path(work) / "logits.npy"
        asked.write_text(json.dumps([row.tolist() for row in subject.rows]), encoding="utf-8")
        try:
            tools.run(PROGRAM, str(folder), str(asked), str(logits), between=subject.between)
        except ToolFailed as error:
            raise Withheld(f"compressed-tensors does not read it: {error}") from error
        return torch.from_numpy(np.load(logits))


def reader() -> str:
    """The library that reads the folders, with its version."""
    return f"compressed-tensors {pinned('compressed', 'compressed-tensors')}"
