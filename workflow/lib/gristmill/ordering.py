"""In which order requests are sent: those that share a prefix together, long ones before short ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import orjson

from gristmill.requests import Request

WINDOW = 4096  # requests
WINDOW_BYTES = 32 << 20
_PREFIX = 256  # characters of the last message that tell whether two prompts begin alike
_BYTES_PER_TOKEN = 4
_DECODE = 16  # prompt tokens that an engine reads in the time of one step of an answer, roughly


class Queued(NamedTuple):
    """A request with what is known of its size. max_tokens: None where the request does not say."""

    request: Request
    max_tokens: int | None
    prefix: int
    cost: float


def looked_at(request: Request) -> Queued:
    """A request with its prefix (a hash), and its cost in the time of prompt tokens."""
    body: dict[str, Any] = orjson.loads(request.body)
    max_tokens = next(
        (body[key] for key in ("max_tokens", "max_completion_tokens", "max_output_tokens") if _is_count(body.get(key))),
        None,
    )
    cost = len(request.body) / _BYTES_PER_TOKEN + _DECODE * (max_tokens or 0)
    return Queued(request, max_tokens, hash((request.route, request.model, _beginning(body))), cost)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _beginning(body: dict[str, Any]) -> Any:
    """What the prompt begins with: all messages but the last, such as system prompt and few-shot, and a bit of that."""
    messages = body.get("messages")
    if isinstance(messages, list) and messages:
        last = messages[-1].get("content") if isinstance(messages[-1], dict) else None
        start = last[:_PREFIX] if isinstance(last, str) else orjson.dumps(last)[:_PREFIX]
        return (orjson.dumps(messages[:-1]), start)
    text = body.get("prompt", body.get("input"))
    head = body.get("instructions")
    return (head if isinstance(head, str) else "", text[:_PREFIX] if isinstance(text, str) else "")


def ordered(requests: Iterable[Request], window: int = WINDOW, window_bytes: int = WINDOW_BYTES) -> Iterator[Queued]:
    """The requests, window by window, in an order that an engine likes; not more than a window is held in memory.

    Within a window those with the same prefix follow each other, so that its KV cache is still there, and the long
    ones come first, so that the last ones to be answered are short. What costs about the same keeps its order.
    """
    batch: list[Queued] = []
    size = 0
    for request in requests:
        batch.append(looked_at(request))
        size += len(request.body)
        if len(batch) >= window or size >= window_bytes:
            yield from _sorted(batch)
            batch, size = [], 0
    yield from _sorted(batch)


def _sorted(batch: list[Queued]) -> list[Queued]:
    longest: dict[int, int] = {}
    first: dict[int, int] = {}
    classes = [_size_class(queued.cost) for queued in batch]
    for place, (queued, size) in enumerate(zip(batch, classes, strict=True)):
        longest[queued.prefix] = max(longest.get(queued.prefix, 0), size)
        first.setdefault(queued.prefix, place)

    def key(place: int) -> tuple[int, int, int, int]:
        prefix = batch[place].prefix
        return (-longest[prefix], first[prefix], -classes[place], place)

    return [batch[place] for place in sorted(range(len(batch)), key=key)]


def _size_class(cost: float) -> int:
    return int(4 * math.log2(max(cost, 1.0)))
