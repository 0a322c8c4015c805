"""How many requests may be in flight: pure decisions over what was seen of the engine.

The engine should never wait for us. Where it exports gauges, its waiting queue is held small and positive; where it
does not, the limit grows as long as that raises the delivered throughput. An endpoint that refuses (429, 503), times
out or dies gets less in either case, and nothing grows before the first completion: an engine's queue never says no.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_REQUESTS = 4096
_RAMP = 2.0  # the step, and the gain in throughput that keeps it, until a step brings nothing
_RAMP_GAIN = 1.08
_STEP = 1.5  # the same afterwards, measured for longer
_GAIN = 1.03
_RETRY_S = 60.0  # between steps once one brought nothing
_KV_FULL = 0.97
_BACK = 0.7  # what is left of the limit after trouble
_COOLING_S = 5.0
_MEASURE_S = (1.0, 60.0)  # least and longest time of a measurement
_EVENTS = 32  # answers that a measurement needs while ramping


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen since the last decision.

    seconds: how long that is. in_flight: requests now. full: whether the limit was what held more of them back.
    completed: answers; completed_ever: of the whole run. latency_s: of a recent answer, on average, seconds.
    tokens: prompt and generated ones; by_engine: by its counters, as it works, rather than by the usage of answers.
    refused: 429 and 503. timeouts: requests without an answer in time. deaths: of the engine.
    running, waiting: the engine's gauges, requests; None where it has none. waiting is the least of the last readings,
    for what arrives while the engine works on a step waits for the next one. kv_use: share of the KV cache in use.
    preempted: requests that the engine put back since the last decision, for want of KV cache.
    """

    seconds: float
    in_flight: int
    full: bool
    completed: int
    completed_ever: int
    latency_s: float = 0.0
    tokens: int = 0
    by_engine: bool = False
    refused: int = 0
    timeouts: int = 0
    deaths: int = 0
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    preempted: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """Throughput under one limit: what was delivered in so many seconds."""

    seconds: float = 0.0
    completed: int = 0
    tokens: int = 0

    def and_then(self, seen: Observation) -> Measurement:
        return Measurement(self.seconds + seen.seconds, self.completed + seen.completed, self.tokens + seen.tokens)

    def rate(self) -> float:
        """Tokens per second, or answers where there are no tokens, as with embeddings."""
        return (self.tokens or self.completed) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Limit:
    """A decision: how many requests may be in flight, and why; and what the next decision needs of the past.

    pinned: never changed. ramping: until a step brought nothing. queued: the engine was full under it. settling_s: time
    until the limit's effect is seen, in which nothing is measured. cooling_s: time after trouble, in which it stays.
    measured: throughput under it so far. base: the limit that this one is tried against, and its throughput.
    calm_s: time since a step brought nothing.
    """

    requests: int
    reason: str = "the start"
    pinned: bool = False
    ramping: bool = True
    queued: bool = False
    settling_s: float = 0.0
    cooling_s: float = 0.0
    measured: Measurement = Measurement()
    base: tuple[int, float] | None = None
    calm_s: float = 0.0


def decide(seen: Observation, limit: Limit) -> Limit:
    """The next limit. Its `reason` says why it is what it is."""
    if limit.pinned:
        return replace(limit, reason="pinned by endpoint.concurrency")
    cooling = max(0.0, limit.cooling_s - seen.seconds)
    limit = replace(limit, cooling_s=cooling, calm_s=limit.calm_s + seen.seconds)
    for trouble, count in (("died", seen.deaths), ("refused", seen.refused), ("timed out", seen.timeouts)):
        if count and (cooling == 0 or trouble == "died"):
            requests = max(1, int(min(limit.requests, max(seen.in_flight, 1)) * _BACK))
            return Limit(requests, f"{count} {trouble}", ramping=False, cooling_s=_COOLING_S)
    if seen.completed_ever == 0:
        return replace(limit, reason="no growth before the first answer")
    if cooling > 0:
        return replace(limit, reason="as it is, after trouble")
    if seen.waiting is not None and seen.running is not None:
        by_queue = _by_queue(seen, limit, seen.running, seen.waiting)
        if by_queue is not None:
            return by_queue
    return _by_throughput(seen, limit)


def queue_target(running: float) -> int:
    """How many requests should wait in an engine: enough for the next step, however many end in one."""
    return max(2, round(running / 8))


def _by_queue(seen: Observation, limit: Limit, running: float, waiting: float) -> Limit | None:
    """What the engine's queue says; None when it is empty, so that growth is a matter of throughput."""
    target = queue_target(running)
    if waiting >= 1 and seen.preempted > max(1, seen.completed) * 0.1:
        return _held(limit, int(running), f"{seen.preempted} preempted for want of KV cache")
    if waiting > 2 * target:
        # What waits beyond the target is not replaced when it is answered.
        return _held(limit, seen.in_flight - int(waiting - target), "the queue is long enough")
    if waiting >= 1:
        return _held(limit, limit.requests, "the engine is full")
    if seen.kv_use is not None and seen.kv_use > _KV_FULL:
        return _held(limit, limit.requests, "the KV cache is full")
    if limit.queued and seen.full:
        more = min(MAX_REQUESTS, limit.requests + max(target, limit.requests // 4))
        return replace(limit, requests=more, reason="the queue ran empty", measured=Measurement(), base=None)
    return None


def _held(limit: Limit, most: int, reason: str) -> Limit:
    return Limit(max(1, min(limit.requests, most)), reason, ramping=False, queued=True)


def _by_throughput(seen: Observation, limit: Limit) -> Limit:
    """Try a larger limit, measure what it delivers, and keep it only for a gain."""
    if limit.settling_s > 0:
        return replace(limit, settling_s=max(0.0, limit.settling_s - seen.seconds), reason="settling")
    if not seen.full:
        return replace(limit, reason="not all of it is used", measured=Measurement())
    if limit.base is None and not limit.ramping and limit.calm_s < _RETRY_S:
        return replace(limit, reason="more brought nothing", measured=Measurement())
    measured = limit.measured.and_then(seen)
    if not _is_enough(measured, seen, limit):
        return replace(limit, measured=measured, reason="measuring")
    rate = measured.rate()
    if limit.base is not None:
        before, rate_before = limit.base
        if rate < rate_before * (_RAMP_GAIN if limit.ramping else _GAIN):
            gain = f"{rate / rate_before - 1:+.0%}" if rate_before else "nothing"
            return Limit(before, f"{limit.requests} brought {gain}", ramping=False)
    more = min(MAX_REQUESTS, max(limit.requests + 1, round(limit.requests * (_RAMP if limit.ramping else _STEP))))
    if more == limit.requests:
        return replace(limit, reason="the most there can be", measured=Measurement())
    settling_s = _MEASURE_S[0] / 2 if seen.by_engine else min(max(seen.latency_s, _MEASURE_S[0] / 2), _MEASURE_S[1])
    return Limit(
        more,
        "does more bring more?",
        ramping=limit.ramping,
        settling_s=settling_s,
        base=(limit.requests, rate),
        calm_s=limit.calm_s,
    )


def _is_enough(measured: Measurement, seen: Observation, limit: Limit) -> bool:
    least, most = _MEASURE_S
    if measured.seconds >= most:
        return True
    if limit.ramping:
        needed = _EVENTS if seen.by_engine else max(_EVENTS, limit.requests)
    else:
        needed = 2 * max(_EVENTS, limit.requests)
    return measured.seconds >= least and measured.completed >= min(needed, 4 * limit.requests)
