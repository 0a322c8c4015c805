"""The job of one shard group: find what the journals answer already, ask for the rest, write the group's answers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import orjson
import psutil

from gristmill.client import Window
from gristmill.endpoint import AttachedEndpoint, EngineEndpoint
from gristmill.engines import Attachment, Launch
from gristmill.errors import GristmillError
from gristmill.journal import Journal, Place, Reader, scan
from gristmill.layout import RUNNER_PID, Layout
from gristmill.manifest import Shard
from gristmill.outcomes import AnswerCheck
from gristmill.requests import Request
from gristmill.shards import head, read_shard

_DRAIN_S = 15.0  # with the engine's grace within Slurm's default KillWait of 30 s
_FORCED_S = 2.0


@dataclass(frozen=True)
class Job:
    """A group's job. target: the endpoint to attach to, or the engine to start (its address not chosen yet)."""

    name: str
    shards: Sequence[Shard]
    layout: Layout
    target: Attachment | Launch
    check: AnswerCheck
    concurrency: int
    start_timeout_s: float
    restarts: int


def run_group(job: Job, output: Path) -> None:
    """Bring the answers of every request of the group to `output`, a folder with a JSONL file a shard.

    A line is {"id", "row", "fingerprint", "route", "model", "keep"} with "record" (the journal's) or "error" (never
    sent).
    Raises GristmillError when requests are left without an answer; whatever was answered stays in the journal.
    """
    with _only_one(job.layout.journal / f"{job.name}.lock", job.name):
        wanted = _wanted(job)
        found = scan(job.layout.journal, wanted, job.name)
        missing = sum(map(len, wanted.values())) - len(found)
        total = sum(shard.rows for shard in job.shards)
        print(f"group {job.name}: {total:,} rows, {missing:,} to ask", file=sys.stderr, flush=True)
        if missing:
            asyncio.run(_ask(job, _pending(job, found), missing))
            found = scan(job.layout.journal, wanted, job.name)
        _write_answers(job, found, output)


def _wanted(job: Job) -> dict[str, set[str]]:
    """Fingerprint → ids of the requests that can be sent."""
    wanted: dict[str, set[str]] = {}
    for request in _requests(job):
        if request.fingerprint is not None:
            wanted.setdefault(request.fingerprint, set()).add(request.id)
    return wanted


def _requests(job: Job) -> Iterator[Request]:
    for shard in job.shards:
        yield from read_shard(job.layout.shards / job.name / shard.file)


def _pending(job: Job, found: dict[tuple[str, str], Place]) -> Iterator[Request]:
    for request in _requests(job):
        if request.fingerprint is not None and (request.fingerprint, request.id) not in found:
            yield request


@contextlib.contextmanager
def _only_one(path: Path, name: str) -> Iterator[None]:
    """Wait while another process of this machine works on the group, so that nothing is asked for twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            print(f"group {name}: waiting for {holder}, which works on it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # a filesystem without locks: two attempts are harmless, they pay at most for what is in flight
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


async def _ask(job: Job, requests: Iterator[Request], total: int) -> None:
    where = os.environ.get("SLURM_JOB_ID", "local")
    attempt = f"{job.name}.{where}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
    first = next(requests)
    endpoint: AttachedEndpoint | EngineEndpoint
    if isinstance(job.target, Attachment):
        endpoint = AttachedEndpoint(job.target, first.route)
    else:
        log = job.layout.logs / f"{attempt}.engine.log"
        endpoint = EngineEndpoint(job.target, first.route, log, job.start_timeout_s, job.restarts)
    with _stop_signals() as stop:
        try:
            with Journal(job.layout.journal / f"{attempt}.jsonl") as journal:
                async with endpoint:
                    window = Window(endpoint, journal, job.check, job.concurrency, total)
                    stop.attach(window)
                    tally = await window.run(chain([first], requests))
        except asyncio.CancelledError as error:
            raise GristmillError(
                f"group {job.name}: stopped ({stop.why}) while {endpoint.name} was starting",
                help="run the same command again",
            ) from error
    if tally.answered < total:
        raise _incomplete(job, window, total)


def _incomplete(job: Job, window: Window, total: int) -> GristmillError:
    tally = window.tally
    left = total - tally.answered
    lines = [f"  {id!r}: {reason}" for id, reason in tally.unanswered[:5]]
    why = f": {window.stopped_because}" if window.stopped_because else ""
    return GristmillError(
        f"group {job.name}: {left:,} of {total:,} requests have no answer yet{why}" + "".join(f"\n{x}" for x in lines),
        where=str(job.layout.logs),
        help="run the same command again: it asks for these alone, what was answered is in the journal; "
        "a request that fails each time must be taken out of the input",
    )


class _Stop:
    """Turns SIGTERM, SIGINT and the end of the Snakemake process into a drain of the window."""

    def __init__(self) -> None:
        self._window: Window | None = None
        self.why: str | None = None
        self._main = asyncio.current_task()

    def attach(self, window: Window) -> None:
        self._window = window
        if self.why is not None:
            window.stop(self.why, _FORCED_S)

    def request(self, why: str) -> None:
        again = self.why is not None
        if not again:
            print(f"{why}: stopping; what was answered is kept", file=sys.stderr, flush=True)
        self.why = self.why or why
        if self._window is not None:
            self._window.stop(why, _FORCED_S if again and why != "SIGTERM" else _DRAIN_S)
        elif self._main is not None:
            self._main.cancel()


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    loop = asyncio.get_running_loop()
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.request, signal.Signals(number).name)
    watch = loop.create_task(_watch_runner(stop))
    try:
        yield stop
    finally:
        watch.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _watch_runner(stop: _Stop) -> None:
    """A Snakemake that was killed must not leave an engine that holds a GPU for nobody."""
    pid = os.environ.get(RUNNER_PID)
    if pid is None:
        return
    try:
        runner = psutil.Process(int(pid))
    except psutil.NoSuchProcess:
        stop.request("Snakemake is gone")
        return
    while runner.is_running() and runner.status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.5)
    stop.request("Snakemake is gone")


def _write_answers(job: Job, found: dict[tuple[str, str], Place], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with Reader() as reader:
        for shard in job.shards:
            with (output / shard.file).open("wb", 1 << 20) as file:
                for request in read_shard(job.layout.shards / job.name / shard.file):
                    file.write(_answer_line(job, request, found, reader))


def _answer_line(job: Job, request: Request, found: dict[tuple[str, str], Place], reader: Reader) -> bytes:
    if request.error is not None:
        return orjson.dumps(head(request)) + b"\n"
    place = found.get((request.fingerprint or "", request.id))
    if place is None:
        raise GristmillError(
            f"group {job.name}: request {request.id!r} has no answer",
            where=str(job.layout.journal),
            help="run the same command again",
        )
    return orjson.dumps(head(request))[:-1] + b',"record":' + reader.read(place)[:-1] + b"}\n"
