"""The job of one shard group: find what the journals answer already, ask for the rest, write the group's answers."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import orjson

from gristmill import slurm
from gristmill.client import Window
from gristmill.endpoint import AttachedEndpoint, EngineEndpoint
from gristmill.engines import Attachment, Launch
from gristmill.errors import GristmillError
from gristmill.journal import Journal, Place, Reader, scan
from gristmill.layout import Layout
from gristmill.lease import Lease
from gristmill.manifest import Shard
from gristmill.outcomes import AnswerCheck
from gristmill.requests import Request
from gristmill.shards import head, read_shard
from gristmill.stopping import deadline, runner_gone, stopping


@dataclass(frozen=True)
class Job:
    """A group's job.

    target: gives the endpoint to attach to, or the engine to start (its address not chosen yet); called only when there
    is something to ask. runtime_min: the time that its Slurm job asked for, minutes.
    """

    name: str
    shards: Sequence[Shard]
    layout: Layout
    target: Callable[[], Attachment | Launch]
    check: AnswerCheck
    concurrency: int
    start_timeout_s: float
    restarts: int
    runtime_min: float | None = None

    def new_attempt(self) -> str:
        """A name for this attempt, which no other has."""
        return f"{self.name}.{slurm.this_job() or 'local'}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"


def run_group(job: Job, output: Path) -> None:
    """Bring the answers of every request of the group to `output`, a folder with a JSONL file a shard.

    A line is {"id", "row", "fingerprint", "route", "model", "keep"} with "record" (the journal's) or "error" (never
    sent).
    Raises GristmillError when requests are left without an answer; whatever was answered stays in the journal.
    """
    with Lease(job.layout.journal / f"{job.name}.lease", job.name, runner_gone) as lease:
        wanted = _wanted(job)
        found = scan(job.layout.journal, wanted, job.name)
        missing = sum(map(len, wanted.values())) - len(found)
        total = sum(shard.rows for shard in job.shards)
        print(f"group {job.name}: {total:,} rows, {missing:,} to ask", file=sys.stderr, flush=True)
        if missing:
            _Attempt(job, lease, job.new_attempt()).ask(_pending(job, found), missing)
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


@dataclass(frozen=True)
class _Attempt:
    """One attempt of a group's job, with a journal and an engine log of its own."""

    job: Job
    lease: Lease
    name: str

    @property
    def engine_log(self) -> Path:
        return self.job.layout.logs / f"{self.name}.engine.log"

    def ask(self, requests: Iterator[Request], total: int) -> None:
        """Ask `total` requests. Raises GristmillError, which names every log, when some have no answer then."""
        first = next(requests)
        try:
            target = self.job.target()
            asyncio.run(self._ask(target, first.route, chain([first], requests), total))
        except GristmillError as error:
            raise self._with_logs(error) from error

    async def _ask(self, target: Attachment | Launch, route: str, requests: Iterator[Request], total: int) -> None:
        job, until = self.job, deadline(self.job.runtime_min)
        endpoint = self._endpoint(target, route)
        with stopping(until, lambda: self.lease.wanted) as stop:
            try:
                with Journal(job.layout.journal / f"{self.name}.jsonl") as journal:
                    async with endpoint:
                        window = Window(endpoint, journal, job.check, job.concurrency, total, until)
                        stop.attach(window)
                        tally = await window.run(requests)
            except asyncio.CancelledError as error:
                raise GristmillError(
                    f"group {job.name}: stopped ({stop.why}) while {endpoint.name} was starting",
                    help="run the same command again",
                ) from error
        if tally.answered < total:
            raise _incomplete(job, window, total)

    def _endpoint(self, target: Attachment | Launch, route: str) -> AttachedEndpoint | EngineEndpoint:
        if isinstance(target, Attachment):
            return AttachedEndpoint(target, route)
        return EngineEndpoint(target, route, self.engine_log, self.job.start_timeout_s, self.job.restarts)

    def _with_logs(self, error: GristmillError) -> GristmillError:
        logs = {"engine": self.engine_log, "job": self.job.layout.job_log(self.job.name)}
        named = [f"\n  {what} log: {path.absolute()}" for what, path in logs.items() if path.exists()]
        if (job_id := slurm.this_job()) is not None and (path := slurm.output_of_job(job_id)):
            named.append(f"\n  Slurm log: {path}")
        return GristmillError(
            error.found, where=f"{error.where or self.job.layout.journal}{''.join(named)}", help=error.help
        )


def _incomplete(job: Job, window: Window, total: int) -> GristmillError:
    tally = window.tally
    left = total - tally.answered
    lines = [f"  {id!r}: {reason}" for id, reason in tally.unanswered[:5]]
    why = f": {window.stopped_because}" if window.stopped_because else ""
    return GristmillError(
        f"group {job.name}: {left:,} of {total:,} requests have no answer yet{why}" + "".join(f"\n{x}" for x in lines),
        help="run the same command again: it asks for these alone, what was answered is in the journal; "
        "a request that fails each time must be taken out of the input",
    )


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
