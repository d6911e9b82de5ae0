"""What the formats of a job need before a GPU is held: libraries, and a model that they can hold. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.errors import ModelError
from core.spec.axes.export import GGUF, K_QUANTS, Export, LMEval, PackedExport
from core.train.export.gguf.fits import refuse_gguf
from core.train.export.packed.fits import refuse_packed
from core.train.export.packed.readers import reader_of
from core.train.hub.download import is_offline
from core.train.tools.install import ToolFailed, install

SCORES = Path(__file__).parent / "formats" / "lm_eval_program.py"


def prepare_exports(
    exports: Sequence[Export], model_dir: Path, cache_dir: Path, *, offline: bool, task_folder: Path | None = None
) -> None:
    """Install what the formats need and check the model; bring the data of lm-eval's tasks here, where `task_folder`
    has tasks beside those of its package. ToolsMissing or ModelError."""
    network = "offline" if is_offline(offline) else "online"
    ggufs = [item for item in exports if isinstance(item, GGUF)]
    if any(item.quantization in K_QUANTS for item in ggufs):
        install("quants", cache_dir, offline=offline, field="export")
    if ggufs:
        refuse_gguf(model_dir, install("gguf", cache_dir, offline=offline, field="export"))
    for item in exports:
        if isinstance(item, PackedExport):
            refuse_packed(model_dir, item.type)
            install(reader_of(item).tools, cache_dir, offline=offline, field="export")
        if isinstance(item, LMEval):
            tools = install("lm_eval", cache_dir, offline=offline, field="export")
            try:
                tools.run(SCORES, "check", item.task, str(task_folder or "-"), network)
            except ToolFailed as error:
                raise ModelError(str(error), field="export", code="lm_eval_refused") from error
