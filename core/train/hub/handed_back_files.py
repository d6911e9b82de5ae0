"""The weights of earlier jobs that a job starts from: where they lie, and that they are what was pinned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.errors import ModelError
from core.plan.models.headers import INDEX_FILE, NF4_STATE, Tensor, read_header, read_json, weight_files
from core.plan.models.uploaded import ADAPTER_WEIGHTS, PAIR, TOKENIZERS
from core.spec.run.chain import HandedBack
from core.spec.run.folder import ARTIFACTS


def checked_folder(runs: Path, handed: HandedBack, digest: Callable[[Path], str]) -> Path:
    """Folder of the weights, every file of which has the pinned SHA-256. ModelError otherwise. `digest` returns the
    SHA-256 of a file."""
    artifacts = runs / handed.job / f"attempt-{handed.attempt}" / ARTIFACTS
    for file in handed.files:
        path = artifacts / file.path
        if not path.is_file():
            raise ModelError(
                f"{file.path} of {handed.job} is no longer on the data root: restore it from a backup, or train that "
                "job again",
                field="model.id",
                code="model_job_gone",
            )
        if path.stat().st_size != file.bytes or digest(path) != file.sha256:
            raise ModelError(
                f"{file.path} of {handed.job} has changed since that job handed it back: restore it from a backup, or "
                "train that job again",
                field="model.id",
                code="model_job_changed",
            )
    return artifacts / handed.folder


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies beside an adapter; one that was made elsewhere may come without."""
    return any((folder / name).is_file() for name in (*TOKENIZERS, "vocab.json"))


def require_fit(adapter: Path, base: Path) -> None:
    """ModelError where an adapter belongs to another base: layers that the base does not have, or of other sizes.
    Layers that the base's files hold in another arrangement (packed, fused) are left to the trainer."""
    path = adapter / ADAPTER_WEIGHTS
    if not path.is_file():
        return
    names = [one.name for one in base.iterdir() if one.is_file()]
    index = read_json(base / INDEX_FILE, field="model") if INDEX_FILE in names else None
    weights: dict[str, Tensor] = {}
    for shard in weight_files(names, index, field="model"):
        weights |= read_header(base / shard, field="model")
    known = 0
    for name, tensor in read_header(path, field="model.id").items():
        pair = PAIR.fullmatch(name)
        if pair is None or len(tensor.shape) != 2:
            continue
        beneath = f"{pair['module']}.weight"
        weight = weights.get(beneath)
        if weight is None:
            continue
        known += 1
        width = tensor.shape[1 if pair["side"] == "A" else 0]
        packed = f"{beneath}{NF4_STATE}" in weights or len(weight.shape) != 2
        # Either side: layers of the GPT-2 kind are transposed.
        if not packed and width not in weight.shape:
            shapes = f"{name} is {list(tensor.shape)}, and {beneath} of the base model {list(weight.shape)}"
            raise _another_base(f"{shapes}")
    if not known and any(PAIR.fullmatch(name) for name in read_header(path, field="model.id")):
        raise _another_base("the base model has none of the layers that it adapts")


def _another_base(why: str) -> ModelError:
    return ModelError(
        f"the adapter was trained over another model: {why}; name the base model that it was trained over",
        field="model.id",
        code="adapter_of_another_base",
    )
