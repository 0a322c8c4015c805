"""Admission: decisions by table, and what they come to on engines whose throughput is a known curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.admission import MAX_REQUESTS, Limit, Observation, decide, queue_target

QUIET = Observation(seconds=0.5, in_flight=16, full=True, completed=10, completed_ever=100)
HELD = Limit(16, ramping=False)


@pytest.mark.parametrize(
    ("changes", "limit", "requests", "reason"),
    [
        ({"completed_ever": 0, "completed": 0}, Limit(16), 16, "no growth before the first answer"),
        ({"completed_ever": 0, "waiting": 0.0, "running": 16.0}, Limit(16), 16, "no growth before the first answer"),
        ({"waiting": 1.0, "running": 15.0}, Limit(16), 16, "the engine is full"),
        ({"waiting": 4.0, "running": 12.0}, Limit(16), 16, "the engine is full"),
        ({"waiting": 8.0, "running": 8.0}, Limit(16), 10, "the queue is long enough"),
        ({"waiting": 16.0, "running": 0.0}, Limit(16), 2, "the queue is long enough"),
        ({"waiting": 2.0, "running": 14.0, "preempted": 5}, Limit(16), 14, "5 preempted for want of KV cache"),
        ({"waiting": 0.0, "running": 16.0, "kv_use": 0.99}, Limit(16), 16, "the KV cache is full"),
        ({"refused": 3}, Limit(16), 11, "3 refused"),
        ({"timeouts": 1}, Limit(16), 11, "1 timed out"),
        ({"refused": 1, "in_flight": 4}, Limit(100), 2, "1 refused"),
        ({"refused": 1, "in_flight": 0}, Limit(1), 1, "1 refused"),
        ({"refused": 9}, Limit(16, cooling_s=3.0), 16, "as it is, after trouble"),
        ({"deaths": 1}, Limit(16, cooling_s=3.0), 11, "1 died"),
        ({"full": False}, Limit(16), 16, "not all of it is used"),
        ({}, Limit(16), 16, "measuring"),
        ({"completed": 80, "seconds": 1.0}, Limit(16), 32, "does more bring more?"),
        ({"completed": 80, "seconds": 1.0}, HELD, 16, "more brought nothing"),
        ({"completed": 80, "seconds": 1.0}, replace(HELD, calm_s=100.0), 24, "does more bring more?"),
        ({"completed": 80, "seconds": 1.0}, Limit(32, base=(16, 79.0)), 16, "32 brought +1%"),
        ({"completed": 80, "seconds": 1.0}, Limit(32, base=(16, 60.0)), 64, "does more bring more?"),
        ({"completed": 80, "seconds": 1.0, "refused": 4}, Limit(32, pinned=True), 32, "pinned by endpoint.concurrency"),
        ({"completed": 9000, "seconds": 1.0}, Limit(MAX_REQUESTS), MAX_REQUESTS, "the most there can be"),
    ],
)
def test_a_decision_and_its_reason(changes: dict[str, float], limit: Limit, requests: int, reason: str) -> None:
    made = decide(replace(QUIET, **changes), limit)  # type: ignore[arg-type]
    assert (made.requests, made.reason) == (requests, reason)


@given(
    st.builds(
        Observation,
        seconds=st.floats(0.1, 5),
        in_flight=st.integers(0, 5000),
        full=st.booleans(),
        completed=st.integers(0, 1000),
        completed_ever=st.integers(0, 10000),
        latency_s=st.floats(0, 1000),
        tokens=st.integers(0, 10**7),
        refused=st.integers(0, 3),
        timeouts=st.integers(0, 3),
        deaths=st.integers(0, 1),
        running=st.none() | st.floats(0, 5000),
        waiting=st.none() | st.floats(0, 5000),
        kv_use=st.none() | st.floats(0, 1),
        preempted=st.integers(0, 50),
    ),
    st.builds(
        Limit,
        requests=st.integers(1, MAX_REQUESTS),
        ramping=st.booleans(),
        base=st.none() | st.tuples(st.integers(1, MAX_REQUESTS), st.floats(0, 1e6)),
        cooling_s=st.floats(0, 5),
    ),
)
def test_a_limit_is_always_possible_and_never_grows_before_an_answer_or_in_trouble(
    seen: Observation, limit: Limit
) -> None:
    made = decide(seen, limit)
    assert 1 <= made.requests <= MAX_REQUESTS
    assert made.reason
    if seen.completed_ever == 0 or seen.refused or seen.timeouts or seen.deaths:
        assert made.requests <= limit.requests
    if seen.waiting is not None and seen.running is not None and seen.waiting >= 1:
        assert made.requests <= limit.requests


Curve = Callable[[int], float]  # requests running → answers per second


def settled(curve: Curve, seats: int | None, start: int, gauges: bool, seconds: float = 60) -> list[tuple[int, str]]:
    """Limits over time on an engine with a throughput curve; it runs at most `seats` requests, others wait."""
    limit, ever, history = Limit(start), 0.0, []
    for _ in range(int(seconds * 2)):
        running = min(limit.requests, seats or limit.requests)
        rate = curve(running)
        before, ever = int(ever), ever + rate * 0.5
        seen = Observation(
            seconds=0.5,
            in_flight=limit.requests,
            full=True,
            completed=int(ever) - before,
            completed_ever=int(ever),
            latency_s=limit.requests / rate,
            by_engine=gauges,
            running=float(running) if gauges else None,
            waiting=float(limit.requests - running) if gauges else None,
        )
        limit = decide(seen, limit)
        history.append((limit.requests, limit.reason))
    return history


CURVES: dict[str, Curve] = {
    "linear until it is full": lambda n: min(n, 100) * 2.0,
    "saturating": lambda n: 200 * n / (n + 40),
    "falling beyond its best": lambda n: 3.0 * n if n <= 60 else max(20.0, 180 - 1.5 * (n - 60)),
}


@pytest.mark.parametrize("name", list(CURVES))
@pytest.mark.parametrize("start", [1, 16, 64])
def test_without_gauges_the_limit_settles_where_more_brings_nothing(name: str, start: int) -> None:
    curve = CURVES[name]
    history = settled(curve, None, start, gauges=False, seconds=400)
    best = max(curve(n) for n in range(1, 512))
    assert curve(history[-1][0]) >= 0.9 * best


@pytest.mark.parametrize("seats", [1, 4, 64, 256, 1000])
def test_with_gauges_few_requests_wait_and_always_some(seats: int) -> None:
    history = settled(lambda n: n * 2.0, seats, 16, gauges=True)
    assert seats + 1 <= history[-1][0] <= seats + 2 * queue_target(seats)
    reached = next(i for i, (limit, _) in enumerate(history) if limit > seats)
    assert reached * 0.5 <= 2 + 2 * 6 * 1.5, "a second or two for each doubling"


def test_a_limit_that_is_too_large_from_the_start_shrinks() -> None:
    history = settled(lambda n: n * 2.0, 4, 64, gauges=True)
    assert 5 <= history[-1][0] <= 8
