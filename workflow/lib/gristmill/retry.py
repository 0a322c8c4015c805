"""When to try again, how long to wait, and when to stop trying: decisions over plain numbers."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

from gristmill.outcomes import Transient

MAX_TRIES = 6  # of one request while its endpoint is alive
MAX_BUSY_S = 900.0  # seconds that one request waits for an endpoint that says it is busy
MAX_DELAY_S = 30.0
RETRY_BURST = 50.0
RETRY_SHARE = 0.25  # of the answers
RETRIES_PER_S = 1.0
PROBE_S = 1.0  # before the first tiny generation asked of an endpoint that fails
PATIENCE_S = 120.0  # how long an endpoint may fail the tiny generation, too, before the run stops
MAX_UNANSWERED = 100  # requests given up before the run stops: more of them say that the endpoint is sick

_FLOOR_S = 120.0  # queueing, prefill and a slow start
_FIRST_S_PER_TOKEN = 0.5  # assumed until an answer was timed
_SLACK = 4.0
DEFAULT_MAX_TOKENS = 4096
_RECENT = 256
_STALL_S = 30.0


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

    def usual_s(self) -> float:
        """What a recent answer took on average, seconds."""
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    def would_end(self, now: float) -> float:
        """When an answer would be there that took as long as the slowest recent one; on the clock of `now`, seconds."""
        return now + max(self.recent, default=0.0)

    def timeout_s(self, max_tokens: int | None) -> float:
        """Seconds after which a request is taken for lost: far more than it can need, never a fixed ten minutes."""
        per_token = _FIRST_S_PER_TOKEN if self.seconds_per_token is None else self.seconds_per_token
        tokens = max_tokens or DEFAULT_MAX_TOKENS
        # A short answer's time is mostly queueing and prefill: its seconds per token say nothing of a long one.
        per_token = min(per_token, 2.0)
        seconds = _FLOOR_S + _SLACK * (self.slowest_s + tokens * per_token)
        # In steps of a tenth: it goes into a header, and equal headers are made once.
        return 1.1 ** math.ceil(math.log(seconds, 1.1))

    def stall_s(self) -> float:
        """Seconds without any progress after which the engine is asked whether it still works."""
        return _STALL_S + 2 * max(self.recent, default=_FLOOR_S)


@dataclass
class Budget:
    """What all retries of a run together may cost: so many at once, then a share of the answers, and a trickle.

    A sick endpoint gets at most RETRY_BURST requests more than a healthy one, and one more each second.
    """

    _left: float = field(default_factory=lambda: RETRY_BURST)
    _at: float | None = None

    def earn(self) -> None:
        """An answer came."""
        self._left = min(RETRY_BURST, self._left + RETRY_SHARE)

    def spend(self, now: float) -> float:
        """Take one retry at `now` (seconds); gives the seconds to wait until it may be sent."""
        if self._at is not None:
            self._left = min(RETRY_BURST, self._left + (now - self._at) * RETRIES_PER_S)
        self._at = now
        self._left -= 1
        return max(0.0, -self._left / RETRIES_PER_S)


@dataclass
class Breaker:
    """Stops admission when nothing but failures comes, until a tiny generation succeeds.

    after: failures in a row that open it. most: how often it opens without an answer in between, which says that only
    tiny generations succeed.
    """

    after: int = 10
    most: int = 8
    opened: int = 0
    is_open: bool = False
    _row: int = 0

    def failure(self) -> bool:
        """A request failed; whether that opens it."""
        self._row += 1
        if self.is_open or self._row < self.after:
            return False
        self.opened += 1
        self.is_open = True
        return True

    def success(self) -> None:
        """An answer came."""
        self._row = self.opened = 0

    def close(self) -> None:
        """The tiny generation succeeded, or the engine is another one."""
        self.is_open, self._row = False, 0

    @property
    def is_hopeless(self) -> bool:
        """Whether it opened too often without an answer."""
        return self.opened >= self.most

    def pause_s(self, probes: int) -> float:
        """Seconds to wait before the next tiny generation, after so many that failed."""
        return random.uniform(0.5, 1.0) * min(MAX_DELAY_S, PROBE_S * 2.0 ** (probes + self.opened - 1))
