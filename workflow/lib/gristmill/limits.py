"""What a campaign may cost: spent so far over all its attempts, what it will come to, and when to stop."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gristmill.campaign import Limits
from gristmill.telemetry import Snapshot, duration, is_stale, last_snapshots

PROJECTED_FROM = 0.02  # of all rows
_READ_S = 10.0


@dataclass(frozen=True)
class Spent:
    """requests: sent, retries included. tokens: prompt and answer, by the usage of answers. answered: requests."""

    gpu_hours: float = 0.0
    requests: int = 0
    tokens: int = 0
    answered: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.gpu_hours + other.gpu_hours,
            self.requests + other.requests,
            self.tokens + other.tokens,
            self.answered + other.answered,
        )


def spent_by(snapshots: Iterable[Snapshot]) -> Spent:
    """What attempts have cost, each given by its last snapshot."""
    total = Spent()
    for seen in snapshots:
        tokens = seen.prompt_tokens + seen.completion_tokens
        total += Spent(seen.gpu_s / 3600, seen.sent, tokens, seen.answered)
    return total


def reached(limits: Limits, spent: Spent, now: float) -> str | None:
    """Why no more may be asked. now: Unix time, seconds."""
    for name, amount, most in _amounts(limits, spent):
        if most is not None and amount >= most:
            return f"limits.{name} is reached: {_shown(amount)} of {_shown(most)}"
    if limits.deadline is not None and now >= limits.deadline.timestamp():
        return f"limits.deadline has come: {_moment(limits.deadline)}"
    return None


def projection(limits: Limits, spent: Spent, rows: int, rate: float, now: float) -> list[str]:
    """What the campaign will come to, one sentence for each limit; nothing before 2 % of its rows are answered.

    rows: of the whole campaign. rate: answers per second, of all jobs that run.
    """
    if not rows or spent.answered < PROJECTED_FROM * rows:
        return []
    told = []
    for name, amount, most in _amounts(limits, spent):
        if most is not None:
            whole = amount / spent.answered * rows
            verdict = "enough" if whole <= most else f"it will stop at {min(1.0, most / whole):.0%} of the rows"
            told.append(f"limits.{name}: the whole campaign needs about {_shown(whole)} of {_shown(most)}: {verdict}")
    if limits.deadline is not None and rate > 0:
        left = limits.deadline.timestamp() - now
        need = (rows - spent.answered) / rate
        verdict = "enough" if need <= left else "too little"
        told.append(
            f"limits.deadline: about {duration(need)} are needed and {duration(max(left, 0))} are left: {verdict}"
        )
    return told


def _amounts(limits: Limits, spent: Spent) -> list[tuple[str, float, float | None]]:
    return [
        ("gpu_hours", spent.gpu_hours, limits.gpu_hours),
        ("requests", spent.requests, limits.requests),
        ("tokens", spent.tokens, limits.tokens),
    ]


def _moment(when: datetime.datetime) -> str:
    return when.isoformat(sep=" ", timespec="minutes")


def _shown(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 or amount == int(amount) else f"{amount:.3g}"


class Meter:
    """Keeps a running attempt within the limits, counting what all other attempts of the campaign have spent.

    folder: with their telemetry, read every few seconds. own: the attempt's name. rows: of the whole campaign.
    """

    def __init__(self, limits: Limits, folder: Path, own: str, rows: int) -> None:
        self._limits, self._folder, self._own, self.rows = limits, folder, own, rows
        self._others = Spent()
        self._others_rate = 0.0
        self._read_at = float("-inf")

    @property
    def is_set(self) -> bool:
        limits = self._limits
        return any(x is not None for x in (limits.gpu_hours, limits.requests, limits.tokens, limits.deadline))

    def reached(self, own: Snapshot) -> str | None:
        """Why nothing more may be sent."""
        return reached(self._limits, self._spent(own), own.at) if self.is_set else None

    def why_not(self, sent: int, would_end: float) -> str | None:
        """Why one more request may not be sent, after so many; its answer is expected at `would_end`, Unix time."""
        limits = self._limits
        if limits.requests is not None:
            self._look_at_others()
        if limits.requests is not None and self._others.requests + sent >= limits.requests:
            return f"limits.requests is reached: {self._others.requests + sent:,} of {limits.requests:,}"
        if limits.deadline is not None and would_end >= limits.deadline.timestamp():
            return f"limits.deadline comes: {_moment(limits.deadline)}"
        return None

    def projection(self, own: Snapshot) -> list[str]:
        """What the campaign will come to."""
        if not self.is_set:
            return []
        return projection(self._limits, self._spent(own), self.rows, self._others_rate + own.rate, own.at)

    def _spent(self, own: Snapshot) -> Spent:
        self._look_at_others()
        return self._others + spent_by([own])

    def _look_at_others(self) -> None:
        if time.monotonic() - self._read_at < _READ_S:
            return
        self._read_at, now = time.monotonic(), time.time()
        others = [seen for name, seen in last_snapshots(self._folder) if name != self._own]
        self._others = spent_by(others)
        self._others_rate = sum(seen.rate for seen in others if not seen.ended and not is_stale(seen, now))
