"""Following a job: a progress bar on a terminal, plain lines in a pipe or a CI log."""

from __future__ import annotations

from types import TracebackType

from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from eft.errors import EftClientError
from eft.output import Output, duration, number
from eft.types import Event

PLAIN_SHARE = 0.1
"""In a pipe, a line of progress for every tenth of the way."""


class Follower:
    """Feed it a job's events. It draws on stderr: stdout belongs to the answer."""

    def __init__(self, output: Output) -> None:
        self._console = output.notes
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._told = -1.0
        self._loss: float | None = None
        self._phase = ""
        wide = self._console.width >= 70
        self._bar = Progress(
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
        self._describe("server away, waiting")
        if not self._live:
            self._say(f"{error.message}; trying again")

    def feed(self, event: Event) -> None:
        data = event.data
        match event.type:
            case "status":
                status = str(data.get("to", ""))
                reason = data.get("reason")
                self._describe(status)
                self._say(f"{status}{f': {reason}' if reason else ''}")
            case "phase":
                self._phase = str(data.get("phase", ""))
                self._describe(self._phase)
                self._say(self._phase)
            case "progress" if data.get("total_steps"):
                self._steps(int(data["step"]), int(data["total_steps"]), data.get("seconds_left"))
            case "progress" if data.get("total_bytes"):
                self._bar.update(self._task, completed=data.get("bytes", 0), total=data["total_bytes"])
            case "metrics":
                self._loss = data.get("values", {}).get("loss", self._loss)
            case "evaluation":
                values = ", ".join(f"{key} {number(value)}" for key, value in data.get("values", {}).items())
                self._say(f"evaluation at step {data.get('step')}: {values}")
            case "notice":
                self._say(f"notice: {data.get('message')}")
            case "resumed":
                self._say(f"goes on from step {data.get('step')} (attempt {event.attempt})")
            case "error":
                self._say(f"error {data.get('code')}: {data.get('message')}")
            case _:
                pass  # checkpoints and whatever a newer server tells: `--json` shows them

    def _steps(self, step: int, total: int, left: float | None) -> None:
        loss = "" if self._loss is None else f"loss {self._loss:.3f}"
        tail = "  ".join(part for part in (loss, "" if left is None else f"{duration(left)} left") if part)
        self._bar.update(self._task, completed=step, total=total, tail=tail)
        share = step / total
        if not self._live and (share - self._told >= PLAIN_SHARE or step == total or share < self._told):
            self._told = share
            self._say(f"step {step}/{total}  {tail}")

    def _describe(self, text: str) -> None:
        self._bar.update(self._task, description=escape(text))

    def _say(self, text: str) -> None:
        # Text, not markup: a message may hold brackets.
        self._bar.console.print(Text(text), soft_wrap=True)
