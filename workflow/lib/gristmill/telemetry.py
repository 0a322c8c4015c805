"""What a group's job does while it runs: telemetry/<attempt>.jsonl, a line for each decision and every few seconds.

The last line of each file also says what the attempt cost so far, which outlives it: limits count all attempts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import orjson

_TAIL = 1 << 14

Bound = Literal["engine", "client", "source", "nobody"]


@dataclass(frozen=True)
class Snapshot:
    """A moment of an attempt. Rates are those of the last seconds; counts are of the whole attempt.

    at: Unix time, seconds. rows: requests of the group; total: those that this attempt has to ask. sent: requests,
    retries included. outcomes: answers by outcome. prompt_tokens, completion_tokens: by the usage of the answers.
    in_flight: requests; limit, reason: the last decision of admission. rate: answers/s. tokens_per_s: generated ones.
    running, waiting: requests in the engine; kv_use: share of its KV cache. bound: who sets the pace; nobody, while
    nothing is admitted (a restart, an endpoint that fails). gpu_s: GPU-seconds of the job so far.
    trouble: what went wrong last. ended: whether nothing more comes.
    """

    at: float
    group: str
    rows: int
    total: int
    sent: int = 0
    answered: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    limit: int = 0
    reason: str = ""
    rate: float = 0.0
    tokens_per_s: float = 0.0
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    bound: Bound = "nobody"
    gpu_s: float = 0.0
    trouble: str | None = None
    ended: bool = False

    @property
    def eta_s(self) -> float | None:
        """Seconds until everything is answered, at the present rate."""
        left = self.total - self.answered
        return left / self.rate if self.rate > 0 else None

    def line(self) -> str:
        """For a log: answered, rate, tokens/s, in flight, time left, errors."""
        bad = {name: count for name, count in self.outcomes.items() if name != "ok"}
        parts = [f"{self.answered:,} of {self.total:,} answered", f"{self.rate:.1f}/s"]
        parts += [f"{self.tokens_per_s:,.0f} tokens/s", f"{self.in_flight} in flight"]
        parts += [f"{duration(self.eta_s)} left"] if self.eta_s is not None else []
        parts += [f"{count:,} {name}" for name, count in sorted(bad.items())]
        parts += [f"{self.retries:,} retries"] if self.retries else []
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as H:MM:SS, or M:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Telemetry:
    """The file of one attempt. A full disk costs lines, nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            pass

    def write(self, snapshot: Snapshot) -> None:
        """Append a line."""
        if self._fd is None:
            return
        given = {name: value for name, value in asdict(snapshot).items() if value is not None}
        try:
            os.write(self._fd, orjson.dumps(given) + b"\n")
        except OSError:
            pass

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_FIELDS = {f.name for f in fields(Snapshot)}


def last_snapshots(folder: Path) -> Iterator[tuple[str, Snapshot]]:
    """The last line of every attempt, by the attempt's name; lines that are torn are passed over."""
    for path in sorted(folder.glob("*.jsonl")):
        snapshot = _last(path)
        if snapshot is not None:
            yield path.stem, snapshot


def _last(path: Path) -> Snapshot | None:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            data: dict[str, Any] = orjson.loads(line)
            return Snapshot(**{name: value for name, value in data.items() if name in _FIELDS})
        except (orjson.JSONDecodeError, TypeError):
            continue
    return None


def is_stale(snapshot: Snapshot, now: float | None = None) -> bool:
    """Whether its job is gone without a word: a killed one writes no last line."""
    return not snapshot.ended and (now or time.time()) - snapshot.at > 60
