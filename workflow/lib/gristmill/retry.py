"""When to try again, and when to stop trying: pure decisions over plain numbers."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from gristmill.outcomes import Transient

MAX_TRIES = 6  # of one request while its endpoint is alive
MAX_BUSY_S = 900.0  # seconds that one request waits for an endpoint that says it is busy
MAX_DELAY_S = 30.0
MAX_UNANSWERED = 100  # requests given up before the run stops: more of them say that the endpoint is sick

_FLOOR_S = 120.0  # queueing, prefill and a slow start
_FIRST_S_PER_TOKEN = 0.5  # assumed until an answer was timed
_SLACK = 4.0
DEFAULT_MAX_TOKENS = 4096
_RECENT = 256


def delay(trouble: Transient, tries: int, elapsed_s: float) -> float | None:
    """Seconds to wait before the next try (full jitter), or None to give the request up.

    tries: how often it was sent. elapsed_s: seconds since it was sent first.
    """
    if trouble.busy:
        if elapsed_s > MAX_BUSY_S:
            return None
    elif tries >= MAX_TRIES:
        return None
    if trouble.retry_after is not None:
        return trouble.retry_after + random.uniform(0, 1)
    return random.uniform(0, min(MAX_DELAY_S, 0.5 * 2**tries))


@dataclass
class Pace:
    """What answers took so far; gives the timeout of a request.

    seconds_per_token: the slowest rate seen, None before the first answer. slowest_s: the slowest answer, seconds.
    recent: what the last answers took, seconds.
    """

    seconds_per_token: float | None = None
    slowest_s: float = 0.0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def observe(self, latency_s: float, completion_tokens: int | None) -> None:
        """Take note of an answer."""
        self.slowest_s = max(self.slowest_s, latency_s)
        self.recent.append(latency_s)
        if completion_tokens:
            rate = latency_s / completion_tokens
            self.seconds_per_token = max(self.seconds_per_token or 0.0, rate)

    def would_end(self, now: float) -> float:
        """When an answer would be there that took as long as the slowest recent one; on the clock of `now`, seconds."""
        return now + max(self.recent, default=0.0)

    def timeout_s(self, max_tokens: int | None) -> float:
        """Seconds after which a request is taken for lost: far more than it can need, never a fixed ten minutes."""
        per_token = _FIRST_S_PER_TOKEN if self.seconds_per_token is None else self.seconds_per_token
        tokens = max_tokens or DEFAULT_MAX_TOKENS
        # A short answer's time is mostly queueing and prefill: its seconds per token say nothing of a long one.
        per_token = min(per_token, 2.0)
        return _FLOOR_S + _SLACK * (self.slowest_s + tokens * per_token)
