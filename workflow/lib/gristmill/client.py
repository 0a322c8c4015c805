"""Asks: one sliding window of requests over the shards of a group, each answer journalled as it arrives."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx2
import openai
import orjson
from openai import AsyncOpenAI

from gristmill import retry
from gristmill.endpoint import EndpointGone
from gristmill.errors import GristmillError, disk_error
from gristmill.journal import Journal
from gristmill.outcomes import AnswerCheck, Fatal, Final, Transient, classify, interpret
from gristmill.requests import Request

_HEADERS = {"Content-Type": "application/json"}
_REPORT_S = 10.0


class Endpoint(Protocol):
    """What the window needs of an endpoint."""

    name: str
    client: AsyncOpenAI

    def alive(self) -> bool: ...

    async def revive(self) -> None: ...

    async def trouble(self) -> str | None: ...


@dataclass
class Tally:
    """What a window did. unanswered: requests given up for now, with the last trouble."""

    sent: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    unanswered: list[tuple[str, str]] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return sum(self.outcomes.values())


class Window:
    """Sends requests with a fixed number in flight until they end or `stop` is called.

    concurrency: requests in flight. total: how many requests there are, for the progress line. until: deadline,
    monotonic seconds; no request is admitted that would not be answered before it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        journal: Journal,
        check: AnswerCheck,
        concurrency: int,
        total: int,
        until: float | None = None,
    ) -> None:
        self.tally = Tally()
        self.pace = retry.Pace()
        self._endpoint, self._journal, self._check = endpoint, journal, check
        self._concurrency, self._total, self._until = concurrency, total, until
        self._stopping: str | None = None
        self._fatal: GristmillError | None = None
        self._workers: list[asyncio.Task[None]] = []
        self._began = time.monotonic()

    @property
    def stopped_because(self) -> str | None:
        """Why admission stopped before the requests ended."""
        return self._stopping

    def stop(self, why: str, grace_s: float | None = None) -> None:
        """Admit no more requests; cancel those in flight after `grace_s` seconds (None: let them finish)."""
        if self._stopping is None:
            self._stopping = why
        if grace_s is not None:
            # While an engine is being started again nothing is in flight.
            grace_s = grace_s if self._endpoint.alive() else 0
            asyncio.get_running_loop().call_later(grace_s, self._cancel)

    def _cancel(self) -> None:
        for worker in self._workers:
            worker.cancel()

    async def run(self, requests: Iterator[Request]) -> Tally:
        """Send the requests and journal their answers. Raises GristmillError for what every request will meet."""
        reporter = asyncio.create_task(self._report())
        self._workers = [asyncio.create_task(self._work(requests)) for _ in range(min(self._concurrency, self._total))]
        try:
            results = await asyncio.gather(*self._workers, return_exceptions=True)
        finally:
            reporter.cancel()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        if self._fatal is not None:
            raise self._fatal
        return self.tally

    async def _work(self, requests: Iterator[Request]) -> None:
        try:
            while self._stopping is None and self._fatal is None:
                if self._until is not None and self.pace.would_end(time.monotonic()) > self._until:
                    return self.stop("the walltime of the job ends")
                request = next(requests, None)
                if request is None:
                    return
                await self._answer(request)
        except BaseException:
            self.stop("an error")  # the other workers finish what is in flight
            raise

    async def _answer(self, request: Request) -> None:
        """One request until it is final or given up."""
        began, began_unix = time.monotonic(), time.time()
        tries = 0
        max_tokens = _max_tokens(request.body)
        while True:
            tries += 1
            sent = time.monotonic()
            self.tally.sent += 1
            status, body, verdict = await self._send(request, max_tokens)
            if isinstance(verdict, Final):
                latency_s = time.monotonic() - sent
                self._record(request, status, body, tries, began_unix, latency_s)
                return
            if isinstance(verdict, Fatal):
                self._fatal = self._fatal or GristmillError(verdict.reason, help="correct the campaign and run again")
                return
            if not await self._recovered(request, verdict, tries, began):
                return

    async def _send(self, request: Request, max_tokens: int | None) -> tuple[int, str, Final | Transient | Fatal]:
        timeout = self.pace.timeout_s(max_tokens)
        try:
            response = await self._endpoint.client.post(
                request.route,
                cast_to=httpx2.Response,
                content=request.body,
                options={"timeout": timeout, "headers": _HEADERS},
            )
        except openai.APIStatusError as error:
            response = error.response
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            if isinstance(error, openai.APITimeoutError):
                return 0, "", Transient(f"no answer within {timeout:.0f} s")
            return 0, "", _disconnected(cause)
        except (httpx2.HTTPError, OSError) as error:
            return 0, "", _disconnected(error)
        except openai.OpenAIError as error:
            return 0, "", Transient(f"the client failed: {type(error).__name__}: {error}")
        body = response.content.decode("utf-8", "replace")
        return response.status_code, body, classify(response.status_code, body, response.headers)

    async def _recovered(self, request: Request, trouble: Transient, tries: int, began: float) -> bool:
        """Wait or bring the engine back; False when the request is given up for now."""
        if self._stopping is not None or self._fatal is not None:
            self._give_up(request, trouble.reason)
            return False
        # A dead engine is noticed by its keeper within a moment; its last connections break a little earlier.
        for _ in range(10 if trouble.disconnected else 0):
            if not self._endpoint.alive():
                break
            await asyncio.sleep(0.05)
        if not self._endpoint.alive():
            try:
                await self._endpoint.revive()
                return True
            except EndpointGone:
                self._give_up(request, "the engine died and may not be started again")
                self.stop(f"{self._endpoint.name} died once more than it may be restarted")
                return False
            except GristmillError as error:
                self._fatal = self._fatal or error
                self._give_up(request, error.found)
                return False
        pause = retry.delay(trouble, tries, time.monotonic() - began)
        if pause is None:
            self._give_up(request, trouble.reason)
            # One request that never succeeds must not stop the others, nor a dead endpoint be asked for all of them.
            sick = await self._endpoint.trouble()
            if sick is not None and self._endpoint.alive():
                self.stop(f"{self._endpoint.name} answers nothing any more: {sick}")
            elif len(self.tally.unanswered) > retry.MAX_UNANSWERED:
                self.stop(f"more than {retry.MAX_UNANSWERED} requests get no answer: {trouble.reason}")
            return False
        await asyncio.sleep(pause)
        return True

    def _give_up(self, request: Request, reason: str) -> None:
        self.tally.unanswered.append((request.id, reason))

    def _record(self, request: Request, status: int, body: str, tries: int, began: float, latency_s: float) -> None:
        answer = interpret(status, body, request.route, self._check)
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        record = {
            "fingerprint": request.fingerprint,
            "id": request.id,
            "outcome": answer.status,
            "answer": None if request.route == "/embeddings" else answer.answer,
            "usage": usage,
            "timings": {"sent": round(began, 3), "latency_s": round(latency_s, 4)},
            "attempts": tries,
            "http_status": status,
            "raw": body,
        }
        try:
            self._journal.append(record)
        except OSError as error:
            self._fatal = self._fatal or disk_error(error) or _unwritable(error, self._journal)
            return
        self.pace.observe(latency_s, answer.completion_tokens)
        self.tally.outcomes[answer.status] = self.tally.outcomes.get(answer.status, 0) + 1

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            rate = self.tally.answered / (time.monotonic() - self._began)
            done = f"{self.tally.answered:,} of {self._total:,} answered, {rate:.1f}/s"
            print(f"{done}, {self.tally.sent - self.tally.answered} more sent", file=sys.stderr, flush=True)


def _disconnected(cause: BaseException) -> Transient:
    return Transient(f"the connection failed: {type(cause).__name__}: {cause}", disconnected=True)


def _unwritable(error: OSError, journal: Journal) -> GristmillError:
    return GristmillError(
        f"the journal cannot be written: {error.strerror}",
        where=str(journal.path),
        help="look at the filesystem (quota, mount) and run the same command again; what was written is kept",
    )


def _max_tokens(body: bytes) -> int | None:
    data: dict[str, Any] = orjson.loads(body)
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(data.get(key), int):
            return int(data[key])
    return None
