"""Asks: one sliding window of requests over the shards of a group, each answer journalled as it arrives."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import httpx2
import openai
import orjson
from openai import AsyncOpenAI

from gristmill import retry
from gristmill.admission import Limit
from gristmill.endpoint import EndpointGone
from gristmill.errors import GristmillError, disk_error, say
from gristmill.journal import Journal, JournalWriter
from gristmill.ordering import Queued
from gristmill.outcomes import AnswerCheck, Fatal, Transient, Verdict, classify, interpret
from gristmill.steering import Steering
from gristmill.suspects import Suspects

_GUARD_S = 0.2
_LET_FAIL_S = 5.0  # requests in flight break by themselves when their engine dies
_SUSPECT_S = 5.0  # a failure so long before an engine's death may be a part of it
_LEAST_WAITING = 16
_FORCED_S = 2.0

ENGINE_KILLER = "engine_killer"


class Endpoint(Protocol):
    """What the window needs of an endpoint."""

    name: str
    client: AsyncOpenAI

    def alive(self) -> bool: ...

    async def revive(self, *, counted: bool = True) -> None: ...

    async def trouble(self, timeout_s: float = ...) -> str | None: ...

    async def end_stuck(self) -> bool: ...

    async def metrics(self) -> str: ...


@dataclass
class Tally:
    """What a window did. unanswered: requests given up for now, with the last trouble.

    sent: requests, retries included. refused: 429 and 503. trouble: the last one.
    """

    sent: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    unanswered: list[tuple[str, str]] = field(default_factory=list)
    retries: int = 0
    refused: int = 0
    timeouts: int = 0
    deaths: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    trouble: str | None = None

    @property
    def answered(self) -> int:
        return sum(self.outcomes.values())


@dataclass(eq=False, slots=True)
class _Ask:
    """A request on its way. began: when it was sent first; sent, failed: its last try; monotonic seconds."""

    queued: Queued
    began: float
    began_unix: float
    tries: int = 0
    sent: float = 0.0
    failed: float = float("-inf")
    trouble: str = ""

    @property
    def id(self) -> str:
        return self.queued.request.id


class Window:
    """Sends requests, as many at a time as admission allows, until they end or `stop` is called.

    steering: decides how many. until: deadline, monotonic seconds; no request is admitted that would not be answered
    before it. twins: fingerprint → ids that get the answer of the one request with that fingerprint.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        journal: Journal,
        check: AnswerCheck,
        steering: Steering,
        until: float | None = None,
        twins: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.tally = Tally()
        self.pace = retry.Pace()
        self._endpoint, self._journal, self._check = endpoint, journal, check
        self._steering, self._until, self._twins = steering, until, twins or {}
        self._budget, self._breaker = retry.Budget(), retry.Breaker()
        self._suspects: Suspects[_Ask] = Suspects()
        self._flying: dict[_Ask, asyncio.Task[None]] = {}
        self._waiting: dict[_Ask, asyncio.TimerHandle] = {}  # for their next try
        self._again: deque[_Ask] = deque()  # whose wait is over
        self._casualties: list[_Ask] = []
        self._source: Iterator[Queued] = iter(())
        self._exhausted = False
        self._restarting: asyncio.Task[None] | None = None
        self._mending: asyncio.Task[None] | None = None
        self._stopping: str | None = None
        self._fatal: BaseException | None = None
        self._progress = time.monotonic()
        self._ended = asyncio.Event()
        self._writer: JournalWriter

    # -- what others ask of it -----------------------------------------------------------------------------------------

    @property
    def stopped_because(self) -> str | None:
        """Why admission stopped before the requests ended."""
        return self._stopping

    @property
    def limit(self) -> Limit:
        """The last decision of admission."""
        return self._steering.limit

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    @property
    def has_more(self) -> bool:
        """Whether there are requests that only the limit keeps back."""
        return not self._exhausted and not self.is_paused

    async def metrics(self) -> str:
        """The endpoint's own metrics. Raises what the OpenAI client raises."""
        return await self._endpoint.metrics()

    def progressed(self) -> None:
        """The engine was seen to work."""
        self._progress = time.monotonic()

    def stop(self, why: str, grace_s: float | None = None) -> None:
        """Admit no more requests; cancel those in flight after `grace_s` seconds (None: let them finish)."""
        if self._stopping is None:
            self._stopping = why
        for ask in [*self._waiting, *self._again]:
            self._give_up(ask)
        if grace_s is not None:
            # While an engine is being started again nothing is in flight.
            grace_s = grace_s if self._endpoint.alive() else 0
            asyncio.get_running_loop().call_later(grace_s, self._cancel)
        self.pump()

    async def run(self, requests: Iterator[Queued]) -> Tally:
        """Send the requests and journal their answers. Raises GristmillError for what every request will meet."""
        loop = asyncio.get_running_loop()

        def unwritable(error: OSError) -> None:
            loop.call_soon_threadsafe(self._unwritable, error)

        self._writer = JournalWriter(self._journal, unwritable)
        self._source = requests
        helpers = [loop.create_task(self._kept(work)) for work in (self._guard(), self._steering.run(self))]
        try:
            self.pump()
            await self._ended.wait()
        finally:
            tasks = [*helpers, *self._flying.values()]
            tasks += [task for task in (self._restarting, self._mending) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.shield(self._writer.close())
            self._steering.close(self)
        if self._fatal is not None:
            raise self._fatal
        return self.tally

    # -- admission -----------------------------------------------------------------------------------------------------

    @property
    def _is_over(self) -> bool:
        return self._stopping is not None or self._fatal is not None

    @property
    def is_paused(self) -> bool:
        """Whether nothing is sent for now: it is over, the engine starts again, or its endpoint answers nothing."""
        return self._is_over or self._restarting is not None or self._breaker.is_open

    def pump(self) -> None:
        """Send what may be sent; called whenever that may have changed."""
        try:
            while not self.is_paused and len(self._flying) < self.limit.requests:
                ask = self._next()
                if ask is None:
                    break
                self._launch(ask)
        except BaseException as error:
            self._fail(error)
        idle = not self._flying and self._restarting is None
        if idle and (self._is_over or (self._exhausted and not self._again and not self._waiting)):
            self._ended.set()

    def _next(self) -> _Ask | None:
        for ask in self._again:
            if self._suspects.may_be_admitted(ask):
                self._again.remove(ask)
                return ask
        # While an engine is sick its failures wait for another try: new requests would only join them.
        if self._suspects or len(self._waiting) >= max(self.limit.requests, _LEAST_WAITING):
            return None
        if self._exhausted:
            return None
        now = time.monotonic()
        if self._until is not None and self.pace.would_end(now) > self._until:
            self.stop("the walltime of the job ends")
            return None
        if (why := self._steering.why_not(self.tally, self.pace)) is not None:
            self.stop(why)
            return None
        queued = next(self._source, None)
        if queued is None:
            self._exhausted = True
            return None
        return _Ask(queued, now, time.time())

    def _launch(self, ask: _Ask) -> None:
        if not self._flying:
            self.progressed()
        ask.tries += 1
        ask.sent = time.monotonic()
        self.tally.sent += 1
        self._flying[ask] = asyncio.get_running_loop().create_task(self._fly(ask))

    async def _fly(self, ask: _Ask) -> None:
        try:
            status, body, verdict = await self._send(ask)
            del self._flying[ask]
            self._settle(ask, status, body, verdict)
        except asyncio.CancelledError:
            del self._flying[ask]
            self._failed(ask, Transient("it was cut off"))
        except BaseException as error:
            self._flying.pop(ask, None)
            self._fail(error)
        self.pump()

    async def _send(self, ask: _Ask) -> tuple[int, str, Verdict]:
        request, max_tokens = ask.queued.request, ask.queued.max_tokens
        timeout = self.pace.timeout_s(max_tokens)
        try:
            client = self._endpoint.client
            response = await client.post(
                f"{client.base_url}{request.route[1:]}",  # a relative one is parsed twice
                cast_to=httpx2.Response,
                content=request.body,
                options={"timeout": timeout},
            )
        except openai.APIStatusError as error:
            response = error.response
        except openai.APITimeoutError:
            return 0, "", Transient(f"no answer within {timeout:.0f} s", timed_out=True)
        except openai.APIConnectionError as error:
            return 0, "", _disconnected(error.__cause__ or error)
        except (httpx2.HTTPError, OSError) as error:
            return 0, "", _disconnected(error)
        except (openai.OpenAIError, RuntimeError) as error:  # a client that was closed raises RuntimeError
            return 0, "", Transient(f"the client failed: {type(error).__name__}: {error}")
        body = response.content.decode("utf-8", "replace")
        return response.status_code, body, classify(response.status_code, body, response.headers)

    # -- what becomes of a request -------------------------------------------------------------------------------------

    def _settle(self, ask: _Ask, status: int, body: str, verdict: Verdict) -> None:
        if isinstance(verdict, Transient):
            self._failed(ask, verdict)
        elif isinstance(verdict, Fatal):
            self._fail(GristmillError(verdict.reason, help="correct the campaign and run again"))
        else:
            self._record(ask, status, body, time.monotonic() - ask.sent)
            self.progressed()
            self._budget.earn()
            self._breaker.success()
            self._suspects.cleared(ask)

    def _failed(self, ask: _Ask, trouble: Transient) -> None:
        """Try it again later, or give it up for now."""
        now = time.monotonic()
        ask.trouble = trouble.reason
        if not trouble.unsent:
            ask.failed = now
        if self._is_over:
            return self._give_up(ask)
        if self._restarting is not None or not self._endpoint.alive():
            self._casualties.append(ask)
            return self._restart()
        self.tally.trouble = trouble.reason
        self.tally.refused += trouble.busy
        self.tally.timeouts += trouble.timed_out
        wait = retry.delay(trouble, ask.tries, now - ask.began)
        if wait is None:
            self._give_up(ask)
            # One request that never succeeds must not stop the others.
            if len(self.tally.unanswered) > retry.MAX_UNANSWERED:
                self.stop(f"more than {retry.MAX_UNANSWERED} requests get no answer: {trouble.reason}")
        else:
            if not trouble.busy:
                wait = max(wait, self._budget.spend(now))
            self.tally.retries += 1
            self._waiting[ask] = asyncio.get_running_loop().call_later(wait, self._is_due, ask)
        if not trouble.busy and self._breaker.failure():
            self._mend(trouble.reason)

    def _is_due(self, ask: _Ask) -> None:
        del self._waiting[ask]
        self._again.append(ask)
        self.pump()

    def _give_up(self, ask: _Ask) -> None:
        timer = self._waiting.pop(ask, None)
        if timer is not None:
            timer.cancel()
        elif ask in self._again:
            self._again.remove(ask)
        self.tally.unanswered.append((ask.id, ask.trouble))
        self._suspects.cleared(ask)

    def _record(self, ask: _Ask, status: int, body: str, latency_s: float) -> None:
        request = ask.queued.request
        answer = interpret(status, body, request.route, self._check)
        record = {
            "fingerprint": request.fingerprint,
            "id": request.id,
            "outcome": answer.status,
            "answer": None if request.route == "/embeddings" else answer.answer,
            "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens},
            "timings": {"sent": round(ask.began_unix, 3), "latency_s": round(latency_s, 4)},
            "attempts": ask.tries,
            "http_status": status,
            "raw": body,
        }
        self._writer.put(record)
        twins = self._twins.get(request.fingerprint or "", ())
        for id in twins:
            if id != request.id:
                self._writer.put({**record, "id": id, "attempts": 0})
        tally = self.tally
        if status == 200:
            self.pace.observe(latency_s, answer.completion_tokens)
        tally.prompt_tokens += answer.prompt_tokens or 0
        tally.completion_tokens += answer.completion_tokens or 0
        tally.outcomes[answer.status] = tally.outcomes.get(answer.status, 0) + max(1, len(twins))

    # -- an endpoint that is sick, or dead -----------------------------------------------------------------------------

    async def _guard(self) -> None:
        """Notice that the engine died, or that it is there and nothing is answered."""
        while True:
            await asyncio.sleep(_GUARD_S)
            if self._is_over or self._restarting is not None:
                continue
            if not self._endpoint.alive():
                self._restart()
            elif self._flying and time.monotonic() - self._progress > self.pace.stall_s():
                await self._ask_whether_it_works()

    async def _ask_whether_it_works(self) -> None:
        before, stalled_s = self._progress, time.monotonic() - self._progress
        reason = await self._endpoint.trouble(self.pace.stall_s())
        if reason is None:
            return self.progressed()
        if self._progress != before or self._is_over or not self._endpoint.alive():
            return
        say(f"{self._endpoint.name} answered nothing for {stalled_s:.0f} s, and no tiny generation ({reason})")
        self.progressed()
        if not await self._endpoint.end_stuck() and not self._breaker.is_open:
            self._breaker.is_open = True
            self._mend(reason)

    def _restart(self) -> None:
        if self._restarting is None and not self._is_over:
            self._restarting = asyncio.get_running_loop().create_task(self._kept(self._bring_back()))

    async def _bring_back(self) -> None:
        """Start a dead engine again, and find out whether one of the requests in flight killed it."""
        try:
            await self._let_fail()
            now = time.monotonic()
            for ask in [ask for ask in self._waiting if now - ask.failed < _SUSPECT_S]:
                self._waiting.pop(ask).cancel()
                self._casualties.append(ask)
            self._again.extend(self._casualties)
            suspected = sorted((a for a in self._again if now - a.failed < _SUSPECT_S), key=lambda ask: ask.sent)
            self._casualties.clear()
            self.tally.deaths += 1
            counted = self._judge(suspected)
            await self._endpoint.revive(counted=counted)
            self._breaker.close()
            self.progressed()
        except EndpointGone:
            for ask in self._again:
                ask.trouble = "the engine died and may not be started again"
            self.stop(f"{self._endpoint.name} died once more than it may be restarted")
        finally:
            for ask in self._casualties:
                self._give_up(ask)
            self._casualties.clear()
            self._restarting = None
            self.pump()

    async def _let_fail(self) -> None:
        deadline = time.monotonic() + _LET_FAIL_S
        while self._flying and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        tasks = list(self._flying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _judge(self, suspected: Sequence[_Ask]) -> bool:
        """Whether a death counts among those that an engine may have: one that narrows the suspects down does not."""
        before = len(self._suspects)
        killer = self._suspects.died(suspected)
        if killer is not None:
            self._again.remove(killer)
            message = f"the engine died each of the {killer.tries} times that this request was sent, at last alone"
            say(f"request {killer.id!r} kills the engine; it becomes an error ({ENGINE_KILLER})")
            error = {"code": ENGINE_KILLER, "message": message, "type": ENGINE_KILLER}
            self._record(killer, 0, orjson.dumps({"error": error}).decode(), time.monotonic() - killer.sent)
            return False
        if suspected and self._suspects:
            say(f"{len(self._suspects)} of the requests in flight may have killed the engine; they are tried in halves")
        return not 0 < len(self._suspects) < before

    def _mend(self, reason: str) -> None:
        if self._breaker.is_hopeless:
            return self.stop(f"{self._endpoint.name} answers nothing but tiny generations: {reason}", _FORCED_S)
        if self._mending is None:
            say(f"{self._endpoint.name} answers nothing ({reason}): nothing is sent until a tiny generation succeeds")
            self._mending = asyncio.get_running_loop().create_task(self._kept(self._probe()))

    async def _probe(self) -> None:
        """Until a tiny generation succeeds, the engine turns out to be dead, or patience ends."""
        began, probes = time.monotonic(), 0
        try:
            while self._breaker.is_open and not self._is_over:
                await asyncio.sleep(self._breaker.pause_s(probes))
                probes += 1
                reason = await self._endpoint.trouble(self.pace.stall_s()) if self._endpoint.alive() else "it is dead"
                if reason is None:
                    self._breaker.close()
                elif time.monotonic() - began > retry.PATIENCE_S and self._endpoint.alive():
                    self.stop(f"{self._endpoint.name} answers nothing any more: {reason}", _FORCED_S)
        finally:
            self._mending = None
            self.pump()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()
        for task in self._flying.values():
            task.cancel()

    def _fail(self, error: BaseException) -> None:
        """What ends the run: those in flight are still waited for."""
        self._fatal = self._fatal or error
        for ask in [*self._waiting, *self._again]:
            self._give_up(ask)

    def _unwritable(self, error: OSError) -> None:
        self._fail(disk_error(error) or _unwritable(error, self._journal))
        self.pump()

    async def _kept(self, work: Awaitable[None]) -> None:
        """Whatever goes wrong in work beside the requests ends the run."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)
            self.pump()


def _disconnected(cause: BaseException) -> Transient:
    unsent = isinstance(cause, httpx2.ConnectError)
    return Transient(f"the connection failed: {type(cause).__name__}: {cause}", unsent=unsent)


def _unwritable(error: OSError, journal: Journal) -> GristmillError:
    return GristmillError(
        f"the journal cannot be written: {error.strerror}",
        where=str(journal.path),
        help="look at the filesystem (quota, mount) and run the same command again; what was written is kept",
    )
