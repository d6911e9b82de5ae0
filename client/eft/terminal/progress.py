"""Following a job: a progress bar on a terminal, plain lines in a pipe or a CI log."""

from __future__ import annotations

from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from eft.errors import EftClientError
from eft.terminal.output import Output, duration, number
from eft.types import Event, Progress, Snapshot

PLAIN_SHARE = 0.1
"""In a pipe, a line of progress for every tenth of the way."""


def event_words(event: Event) -> str | None:
    """One line for people; None: not worth one (checkpoints, records, and whatever a newer server tells: --json has all
    of it)."""
    data = event.data
    match event.type:
        case "status":
            reason = data.get("reason")
            return f"{data.get('to')}{f': {reason}' if reason else ''}"
        case "phase":
            return str(data.get("phase"))
        case "evaluation":
            values = ", ".join(f"{key} {number(value)}" for key, value in data.get("values", {}).items())
            return f"evaluation at step {data.get('step')}: {values}"
        case "notice":
            return f"notice: {data.get('message')}"
        case "resumed":
            return f"continues from step {data.get('step')}"
        case "error":
            return f"error {data.get('code')}: {data.get('message')}"
        case _:
            return None


class Away:
    """Says once that the server is away, and once that it is back."""

    def __init__(self, output: Output) -> None:
        self._output, self._away = output, False

    def gap(self, error: EftClientError) -> None:
        if not self._away:
            self._output.note(f"{error.message}; trying again")
        self._away = True

    def back(self) -> None:
        if self._away:
            self._output.note("the server is back")
        self._away = False


class Follower:
    """Feed it the looks of `Client.follow`. It draws on stderr: stdout belongs to the answer."""

    def __init__(self, output: Output) -> None:
        self._console = output.notes
        self._live = output.live
        self._told = -1.0
        self._step = -1
        self._away = False
        wide = self._console.width >= 70
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None if wide else 10),
            TaskProgressColumn(),
            TextColumn("{task.fields[tail]}"),
            console=self._console,
            expand=wide,
            transient=False,
            disable=not self._live,
        )
        self._task = self._bar.add_task("waiting", total=None, tail="")

    def __enter__(self) -> Follower:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def gap(self, error: EftClientError) -> None:
        """The server is away; the client tries again by itself."""
        self._describe("server away")
        if not self._away:
            self._say(f"{error.message}; trying again")
        self._away = True

    def feed(self, snapshot: Snapshot) -> None:
        self._away = False
        self._describe(snapshot.job.status)
        for event in snapshot.events:
            if (words := event_words(event)) is not None:
                self._say(words)
        progress = snapshot.job.progress
        if progress is not None:
            self._steps(progress, snapshot.loss, ended=snapshot.job.finished)

    def _steps(self, progress: Progress, loss: float | None, *, ended: bool) -> None:
        step, total = progress.step, progress.total_steps
        left = None if ended else progress.seconds_left
        words = ("" if loss is None else f"loss {loss:.3f}", "" if left is None else f"{duration(left)} left")
        tail = "  ".join(word for word in words if word)
        self._bar.update(self._task, completed=step, total=total, tail=tail)
        share = step / total if total else 0.0
        if not self._live and (share - self._told >= PLAIN_SHARE or share < self._told or step == total > self._step):
            self._told = share
            self._say(f"step {step}/{total}  {tail}")
        self._step = step

    def _describe(self, text: str) -> None:
        self._bar.update(self._task, description=escape(text))

    def _say(self, text: str) -> None:
        # Text, not markup: a message may hold brackets.
        self._bar.console.print(Text(text), soft_wrap=True)
