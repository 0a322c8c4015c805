"""One attempt of a group at a time: a file with a heartbeat says which, on any filesystem, without locks.

Two attempts at once do no harm (each writes a journal of its own), they only pay twice for what both have in flight. So
the lease is a courtesy: of two Slurm jobs the one submitted later goes on, since it is the one that Snakemake watches,
and the earlier one hands over (it stops admitting, finishes what is in flight, and gives its GPU back); otherwise
the second waits. A lease whose heartbeat stands still is taken over.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from gristmill import slurm
from gristmill.errors import GristmillError
from gristmill.processes import is_alive

_BEAT_S = 5.0
_STALE_S = 60.0  # a heartbeat that stands still for so long, by the clock of the one who waits
_STALE_OVER_S = 15.0  # the same when Slurm says that the job is over; a process cut off by its network may go on
_POLL_S = 0.5
_ASK_SLURM_S = 10.0


@dataclass(frozen=True)
class Holder:
    """Who works on a group. job_id: Slurm's, None outside it. started: of the process, seconds since the epoch."""

    attempt: str
    job_id: str | None
    host: str
    pid: int
    started: float

    @classmethod
    def me(cls) -> Holder:
        process = psutil.Process()
        return cls(secrets.token_hex(8), slurm.this_job(), os.uname().nodename, process.pid, process.create_time())

    def __str__(self) -> str:
        job = f"Slurm job {self.job_id}, " if self.job_id else ""
        return f"{job}process {self.pid} on {self.host}"

    def is_dead(self) -> bool:
        """Whether the process is known to be gone; one of another machine never is."""
        return self.host == os.uname().nodename and not is_alive(self.pid, self.started)

    def is_older_than(self, other: Holder) -> bool | None:
        """Of two Slurm jobs, whether this was submitted before the other; a requeued job is older than itself."""
        if self.job_id is None or other.job_id is None:
            return None
        return int(self.job_id) <= int(other.job_id)


class Lease:
    """The lease of a group as a context manager: held inside, given back after.

    path: its file. name: of the group, for messages. gone: called while waiting; gives a reason to give up.
    Raises GristmillError when a later Slurm job works on the group.
    """

    def __init__(self, path: Path, name: str, gone: Callable[[], str | None] = lambda: None) -> None:
        self._path, self._request, self._name, self._gone = path, path.with_suffix(".request"), name, gone
        self._me = Holder.me()
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._keep, name="lease", daemon=True)
        self.wanted: str | None = None  # why this attempt should stop: another one goes on

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # a filesystem that takes no file: the journal will say so
            self._acquire()
        self._beats.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._beats.join()
        if self._read() == self._me:
            self._path.unlink(missing_ok=True)

    # -- getting it ---------------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        began = time.monotonic()
        seen, changed, over, asked = b"", began, False, began - _ASK_SLURM_S
        told = False
        while not self._create():
            now = time.monotonic()
            beat = self._text()
            holder = _holder(beat)
            if beat != seen:
                seen, changed = beat, now
            if holder is None:
                if now - changed > 2 * _POLL_S:  # torn for longer than a write takes: nobody's
                    self._clear(beat)
                time.sleep(_POLL_S / 5)
                continue
            if holder.job_id and now - asked >= _ASK_SLURM_S:
                asked, over = now, slurm.is_over(slurm.job_state(holder.job_id))
            if holder.is_dead() or now - changed > (_STALE_OVER_S if over else _STALE_S):
                print(f"group {self._name}: {holder} is gone; taking its place", file=sys.stderr, flush=True)
                self._clear(beat)
                continue
            self._ask_for_it(holder)
            if not told:
                told = True
                how = "has been asked to hand over" if self._request.exists() else "works on it"
                print(f"group {self._name}: waiting for {holder}, which {how}", file=sys.stderr, flush=True)
            if (why := self._gone()) is not None:
                self._request.unlink(missing_ok=True)
                raise GristmillError(f"group {self._name}: stopped ({why}) while waiting for {holder}")
            time.sleep(_POLL_S)

    def _ask_for_it(self, holder: Holder) -> None:
        older = holder.is_older_than(self._me)
        if older is False:
            raise GristmillError(
                f"group {self._name}: {holder}, a later attempt, works on it; this one stops",
                where=str(self._path),
                help=f"nothing, unless the later one is stuck: scancel {holder.job_id}, then run again",
            )
        if older and not self._request.exists():
            self._request.write_text(f"{self._me} works on it now\n", encoding="utf-8")

    def _create(self) -> bool:
        """Make the file, whole at once, unless it is there."""
        temporary = self._write_temporary()
        try:
            os.link(temporary, self._path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        self._request.unlink(missing_ok=True)
        return True

    def _clear(self, stale: bytes) -> None:
        """Remove a lease that nobody keeps. Of several who find it so, one may: who makes the mark named after it."""
        digest = hashlib.blake2b(stale, digest_size=8).hexdigest()
        mark = self._path.with_name(f".{self._path.name}.{digest}.stale")
        try:
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # whoever made it was killed
                if time.time() - mark.stat().st_mtime > _STALE_S:
                    mark.unlink()
            return
        if self._path.exists() and self._text() == stale:
            self._path.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)

    # -- keeping it ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):  # a beat that is late is made up for by the next
                holder = self._read()
                if holder is None:
                    self._create()
                elif holder != self._me:
                    self.wanted = self.wanted or f"{holder} works on it now"
                elif self._request.exists():
                    self.wanted = self.wanted or self._request.read_text(encoding="utf-8").strip()
                if holder == self._me:
                    self._write_temporary().replace(self._path)

    def _write_temporary(self) -> Path:
        path = self._path.with_name(f".{self._path.name}.{self._me.attempt}")
        path.write_text(json.dumps({**asdict(self._me), "beat": time.time()}) + "\n", encoding="utf-8")
        return path

    def _text(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError:
            return b""

    def _read(self) -> Holder | None:
        return _holder(self._text())


def _holder(text: bytes) -> Holder | None:
    """Who holds a lease, by the text of its file; None when it is torn or missing."""
    try:
        data = json.loads(text)
        data.pop("beat")
        return Holder(**data)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
