"""The elements of one large JSON array as raw bytes, in constant memory.

Raw bytes rather than parsed values (as ijson gives) so that an element is treated exactly as a line of
JSONL is: one bad element is one bad row, big integers stay exact, and lone surrogates are seen.
Only strings and brackets are looked at; what stands between them is the business of whoever parses the element.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator

import orjson

from gristmill.errors import GristmillError
from gristmill.streams import MAX_RECORD

# A string (group 1 is its closing quote, empty when the buffer ends first) or a bracket.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")
_SPACE = b" \t\r\n"
_OPEN = (0x7B, 0x5B)  # { [
_QUOTE = 0x22


class NotAnArray(Exception):
    """The text has no array of elements at its top level or under "requests"."""


def array_elements(chunks: Iterable[bytes], where: str, limit: int = MAX_RECORD) -> Iterator[tuple[int, bytes]]:
    """Elements (from 1) of a top-level array, or of the array under the top-level key "requests".

    where: the file's name, for messages. limit: bytes an element may have.
    Raises NotAnArray before the first element, GristmillError for a file that ends early or is not JSON.
    """
    buffer, gap, scan = (
        b"",
        0,
        0,
    )  # gap: start of what is not used yet; scan: where the next token is looked for
    depth, level = 0, 0  # level: depth of the array, 0 until it is found
    key, key_end = b"", 0  # the last string at depth 1
    index, start, done = 0, -1, False  # start: of the element that is open
    source = iter(chunks)
    while True:
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
                if done and depth == 0:
                    raise _broken(where, index, "there is text after its end")
                if depth == level and level and not done:
                    index = yield from _strays(buffer[gap:begin], index, where, last=False)
                    start = begin
                elif (
                    not level
                    and byte == 0x5B
                    and (
                        depth == 0 or (depth == 1 and key == b'"requests"' and _COLON.fullmatch(buffer, key_end, begin))
                    )
                ):
                    level, gap = depth + 1, end
                depth += 1
            else:
                depth -= 1
                if start >= 0:
                    if depth == level:
                        index += 1
                        yield index, buffer[start:end]
                        start, gap = -1, end
                elif level and not done and depth == level - 1:
                    index = yield from _strays(buffer[gap:begin], index, where, last=True)
                    done = True
                if depth < 0:
                    raise _broken(where, index, "a bracket closes that was never opened")
                if depth == 0:
                    gap = end
            scan = end
        if start >= 0:
            keep = start
        elif level:
            keep = scan if done else gap
        else:
            keep = key_end - len(key) if key else scan
        if start >= 0 and len(buffer) - start > limit:
            raise _broken(where, index, f"element {index + 1} is over {limit >> 20} MiB")
        if not level and depth > 0 and len(buffer) - keep > limit:
            raise NotAnArray
        more = _read(source, len(buffer) - keep)
        if not more:
            break
        buffer = buffer[keep:] + more
        gap, scan, key_end = gap - keep, scan - keep, key_end - keep
        start = 0 if start >= 0 else -1
    if not level:
        raise NotAnArray
    if depth > 0 or start >= 0:
        raise _broken(where, index, f"it ends inside element {index + 1}" if not done else "it ends too early")
    if buffer[scan:].strip(_SPACE):
        raise _broken(where, index, "there is text after its end")


def _read(source: Iterator[bytes], at_least: int) -> bytes:
    """At least as much as is held already, so that a long string is not scanned once per chunk."""
    parts, size = [], 0
    for chunk in source:
        parts.append(chunk)
        size += len(chunk)
        if size >= at_least:
            break
    return b"".join(parts)


def _strays(gap: bytes, index: int, where: str, *, last: bool) -> Generator[tuple[int, bytes], None, int]:
    """Elements between two objects that are no objects: numbers, strings, null. Returns the new index."""
    text = gap.strip(_SPACE)
    if text in ((b"",) if last or index == 0 else (b",",)):
        return index
    if index > 0:
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
        yield index, orjson.dumps(value)
    return index


def _broken(where: str, index: int, what: str) -> GristmillError:
    return GristmillError(
        f"the file is not valid JSON: {what}",
        where=f"{where}, after {index} elements",
        help="write the file again; nothing was sent",
    )
