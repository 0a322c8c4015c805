"""The job of one shard group: find what the journals answer already, ask for the rest, write the group's answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path

import orjson
import psutil

from gristmill import slurm
from gristmill.admission import Limit
from gristmill.campaign import Limits
from gristmill.client import Window
from gristmill.endpoint import AttachedEndpoint, EngineEndpoint
from gristmill.engines import Attachment, Launch
from gristmill.errors import GristmillError
from gristmill.journal import Found, Journal, Place, Reader, scan
from gristmill.layout import Layout
from gristmill.lease import Lease
from gristmill.limits import Meter
from gristmill.manifest import Shard
from gristmill.ordering import Queued, ordered
from gristmill.outcomes import AnswerCheck
from gristmill.progress import Display
from gristmill.requests import Request, is_repeatable
from gristmill.shards import head, read_shard
from gristmill.steering import Steering
from gristmill.stopping import deadline, runner_gone, stopping
from gristmill.telemetry import Snapshot, Telemetry

_BEYOND = "raise the limit in the campaign (or remove it) and run the same command again; what was answered is kept"

_attempts = count()  # of this process


@dataclass(frozen=True)
class Job:
    """A group's job.

    target: gives the endpoint to attach to, or the engine to start (its address not chosen yet); called only when there
    is something to ask. limit: the first one of requests in flight. runtime_min: the time that its Slurm job asked for,
    minutes. limits: of the campaign, which has so many rows. gpus: of the engine. dedup: whether requests that are the
    same and repeatable are sent once.
    """

    name: str
    shards: Sequence[Shard]
    layout: Layout
    target: Callable[[], Attachment | Launch]
    check: AnswerCheck
    limit: Limit
    start_timeout_s: float
    restarts: int
    runtime_min: float | None = None
    limits: Limits = field(default_factory=Limits)
    rows: int = 0
    gpus: int = 0
    dedup: bool = True

    @property
    def size(self) -> int:
        """Rows of the group."""
        return sum(shard.rows for shard in self.shards)

    def new_attempt(self) -> str:
        """A name for this attempt, which no other has."""
        place = f"{slurm.this_job() or 'local'}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        return f"{self.name}.{place}-{next(_attempts)}"


def run_group(job: Job, output: Path) -> None:
    """Bring the answers of every request of the group to `output`, a folder with a JSONL file a shard.

    A line is {"id", "row", "fingerprint", "route", "model", "keep"} with "record" (the journal's) or "error" (never
    sent).
    Raises GristmillError when requests are left without an answer; whatever was answered stays in the journal.
    """
    with Lease(job.layout.journal / f"{job.name}.lease", job.name, runner_gone) as lease:
        wanted = _wanted(job)
        found = scan(job.layout.journal, wanted, job.name)
        missing = sum(map(len, wanted.values())) - len(found.places)
        print(f"group {job.name}: {job.size:,} rows, {missing:,} to ask", file=sys.stderr, flush=True)
        if missing:
            _Attempt(job, lease, job.new_attempt(), wanted, found).ask(missing)
            found = scan(job.layout.journal, wanted, job.name)
        _write_answers(job, found.places, output)


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


@dataclass(frozen=True)
class _Attempt:
    """One attempt of a group's job, with a journal, telemetry and an engine log of its own.

    wanted: fingerprint → ids of all requests that can be sent. found: what journals answer.
    """

    job: Job
    lease: Lease
    name: str
    wanted: dict[str, set[str]]
    found: Found
    twins: dict[str, list[str]] = field(default_factory=dict)

    @property
    def engine_log(self) -> Path:
        return self.job.layout.logs / f"{self.name}.engine.log"

    def ask(self, total: int) -> None:
        """Ask what is missing, `total` requests. Raises GristmillError, which names every log, when some is left."""
        try:
            with Journal(self.job.layout.journal / f"{self.name}.jsonl") as journal:
                total -= self._copy_answers(journal)
                first = next(requests := ordered(self._pending()), None)
                if first is not None:
                    self._refuse_beyond_limits()
                    target = self.job.target()
                    asyncio.run(self._ask(target, first.request.route, chain([first], requests), total, journal))
        except GristmillError as error:
            raise self._with_logs(error) from error

    def _missing(self) -> Iterator[Request]:
        for request in _requests(self.job):
            if request.fingerprint is not None and (request.fingerprint, request.id) not in self.found.places:
                yield request

    def _copy_answers(self, journal: Journal) -> int:
        """Answer what an answered request of another id has asked already; gives how many those are."""
        if not self.job.dedup or not self.found.others:
            return 0
        copied = 0
        with Reader() as reader:
            for request in self._missing():
                place = self.found.others.get(request.fingerprint or "")
                if place is not None and is_repeatable(request):
                    record = {**orjson.loads(reader.read(place)), "id": request.id, "attempts": 0}
                    journal.append(record)
                    self.found.places[record["fingerprint"], request.id] = place
                    copied += 1
        return copied

    def _pending(self) -> Iterator[Request]:
        """The requests to send: of those that are the same and repeatable the first, which answers for its twins."""
        for request in self._missing():
            fingerprint = request.fingerprint or ""
            if self.job.dedup and len(self.wanted[fingerprint]) > 1 and is_repeatable(request):
                if fingerprint in self.twins:
                    continue
                ids = self.wanted[fingerprint]
                self.twins[fingerprint] = sorted(id for id in ids if (fingerprint, id) not in self.found.places)
            yield request

    @cached_property
    def _meter(self) -> Meter:
        return Meter(self.job.limits, self.job.layout.telemetry, self.name, self.job.rows)

    def _snapshot(self, total: int) -> Snapshot:
        return Snapshot(time.time(), self.job.name, self.job.size, total)

    def _refuse_beyond_limits(self) -> None:
        """Before an engine is started for nothing."""
        why = self._meter.reached(self._snapshot(0))
        if why is not None:
            raise GristmillError(f"group {self.job.name}: {why}; nothing was sent", help=_BEYOND)

    async def _ask(
        self, target: Attachment | Launch, route: str, requests: Iterator[Queued], total: int, journal: Journal
    ) -> None:
        job, until = self.job, deadline(self.job.runtime_min)
        endpoint = self._endpoint(target, route)
        telemetry = Telemetry(job.layout.telemetry / f"{self.name}.jsonl")
        display = Display(job.name, total)
        since = psutil.Process().create_time()
        steering = Steering(job.limit, self._snapshot(total), telemetry, self._meter, job.gpus, since, display)
        with stopping(until, lambda: self.lease.wanted) as stop, contextlib.closing(telemetry), display:
            try:
                async with endpoint:
                    window = Window(endpoint, journal, job.check, steering, until, self.twins)
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
    beyond = window.stopped_because is not None and window.stopped_because.startswith("limits.")
    return GristmillError(
        f"group {job.name}: {left:,} of {total:,} requests have no answer yet{why}" + "".join(f"\n{x}" for x in lines),
        help=_BEYOND
        if beyond
        else "run the same command again: it asks for these alone, what was answered is in the journal; "
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
