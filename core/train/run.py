"""What all parts of a run share: its order, its folder, its events, the wish to stop, and its ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from core.spec.axes.quantization import packing_of
from core.spec.axes.runtime import HeldOut, NoEvaluation, NoStream
from core.spec.job import JobSpec
from core.spec.run.folder import CHECKPOINTS
from core.spec.run.orders import RunOrder
from core.train.base.code import code_sha256
from core.train.base.events import EventWriter
from core.train.base.stop import Stop, StopRequested
from core.train.ranks.env import RankEnv
from core.train.ranks.group import SINGLE_PROCESS, ProcessGroup


@dataclass
class Run:
    """One batch run. A context manager: leaving it closes what `close_at_end` was given, the newest first."""

    order: RunOrder
    folder: Path
    events: EventWriter
    stop: Stop = field(default_factory=Stop)
    rank_env: RankEnv | None = None
    """Rank of this process; None where the run has one rank."""
    ranks: ProcessGroup = SINGLE_PROCESS
    """All ranks of the run, once they have met (core/train/model/compute.py)."""
    noticed: dict[str, str] = field(default_factory=dict, init=False)
    """First message of each notice of this rank, by its code. Only those of rank 0 are in the events by themselves."""
    _at_end: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._at_end.close()

    @property
    def spec(self) -> JobSpec:
        return self.order.spec

    @property
    def evaluation(self) -> HeldOut | NoEvaluation:
        return self.spec.evaluation or NoEvaluation()

    @property
    def model_dir(self) -> Path:
        return Path(self.order.model_dir)

    @property
    def tokenizer_dir(self) -> Path:
        return self.model_dir if self.order.tokenizer_dir is None else Path(self.order.tokenizer_dir)

    @property
    def adapter_dir(self) -> Path | None:
        """Folder of the adapter that is trained further; None: a new one is trained."""
        return None if self.order.adapter_dir is None else Path(self.order.adapter_dir)

    @property
    def task_folder(self) -> Path | None:
        """Folder of tasks for lm-eval, beside those of its package."""
        return None if self.order.lm_eval_tasks is None else Path(self.order.lm_eval_tasks)

    @property
    def cache_dir(self) -> Path | None:
        """Folder of the data root for what can be made again; None: nothing is kept."""
        return None if self.order.cache_dir is None else Path(self.order.cache_dir)

    @property
    def caches_tokens(self) -> bool:
        """Rows that one rank has made tokens of are there for the others."""
        return self.cache_dir is not None and not self.spec.data.streaming

    @property
    def caches_weights(self) -> bool:
        """Packed weights or streamed blocks that one rank has made are there for the others."""
        plain = packing_of(self.spec.quantization) is None and isinstance(self.spec.memory.stream, NoStream)
        return self.cache_dir is not None and not plain

    @property
    def checkpoint_folders(self) -> list[Path]:
        """Folders of this attempt's checkpoints and of those before it, newest attempt first."""
        return [folder / CHECKPOINTS for folder in (self.folder, *map(Path, self.order.resume_from))]

    @property
    def best_folders(self) -> list[Path]:
        """Folders in which weights of good evaluations may lie, newest attempt first."""
        point = self.order.resume_point
        return [*self.checkpoint_folders, *([] if point is None else [Path(point.folder).parent])]

    def check_stop(self) -> None:
        """Give a sign of life. Raises StopRequested where the run was asked to leave."""
        self.events.alive()
        if self.stop.requested:
            raise StopRequested

    def phase(self, name: str) -> None:
        self.events.write("phase", phase=name)

    def notice(self, code: str, message: str) -> None:
        self.noticed.setdefault(code, message)
        self.events.write("notice", code=code, message=message)

    def share_notices(self) -> None:
        """Report what other ranks have noticed, each code once an attempt. Collective."""
        for noticed in self.ranks.all_gather(dict(self.noticed)):
            for code in noticed.keys() - self.noticed.keys():
                self.notice(code, noticed[code])

    def about(self) -> dict[str, Any]:
        """Entries of the run record."""
        order = self.order
        return {
            "job_id": order.job_id,
            "attempt": order.attempt,
            "model": order.model_source or {"path": order.model_dir},
            "settled": order.settled,
            "lineage": order.lineage,
            "code": code_sha256(),
            "seed": order.spec.training.seed,
            "spec": order.spec.model_dump(mode="json"),
        }

    def close_at_end(self, close: Callable[[], None]) -> None:
        """Call `close` when the run is left, whether it went well or not."""
        self._at_end.callback(close)
