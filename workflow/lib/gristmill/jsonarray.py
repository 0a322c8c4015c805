"""The elements of one large JSON array as raw bytes, in constant memory.

Raw bytes rather than parsed values (as ijson gives) so that an element is treated exactly as a line of
JSONL is: one bad element is one bad row, big integers stay exact, and lone surrogates are seen.
Only strings and brackets are looked at; what stands between them is the business of whoever parses the element.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator
from typing import NamedTuple

import orjson

from gristmill.errors import GristmillError
from gristmill.streams import MAX_RECORD

# A string (group 1 is its closing quote, empty when the buffer ends first) or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")
_SPACE = b" \t\r\n"
_OPEN = (0x7B, 0x5B)  # { [
_QUOTE = 0x22
_BRACKET = 0x5B  # [


class NotAnArray(Exception):
    """The text has no array of elements at its top level or under "requests"."""


class Element(NamedTuple):
    """An element of the array: its number (from 1), its text, and where it starts, bytes (None: not known)."""

    number: int
    text: bytes
    offset: int | None


def array_elements(
    chunks: Iterable[bytes], where: str, limit: int = MAX_RECORD, inside: tuple[int, int] | None = None
) -> Iterator[Element]:
    """Elements of a top-level array, or of the array under the top-level key "requests".

    where: the file's name, for messages. limit: bytes of an element, and of what stands before or after the array.
    inside: offset and number of the element that `chunks` start with; what follows the array is then not looked at.
    Raises NotAnArray before the first element, GristmillError for a file that ends early or is not JSON.
    """
    buffer, before = b"", b""  # before: the text up to the array's opening bracket
    gap, scan = 0, 0  # gap: start of what is not used yet; scan: where the next token is looked for
    depth, level = 0, 0  # level: depth of the array, 0 until it is found
    key, key_end = b"", 0  # the last string at depth 1
    index, start, done = 0, -1, False  # start: of the element that is open
    base = 0  # offset of the buffer
    source = iter(chunks)
    if inside is not None:
        base, index = inside[0], inside[1] - 1
        first, level, depth = inside[1], 1, 1
    else:
        first = 1
    while True:
        if not level and buffer.lstrip(_SPACE)[:1] not in (b"", b"{", b"["):
            raise NotAnArray
        for token in _TOKEN.finditer(buffer, scan):
            begin, end = token.span()
            byte = buffer[begin]
            if byte == _QUOTE:
                if not token[1]:
                    scan = begin
                    break
                if depth == 1 and not level:
                    key, key_end = buffer[begin:end], end
            elif byte in _OPEN:
                if level and not done and depth == level:
                    index = yield from _strays(buffer[gap:begin], index, where, first=index < first, last=False)
                    start = begin
                elif (
                    not level
                    and byte == _BRACKET
                    and (
                        depth == 0 or (depth == 1 and key == b'"requests"' and _COLON.fullmatch(buffer, key_end, begin))
                    )
                ):
                    level, gap, before = depth + 1, end, buffer[:end]
                depth += 1
            else:
                depth -= 1
                if start >= 0:
                    if depth == level:
                        index += 1
                        yield Element(index, buffer[start:end], base + start)
                        start, gap = -1, end
                elif level and not done and depth == level - 1:
                    index = yield from _strays(buffer[gap:begin], index, where, first=index < first, last=True)
                    done, gap = True, begin
                    if inside is not None:
                        return
                if depth <= 0 and not level:
                    raise NotAnArray
            scan = end
        keep = start if start >= 0 else gap
        if len(buffer) - keep > limit:
            if not level:
                raise NotAnArray
            what = "what follows the array" if done else f"element {index + 1}"
            raise _broken(where, index, f"{what} is over {limit >> 20} MiB")
        more = _read(source, len(buffer) - keep)
        if not more:
            break
        buffer, base = buffer[keep:] + more, base + keep
        gap, scan, key_end = gap - keep, scan - keep, key_end - keep
        start = 0 if start >= 0 else -1
    if not level:
        raise NotAnArray
    if not done:
        raise _broken(where, index, f"it ends inside element {index + 1}" if start >= 0 else "it ends too early")
    _check_frame(before + buffer[gap:], index, where)


def _check_frame(text: bytes, index: int, where: str) -> None:
    """Check what stands around the elements: it must be JSON, with one array of requests."""
    try:
        top = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise _broken(where, index, f"what stands around the elements: {error}") from error
    if sum(key == "requests" for key, _ in top) > 1:
        raise _broken(where, index, 'it has the key "requests" twice')


def _read(source: Iterator[bytes], at_least: int) -> bytes:
    """At least as much as is held already, so that a long string is not scanned once per chunk."""
    parts, size = [], 0
    for chunk in source:
        parts.append(chunk)
        size += len(chunk)
        if size >= at_least:
            break
    return b"".join(parts)


def _strays(gap: bytes, index: int, where: str, *, first: bool, last: bool) -> Generator[Element, None, int]:
    """Elements between two objects that are no objects: numbers, strings, null. Returns the new index."""
    text = gap.strip(_SPACE)
    if text in ((b"",) if last or first else (b",",)):
        return index
    if not first:
        if not text.startswith(b","):
            raise _broken(where, index, f"a comma is missing after element {index}")
        text = text[1:]
    if not last:
        if not text.endswith(b","):
            raise _broken(where, index, f"a comma is missing before element {index + 1}")
        text = text[:-1]
    try:
        values = orjson.loads(b"[" + text + b"]")
    except orjson.JSONDecodeError as error:
        raise _broken(where, index, f"after element {index}: {error}") from error
    if not values:
        raise _broken(where, index, f"there is an empty place after element {index}")
    for value in values:
        index += 1
        yield Element(index, orjson.dumps(value), None)
    return index


def _broken(where: str, index: int, what: str) -> GristmillError:
    return GristmillError(
        f"the file is not valid JSON: {what}",
        where=f"{where}, after {index} elements",
        help="write the file again; nothing was sent",
    )
