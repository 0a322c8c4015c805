"""The order of requests: prefixes together, long ones first, nothing lost, little held."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from gristmill.ordering import looked_at, ordered
from gristmill.requests import Request


def request(id: str, text: str = "x", system: str | None = None, **fields: object) -> Request:
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return Request(id, 1, id, "/chat/completions", body, "m", {})


def ids(requests: list[Request], **settings: int) -> list[str]:
    return [queued.request.id for queued in ordered(requests, **settings)]


def test_those_with_the_same_system_prompt_follow_each_other() -> None:
    mixed = [request(f"{name}{i}", "t" * 50, system=name * 40) for i in range(3) for name in "ab"]
    assert ids(mixed) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_those_that_begin_alike_follow_each_other_though_there_is_no_system_prompt() -> None:
    mixed = [request(f"{name}{i}", name * 300 + f" question {i}") for i in range(2) for name in "ab"]
    assert ids(mixed) == ["a0", "a1", "b0", "b1"]
    other_route = [request("c").__class__("p", 1, "p", "/completions", b'{"model":"m","prompt":"x"}', "m", {})]
    assert looked_at(other_route[0]).prefix != looked_at(request("c")).prefix


def test_long_ones_come_before_short_ones() -> None:
    lengths = [10, 4000, 200, 9000]
    assert ids([request(str(n), f"{n}" + "y" * n) for n in lengths]) == ["9000", "4000", "200", "10"]
    answers = [request(f"{n}", f"{n} same", max_tokens=n) for n in (8, 4000, 100)]
    assert ids(answers) == ["4000", "100", "8"]


def test_about_the_same_size_keeps_its_order() -> None:
    assert ids([request(f"{i}", f"ask {i}", max_tokens=8) for i in (30, 1, 22, 3)]) == ["30", "1", "22", "3"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2000)), max_size=60), st.integers(1, 10))
def test_every_request_comes_once_and_no_window_is_left_early(shape: list[tuple[int, int]], window: int) -> None:
    made = [request(str(i), "z" * size, system=f"s{group}") for i, (group, size) in enumerate(shape)]
    order = ids(made, window=window)
    assert sorted(order, key=int) == [r.id for r in made]
    for start in range(0, len(made), window):
        assert {int(id) for id in order[start : start + window]} == set(range(start, min(start + window, len(made))))


def test_what_is_held_is_bounded_in_bytes() -> None:
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        while True:
            taken += 1
            yield request(str(taken), "w" * 1000)

    next(ordered(endless(), window=10**9, window_bytes=50_000))
    assert taken <= 51


def test_the_size_of_an_answer_is_read_from_each_of_its_names() -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        assert looked_at(request("a", **{name: 77})).max_tokens == 77
    for odd in (None, 0, -1, "8", True, 1.5):
        assert looked_at(request("a", max_tokens=odd)).max_tokens is None
    for route, body in (("/embeddings", {"input": ["a", "b"]}), ("/responses", {"input": "x", "instructions": "y"})):
        assert looked_at(Request("e", 1, "e", route, json.dumps({"model": "m", **body}).encode(), "m", {})).cost > 0
