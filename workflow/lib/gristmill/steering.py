"""Looks at the engine and at ourselves every second, decides how many requests may be in flight, and tells of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx2
import openai

from gristmill.admission import Limit, Observation, decide
from gristmill.errors import say
from gristmill.gauges import Gauges, parse
from gristmill.limits import Meter
from gristmill.progress import Display
from gristmill.retry import Pace
from gristmill.telemetry import Bound, Snapshot, Telemetry

if TYPE_CHECKING:
    from gristmill.client import Tally, Window

_TICKS_S = (0.5, 1.0)  # while the limit is looked for, and afterwards
_TOLD_S = 5.0
_RATE_OVER_S = 15.0
_CLIENT_BOUND = 0.85  # share of a core
_GAUGES_AGAIN_S = 60.0


class Steering:
    """Admission's eyes and hands.

    limit: the first one. snapshot: what stays the same of an attempt's snapshots. gpus: of its engine.
    display: shows it to whoever watches.
    """

    def __init__(
        self,
        limit: Limit,
        snapshot: Snapshot,
        telemetry: Telemetry | None = None,
        meter: Meter | None = None,
        gpus: int = 0,
        gpu_since: float | None = None,
        display: Display | None = None,
    ) -> None:
        self.limit = limit
        self._snapshot, self._telemetry, self._meter = snapshot, telemetry, meter
        self._gpus, self._gpu_since = gpus, gpu_since or time.time()
        self._display = display or Display(snapshot.group, snapshot.total)
        self._gauges: Gauges | None = None
        self._gauges_from = 0.0  # monotonic seconds; until then the engine is not asked for them
        self._seen: tuple[float, Tally, Gauges | None] | None = None
        self._history: deque[tuple[float, int, int]] = deque()
        self._busy_s = time.process_time()
        self._bound: Bound = "nobody"
        self._told_at = self._shown_at = time.monotonic()
        self._projected = False

    def why_not(self, tally: Tally, pace: Pace) -> str | None:
        """Why no further request may be sent: there are enough, or its answer would come after the deadline."""
        if self._meter is None:
            return None
        return self._meter.why_not(tally.sent, pace.would_end(time.time()))

    async def run(self, window: Window) -> None:
        """Decide again and again."""
        self._history.append((time.monotonic(), 0, 0))
        while True:
            ramping = self.limit.ramping and not self.limit.pinned
            await asyncio.sleep(_TICKS_S[0] if ramping else _TICKS_S[1])
            await self._look(window)
            before = self.limit
            if not window.is_paused:
                self.limit = decide(self._observe(window), self.limit)
            self._tell(window, changed=self.limit.requests != before.requests)
            window.pump()

    async def _look(self, window: Window) -> None:
        now = time.monotonic()
        if now < self._gauges_from or window.is_paused:
            return
        try:
            self._gauges = parse(await window.metrics())
        except (openai.OpenAIError, httpx2.HTTPError, OSError, RuntimeError):
            self._gauges = None
        if self._gauges is None:
            self._gauges_from = now + _GAUGES_AGAIN_S
        elif self.limit.pinned:
            self._gauges_from = now + _TOLD_S

    def _observe(self, window: Window) -> Observation:
        now, tally, gauges = time.monotonic(), replace(window.tally), self._gauges
        then, before, gauges_before = self._seen or (now - _TICKS_S[0], type(tally)(), None)
        self._seen = (now, replace(tally, outcomes=dict(tally.outcomes)), gauges)
        tokens = tally.completion_tokens + tally.prompt_tokens - before.completion_tokens - before.prompt_tokens
        worked = _difference(gauges, gauges_before)
        if worked is not None and worked > 0:
            window.progressed()
        preempted = 0
        if gauges and gauges_before and gauges.preemptions is not None and gauges_before.preemptions is not None:
            preempted = int(gauges.preemptions - gauges_before.preemptions)
        busy_s = time.process_time()
        share = (busy_s - self._busy_s) / max(now - then, 1e-3)
        self._busy_s = busy_s
        full = window.in_flight >= 0.9 * self.limit.requests and window.has_more
        self._bound = "client" if share > _CLIENT_BOUND else "engine" if full else "source"
        return Observation(
            seconds=now - then,
            in_flight=window.in_flight,
            full=full,
            completed=tally.answered - before.answered,
            completed_ever=tally.answered,
            latency_s=window.pace.usual_s(),
            tokens=int(worked) if worked is not None and worked >= 0 else tokens,
            by_engine=worked is not None and worked >= 0,
            refused=tally.refused - before.refused,
            timeouts=tally.timeouts - before.timeouts,
            deaths=tally.deaths - before.deaths,
            running=gauges.running if gauges else None,
            waiting=min(gauges.waiting, (gauges_before or gauges).waiting) if gauges else None,
            kv_use=gauges.kv_use if gauges else None,
            preempted=preempted,
        )

    def _tell(self, window: Window, changed: bool) -> None:
        now = time.monotonic()
        self._history.append((now, window.tally.answered, window.tally.completion_tokens))
        while now - self._history[0][0] > _RATE_OVER_S:
            self._history.popleft()
        snapshot = self._now(window.tally, window.in_flight)
        if window.is_paused:
            snapshot = replace(snapshot, bound="nobody")
        if changed or now - self._told_at >= _TOLD_S:
            self._told_at = now
            if self._telemetry is not None:
                self._telemetry.write(snapshot)
        self._display.move(snapshot)
        if now - self._shown_at >= _TOLD_S:
            self._shown_at = now
            self._display.line(snapshot)
        if self._meter is not None:
            self._keep_within(self._meter, snapshot, window)

    def _keep_within(self, meter: Meter, snapshot: Snapshot, window: Window) -> None:
        why = meter.reached(snapshot)
        if why is not None and window.stopped_because is None:
            window.stop(why)
        self._project(snapshot)

    def _project(self, snapshot: Snapshot) -> None:
        """Say once what the whole campaign will come to."""
        if self._meter is None or self._projected:
            return
        for sentence in self._meter.projection(snapshot):
            self._projected = True
            say(sentence)

    def _now(self, tally: Tally, in_flight: int) -> Snapshot:
        gauges = self._gauges
        (then, answered, tokens), (now, *_) = self._history[0], self._history[-1]
        seconds = max(now - then, _TICKS_S[0])
        return replace(
            self._snapshot,
            at=time.time(),
            sent=tally.sent,
            answered=tally.answered,
            outcomes=dict(tally.outcomes),
            retries=tally.retries,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            in_flight=in_flight,
            limit=self.limit.requests,
            reason=self.limit.reason,
            rate=round((tally.answered - answered) / seconds, 3),
            tokens_per_s=round((tally.completion_tokens - tokens) / seconds, 1),
            running=gauges.running if gauges else None,
            waiting=gauges.waiting if gauges else None,
            kv_use=gauges.kv_use if gauges else None,
            bound=self._bound,
            gpu_s=round(self._gpus * (time.time() - self._gpu_since), 1),
            trouble=tally.trouble,
        )

    def close(self, window: Window) -> None:
        """Tell of the end."""
        self._history.append((time.monotonic(), window.tally.answered, window.tally.completion_tokens))
        snapshot = replace(self._now(window.tally, window.in_flight), ended=True, bound="nobody")
        if self._telemetry is not None:
            self._telemetry.write(snapshot)
        self._display.line(snapshot)
        self._project(snapshot)


def _difference(now: Gauges | None, before: Gauges | None) -> float | None:
    """Tokens that the engine worked on in between; None when it does not say, negative when it is another one."""
    if now is None or before is None or now.generated_tokens is None or before.generated_tokens is None:
        return None
    generated = now.generated_tokens - before.generated_tokens
    return generated + (now.prompt_tokens or 0) - (before.prompt_tokens or 0)
