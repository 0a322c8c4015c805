"""What a job shows of its progress: a line in its log every few seconds, and on a terminal a bar."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO, cast

from gristmill.errors import log_line, on_terminal_through, terminal
from gristmill.telemetry import Snapshot

if TYPE_CHECKING:
    from rich.progress import Progress


class Display:
    """Shows the snapshots of one attempt, which has so many requests to ask."""

    def __init__(self, name: str, total: int) -> None:
        self._bar: Progress | None = None
        self._messages = contextlib.ExitStack()
        stream = terminal()
        if stream is not None:
            from rich.console import Console
            from rich.file_proxy import FileProxy
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"))
            console = Console(file=stream)
            self._bar = Progress(
                *columns,
                console=console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,  # what is said must reach the log too
            )
            self._bar.add_task(name, total=total, line="")
            self._above = FileProxy(console, stream)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._messages.enter_context(on_terminal_through(cast(TextIO, self._above)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._messages.close()
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def line(self, snapshot: Snapshot) -> None:
        """A line for the log."""
        log_line(snapshot.line())

    def move(self, snapshot: Snapshot) -> None:
        """The bar as of now."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(self._bar.task_ids[0], completed=snapshot.answered, line=snapshot.line(), refresh=True)
