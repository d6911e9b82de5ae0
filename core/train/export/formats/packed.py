"""`export: fp8`, `gptq`, `awq`, `mxfp4`, `torchao_int8` and `torchao_int4`: merge, quantise the linear layers, read
with the library that people read such folders with, compare."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from core.errors import ModelError
from core.plan.models.shape import Shape
from core.spec.axes.export import AWQ, FP8, GPTQ, MXFP4, PackedExport, TorchAOInt4, TorchAOInt8, required_retention
from core.spec.axes.quantization import QAT
from core.train.base.shards import INDEX_FILE, write_shards
from core.train.export.formats.merged import word
from core.train.export.formats.subject import Subject, Withheld, check_memory
from core.train.export.packed import layout, torchao
from core.train.export.packed.awq import quantise_block
from core.train.export.packed.blocks import one_after_another
from core.train.export.packed.gptq import quantise
from core.train.export.packed.layout import group_of
from core.train.export.packed.readers import Reader, reader_of
from core.train.export.retention import Retention, measure
from core.train.methods.qat import choose_layers, grid_of
from core.train.model.load import load_model, saved_dtype
from core.train.quant.fill import read_tensors, weight_files
from core.train.quant.skeleton import skeleton
from core.train.quant.targets import QuantOptions, choose_targets
from core.train.tools.install import ToolFailed, Tools, find

PROGRAM = Path(__file__).parent.parent / "packed" / "read_program.py"
ROWS = 64
"""Most training rows that GPTQ and AWQ look at; a row is cut as in training."""

_EIGHT_BITS = "`fp8` or `torchao_int8`"
Chosen = tuple[set[str], dict[str, str]]
"""Layers that are quantised, and others with the reason."""
Pieces = dict[str, dict[str, Tensor]]
"""Tensors of quantised layers by layer and last name."""


def write_rounded(item: FP8 | TorchAOInt8, subject: Subject, folder: Path) -> dict[str, Any]:
    """Write the format into `folder`, tensor by tensor; what is known of it. Withheld where the library that reads it
    does not find in it what was trained."""
    tools = _tools(item, subject)
    whole = subject.whole(item.merge_onto)
    dtype = _dtype(subject)
    targets, dense = _targets(whole)
    pieces_of = layout.fp8_pieces if isinstance(item, FP8) else torchao.int8_pieces

    def rounded(module: str, weight: Tensor) -> dict[str, Tensor] | None:
        return pieces_of(weight.float(), dtype) if module in targets else None

    _write(item, folder, whole, rounded, dtype, subject, targets=targets, dense=dense, group=None)
    return {"dtype": word(dtype)} | _proven(item, subject, folder, tools)


def write_as_trained(item: TorchAOInt8 | TorchAOInt4, spec: QAT, subject: Subject, folder: Path) -> dict[str, Any]:
    """The same for a model that was trained as it is rounded: the weights that the last pass of training computed
    with."""
    item = item.model_copy(update={"merge_onto": "trained"})  # there is but one base
    tools = _tools(item, subject)
    whole = subject.whole(item.merge_onto)
    dtype = _dtype(subject)
    grid = grid_of(spec)
    targets, dense = _targets(whole, lambda model: choose_layers(model, spec))

    def trained(module: str, weight: Tensor) -> dict[str, Tensor] | None:
        return torchao.trained_pieces(weight.float(), grid) if module in targets else None

    _write(item, folder, whole, trained, dtype, subject, targets=targets, dense=dense, group=grid.group)
    about = {"bits": grid.bits, "group_size": grid.group, "as_trained": True}
    return {"dtype": word(dtype)} | about | _proven(item, subject, folder, tools)


def write_four_bits(item: GPTQ | AWQ | MXFP4 | TorchAOInt4, subject: Subject, folder: Path) -> dict[str, Any]:
    """The same in 4 bits, chosen by GPTQ or AWQ over training rows."""
    tools = _tools(item, subject)
    check_memory(subject.model, torch.float32)
    whole = subject.whole(item.merge_onto)
    dtype = _dtype(subject)
    targets, dense = _targets(whole)
    model: Any = load_model(whole, torch.float32)
    path = Shape.of_folder(whole).list_name
    inputs = {name: model.get_submodule(name).in_features for name in targets if name.startswith(f"{path}.")}
    sizes = (layout.MX_GROUP,) if isinstance(item, MXFP4) else layout.GROUPS
    if (group := group_of(set(inputs.values()), sizes)) is None:
        # Layers whose inputs no group divides stay as they are.
        inputs = {name: count for name, count in inputs.items() if group_of({count}, sizes) is not None}
        group = group_of(set(inputs.values()), sizes)
    if not inputs or group is None:
        raise Withheld(f"no linear layer has a number of inputs that groups of 32 divide; take {_EIGHT_BITS} instead")
    dense = sorted({*dense, *(targets - inputs.keys())})
    grid, pieces_of = layout.INT4, layout.int4_pieces
    match item:
        case MXFP4():
            grid, pieces_of = layout.E2M1, layout.mxfp4_pieces
        case TorchAOInt4():
            pieces_of = torchao.int4_pieces
    pieces: Pieces = {}
    stored: dict[str, Tensor] = {}

    def by_gptq(block: Any, products: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for local, product in products.items():
            subject.between()
            yield (local, *quantise(block.get_submodule(local).weight.detach(), product, group, grid, dtype))

    def visit(name: str, block: Any, products: dict[str, Tensor], first: Callable[[], Tensor]) -> None:
        changed: dict[str, Tensor] = {}
        found = (
            quantise_block(block, products, group, dtype, first, changed, subject.between)
            if isinstance(item, AWQ)
            else by_gptq(block, products)
        )
        for local, q, scales in found:
            pieces[f"{name}.{local}"] = pieces_of(q, scales, dtype)
            weight = block.get_submodule(local).weight
            weight.copy_((q * scales.repeat_interleave(group, 1)).to(dtype))  # as it will be read
        stored.update({f"{name}.{local}": tensor for local, tensor in changed.items()})

    one_after_another(model, path, subject.calibration[:ROWS], set(inputs), visit, subject.between)
    del model
    if missed := sorted(inputs.keys() - pieces.keys()):
        raise Withheld(
            f"no row of the calibration reaches {missed[0]}, so it cannot be quantised; take {_EIGHT_BITS} instead"
        )

    def chosen(module: str, weight: Tensor) -> dict[str, Tensor] | None:
        return pieces.pop(module, None)

    _write(item, folder, whole, chosen, dtype, subject, targets=set(inputs), dense=dense, group=group, stored=stored)
    if stored:
        raise Withheld(f"the model's files have no {min(stored)}, which AWQ has changed; take `gptq` instead")
    about = {"bits": 4, "group_size": group, "calibration_rows": len(subject.calibration[:ROWS])}
    return {"dtype": word(dtype)} | about | _proven(item, subject, folder, tools)


def _tools(item: PackedExport, subject: Subject) -> Tools:
    tools = find(reader_of(item).tools, subject.cache_dir)
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


def _all_linear(model: Any) -> Chosen:
    return choose_targets(model, QuantOptions())


def _targets(whole: Path, choose: Callable[[Any], Chosen] = _all_linear) -> tuple[set[str], list[str]]:
    """Linear layers that are quantised, and those that stay dense (the output head)."""
    try:
        model, _ = skeleton(whole, torch.float32)
        model.tie_weights()
        targets, kept = choose(model)
    except ModelError as error:
        raise Withheld(error.message) from error
    return targets, sorted(kept)


def _write(
    item: PackedExport,
    folder: Path,
    whole: Path,
    pieces_of: Callable[[str, Tensor], dict[str, Tensor] | None],
    dtype: torch.dtype,
    subject: Subject,
    *,
    targets: set[str],
    dense: Sequence[str],
    group: int | None,
    stored: dict[str, Tensor] | None = None,
) -> None:
    """`pieces_of` (name of a layer, its weight): the tensors of a quantised layer, or None where it stays dense.
    `stored`: other tensors that are written in place of those of the files; each is removed once it is written."""
    stored = {} if stored is None else stored

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(whole):
            module = _layer(name)
            if name in stored:
                yield name, stored.pop(name)
                continue
            pieces = None if module is None else pieces_of(module, tensor)
            if pieces is None:
                yield name, _narrow(tensor, dtype)
            else:
                yield from ((f"{module}.{last}", piece) for last, piece in pieces.items())

    folder.mkdir(parents=True)
    match item:
        case FP8() | GPTQ() | AWQ() | MXFP4():
            about, header = layout.quantization_config(item.type, group, dense), {}
        case TorchAOInt8() | TorchAOInt4():
            rounds = subject.rounded is not None or isinstance(item, TorchAOInt4)
            form = torchao.TorchAOLayout(8 if isinstance(item, TorchAOInt8) else 4, group, rounds)
            about = torchao.quantization_config(form, dense)
            header = torchao.header(_inputs(whole, targets), form, dtype)
        case _ as never:
            assert_never(never)
    write_shards(tensors(), folder, subject.between, metadata=header)
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


def _layer(name: str) -> str | None:
    """The layer whose weight a tensor is."""
    return name.removesuffix(".weight") if name.endswith(".weight") else None


def _inputs(whole: Path, targets: set[str]) -> dict[str, int | None]:
    """Every tensor of the files, and the number of inputs where it is the weight of a quantised layer."""
    found: dict[str, int | None] = {}
    for file in weight_files(whole):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 -- not a dict
                found[name] = shard.get_slice(name).get_shape()[1] if _layer(name) in targets else None
    return found


def _proven(item: PackedExport, subject: Subject, folder: Path, tools: Tools) -> dict[str, Any]:
    reader = reader_of(item)
    tuned, base = subject.logits(item.merge_onto)
    found = measure(
        tuned,
        base,
        read_logits(folder, subject, tools, reader),
        rows=len(subject.rows),
        rows_of=subject.rows_of,
        required=required_retention(item),
        reader=reader.title,
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


def read_logits(folder: Path, subject: Subject, tools: Tools, reader: Reader) -> Tensor:
    """Logits of the subject's rows, [positions, vocabulary] float32, as the library reads the folder. Withheld where it
    does not."""
    with tempfile.TemporaryDirectory(dir=subject.artifacts, prefix=".proof-") as work:
        asked, logits = Path(work) / "rows.json", Path(work) / "logits.npy"
        asked.write_text(json.dumps([row.tolist() for row in subject.rows]), encoding="utf-8")
        try:
            tools.run(PROGRAM, str(folder), str(asked), str(logits), between=subject.between)
        except ToolFailed as error:
            raise Withheld(f"{reader.library} does not read it: {error}") from error
        return torch.from_numpy(np.load(logits))
