"""What a person is told when something is wrong: what was found, where, and what to do."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO, cast


class GristmillError(Exception):
    """Trouble that a person can mend.

    found: what was found, a sentence without a full stop.
    where: file and line, or the key of the campaign.
    help: the command or the edit that helps.
    """

    def __init__(self, found: str, *, where: str | None = None, help: str | None = None) -> None:
        self.found, self.where, self.help = found, where, help
        lines = [found]
        if where:
            lines.append(f"  where: {where}")
        if help:
            lines.append(f"  help:  {help}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(GristmillError, where=self.where, help=self.help), (self.found,)


def indented(text: str, lines: int = 15) -> str:
    """The last lines of a text, for an error message."""
    return "\n".join(f"    | {line}" for line in text.strip().splitlines()[-lines:]) or "    | (empty)"


def disk_error(error: OSError) -> GristmillError | None:
    """The message for a full disk or quota, or None if `error` is something else."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = str(error.filename) if error.filename else str(Path.cwd())
    return GristmillError(
        f"the disk is full: {error.strerror}",
        where=where,
        help="free some space (df -h shows how much is left) and run the same command again; "
        "every answer that reached the journal is kept and is not asked for again",
    )


class _Tee:
    """Standard error, written to a log file as well.

    A disk that is full, or a terminal that is gone, must not keep a job from stopping in good order.
    """

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._log.write(text)
            self._log.flush()
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    @property
    def log(self) -> TextIO:
        return self._log

    @property
    def terminal(self) -> TextIO | None:
        """The stream without the log, where it is a terminal."""
        return self._stream if self._stream.isatty() else None

    @contextlib.contextmanager
    def through(self, stream: TextIO) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before


def terminal() -> TextIO | None:
    """Standard error where a person sees it beside a log, else None."""
    return sys.stderr.terminal if isinstance(sys.stderr, _Tee) else None


def on_terminal_through(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    """Meanwhile what is written to standard error reaches its terminal through `stream`, and its log as ever."""
    return sys.stderr.through(stream) if isinstance(sys.stderr, _Tee) else contextlib.nullcontext()


def log_line(text: str) -> None:
    """Write a line to the log of the job, and to standard error unless that is a terminal, where a bar stands."""
    stream = sys.stderr.log if isinstance(sys.stderr, _Tee) and sys.stderr.terminal is not None else sys.stderr
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


@contextlib.contextmanager
def reported(log: str | None = None) -> Iterator[None]:
    """Print a GristmillError (and a full disk) without a traceback and exit with status 1.

    log: a file that gets everything written to standard error as well.
    """
    with contextlib.ExitStack() as stack:
        if log is not None:
            file = Path(log).open("w", encoding="utf-8")  # noqa: SIM115
            stack.callback(_close, file)
            stack.enter_context(contextlib.redirect_stderr(cast(TextIO, _Tee(sys.stderr, file))))
        try:
            yield
        except GristmillError as error:
            _exit(error)
        except OSError as error:
            known = disk_error(error)
            if known is None:
                raise
            _exit(known)


def _close(log: TextIO) -> None:
    with contextlib.suppress(OSError):  # what a full disk did not take
        log.close()


def say(message: object) -> None:
    """Tell a person something, on standard error."""
    print(f"gristmill: {message}", file=sys.stderr, flush=True)


def _exit(error: GristmillError) -> NoReturn:
    say(error)
    raise SystemExit(1) from error
