"""Log-probabilities of all sequences under the model that training starts from, without a second model.

They are computed once, before the first step, when the model is still that one (a fresh adapter adds nothing), by the
kernels that training uses, and kept in the run folder: a later attempt reads the same bits. Blocks of a stream are
computed as they come, with the adapters switched off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from core.base.files import sync
from core.errors import EftError, SpecError
from core.plan.memory.passes import training_pass
from core.spec.axes.batching import Packed
from core.spec.run.folder import REFERENCE
from core.train.base.stop import StopRequested
from core.train.data.dataset import TokenDataset, eval_rows
from core.train.engine import Engine
from core.train.feed import RunData
from core.train.policy import PolicyModel
from core.train.run import Run
from core.train.stage import Stage

NAME = "reference"
"""Its name among `Batch.values`."""
MOST_ROWS = 64
"""Examples of one pass at most."""
APART = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE = 5e-2
"""Largest mean difference of a token's log-probability when the model computes it again: in float32, in 16 bits."""


class ReferenceMismatch(EftError):
    """The model's log-probabilities are not those of its reference, before it has changed."""

    code = "reference_mismatch"
    status = 500


def prepare_reference(
    run: Run, engine: Engine, stage: Stage, data: RunData, used: Sequence[int] | None = None
) -> dict[str, Any]:
    """Give the examples of a run their reference, where the stage wants one; call it before anything is trained or
    loaded. `used`: the training rows that the run comes to, ascending; None: all. Returns entries of the run record.
    Collective; StopRequested."""
    if not stage.reference:
        return {}
    if data.stream is not None and run.adapter_dir is not None:
        raise SpecError(
            "the reference of a continued adapter is that adapter, which training has changed by the time later rows "
            "of a stream are read; remove `data.streaming`, or set `model.adapter: merge`",
            field="data.streaming",
        )
    parts = {"train": data.train} if data.stream is None else {}
    parts |= {} if data.eval is None else {"eval": data.eval}
    rows: dict[str, Sequence[int]] = {name: range(len(dataset)) for name, dataset in parts.items()}
    if used is not None and data.stream is None:
        rows["train"] = used
    keys = {name: _content(dataset, rows[name]) for name, dataset in parts.items()}
    found = _kept(run, keys) if run.ranks.first and parts else None
    path = run.ranks.broadcast("" if found is None else str(found))
    if path:
        values = _load(Path(path))
    else:
        run.phase("reference")
        values = {name: log_probabilities(run, engine, dataset, rows[name]) for name, dataset in parts.items()}
    for name, dataset in parts.items():
        dataset.values[NAME] = values[name]
    if run.ranks.first and parts and path != str(run.folder / REFERENCE):
        _keep(run.folder / REFERENCE, values, keys)
    run.ranks.barrier()
    for name, dataset in parts.items():
        _check(engine, dataset, rows[name][:4], packed=isinstance(run.spec.batching, Packed))
    if data.stream is not None:
        data.stream.prepare = _per_block(run, engine)
    if data.stream is not None:
        return {"reference": {"computed": "per block"}}
    return {"reference": {"computed": "before the first step", "training_rows": len(rows["train"])}}


def log_probabilities(
    run: Run,
    engine: Engine,
    dataset: TokenDataset,
    rows: Sequence[int],
    start: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> npt.NDArray[np.float32]:
    """Summed log-probability of the labels of each sequence, [examples, sequences]; NaN where an example is none of
    `rows`. `start` makes a context in which the model is the one that training starts from. Collective; StopRequested
    on all ranks together."""
    packed, only = isinstance(run.spec.batching, Packed), range(dataset.sequences)
    longest = max(dataset.sequence_lengths, default=1)
    tokens, _ = training_pass(run.spec, longest)
    cut = eval_rows(dataset, rows, MOST_ROWS, tokens, only)
    done: list[tuple[list[int], list[list[float]]]] = []
    stopped = False
    try:
        with start():
            for some in cut[run.ranks.rank :: run.ranks.world]:
                run.check_stop()
                batch = dataset.pack(some, only) if packed else dataset.collate(some, engine.pad_token_id, only)
                values = engine.evaluate(batch, PolicyModel.sequence_logprobs)
                done.append((list(some), values.double().tolist()))
    except StopRequested:
        stopped = True
    if run.ranks.any_rank(stopped):
        raise StopRequested
    found = np.full((len(dataset), dataset.sequences), np.nan, dtype=np.float32)
    for part in run.ranks.all_gather(done):
        for some, of_them in part:
            found[some] = of_them
    return found


def _per_block(run: Run, engine: Engine) -> Callable[[TokenDataset], None]:
    def prepare(dataset: TokenDataset) -> None:
        model: Any = engine.model
        dataset.values[NAME] = log_probabilities(run, engine, dataset, range(len(dataset)), model.disable_adapter)

    return prepare


def _check(engine: Engine, dataset: TokenDataset, rows: Sequence[int], *, packed: bool) -> None:
    """Compute some examples once more, as training batches them, and compare. ReferenceMismatch."""
    batch = dataset.pack(rows) if packed else dataset.collate(rows, engine.pad_token_id)
    found = engine.evaluate(batch, PolicyModel.sequence_logprobs)
    gap = (found.cpu() - batch.values[NAME]).abs().flatten() / torch.tensor(batch.label_counts())
    computed = engine.autocast or next(p.dtype for p in engine.model.parameters() if p.is_floating_point())
    allowed = APART.get(computed, COARSE)
    if not float(gap.mean()) <= allowed:
        raise ReferenceMismatch(
            f"the log-probability of a token differs from the reference by {float(gap.mean()):.2g} on average before "
            f"the first step (rounding may make {allowed:.2g}); the reference was computed on another machine or by "
            "another model: submit the job anew",
            field="stage",
        )


# --- the file --------------------------------------------------------------------------------------------


def _content(dataset: TokenDataset, rows: Sequence[int]) -> str:
    """Hash of the tokens that the log-probabilities are of, and of which examples those are if not all."""
    digest = hashlib.sha256()
    for row in rows:
        for number in range(row * dataset.sequences, (row + 1) * dataset.sequences):
            span = slice(int(dataset.starts[number]), int(dataset.ends[number]))
            digest.update(dataset.ids[span].tobytes() + b"|" + dataset.learned[span].tobytes() + b"|")
    if len(rows) < len(dataset):
        digest.update(",".join(map(str, rows)).encode())
    return digest.hexdigest()


def _kept(run: Run, keys: Mapping[str, str]) -> Path | None:
    """The file of this attempt or of one before it, where it is whole and of these tokens."""
    for folder in (run.folder, *map(Path, run.order.resume_from)):
        path = folder / REFERENCE
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata() == dict(keys) and set(file.keys()) == keys.keys():
                    return path
        except (OSError, SafetensorError) as error:
            if path.exists():
                run.notice("bad_reference", f"{path.name} is damaged ({error}); it is computed anew")
    return None


def _load(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- no mapping


def _keep(path: Path, values: Mapping[str, npt.NDArray[np.float32]], keys: Mapping[str, str]) -> None:
    aside = path.with_name(f".new-{path.name}")
    save_file({name: torch.from_numpy(array) for name, array in values.items()}, aside, metadata=dict(keys))
    sync(aside)
    aside.rename(path)
    sync(path.parent)
