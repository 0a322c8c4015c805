"""The journal: every answer as it arrives, in append-only JSONL, one file an attempt of a group.

A record is one line: {"fingerprint", "id", "outcome", "answer", "usage", "timings", "attempts", "http_status", "raw"};
`raw` is the response body as text, from which merge reads everything else. Two writers never share a file,
nothing is ever changed, and a record counts only when its newline is there, so a torn tail costs itself alone.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import orjson

_PREFIX = b'{"fingerprint":"'
_FINGERPRINT = slice(len(_PREFIX), len(_PREFIX) + 32)


class Place(NamedTuple):
    """Where a record stands: file, offset and length in bytes."""

    path: Path
    offset: int
    length: int


class Journal:
    """The journal file of one attempt, for appending. Every record reaches the operating system at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size

    def append(self, *records: dict[str, Any]) -> None:
        """Write records whole, or raise OSError (disk full) with those that did not fit left out."""
        lines = [encode(record) for record in records]
        rest = memoryview(b"".join(lines))
        written = 0
        try:
            while rest:
                count = os.write(self._fd, rest)
                written, rest = written + count, rest[count:]
        except OSError as error:
            whole = [end for end in accumulate(map(len, lines)) if end <= written]
            self._size += whole[-1] if whole else 0
            os.ftruncate(self._fd, self._size)
            error.filename = str(self.path)
            raise
        self._size += written

    def close(self) -> None:
        """Flush to the disk and close; a journal without records is removed."""
        if self._fd < 0:
            return
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._size == 0:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JournalWriter:
    """Appends to a journal from a thread of its own, so that a slow filesystem holds no request up.

    Whatever has come in since the last write goes out in one. failed: called once, from that thread, with the error
    that ends it.
    """

    def __init__(self, journal: Journal, failed: Callable[[OSError], None]) -> None:
        self._journal, self._failed = journal, failed
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def put(self, record: dict[str, Any]) -> None:
        """Have a record written."""
        self._queue.put(record)

    async def close(self) -> None:
        """Wait until everything is written."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _write(self) -> None:
        ended = False
        while not ended:
            records = []
            record = self._queue.get()
            while record is not None:
                records.append(record)
                try:
                    record = self._queue.get_nowait()
                except Empty:
                    break
            ended = record is None
            try:
                self._journal.append(*records)
            except OSError as error:
                self._failed(error)
                return


def encode(record: dict[str, Any]) -> bytes:
    """A record as a line; `fingerprint` comes first, at a fixed place, so that scanning need not parse."""
    ordered = {"fingerprint": record["fingerprint"], **record}
    return orjson.dumps(ordered) + b"\n"


class Found(NamedTuple):
    """Answers in journals. places: (fingerprint, id) → where; others: fingerprint → an answer to it under any id."""

    places: dict[tuple[str, str], Place]
    others: dict[str, Place]


def scan(folder: Path, wanted: dict[str, set[str]], group: str = "") -> Found:
    """Where the answers to `wanted` (fingerprint → ids) stand in the journals of a folder.

    The journals of `group` are read first, the others only as long as something is missing. Of several records for
    one request the first counts, files in the order of their names. Torn lines are passed over.
    """
    missing = sum(map(len, wanted.values()))
    found = Found({}, {})
    keys = {fingerprint.encode() for fingerprint in wanted}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (not path.name.startswith(f"{group}."), path.name)):
        if len(found.places) == missing:
            break
        for offset, line in _lines(path):
            if line[_FINGERPRINT] not in keys:
                continue
            record = _parse(line)
            if record is None:
                continue
            fingerprint, id = record["fingerprint"], record["id"]
            place = Place(path, offset, len(line))
            found.others.setdefault(fingerprint, place)
            if id in wanted.get(fingerprint, ()):
                found.places.setdefault((fingerprint, id), place)
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb", 1 << 20) as file:
        for line in file:
            if line.startswith(_PREFIX) and line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(record, dict) or not {"outcome", "raw"} <= record.keys():
        return None
    return record if isinstance(record.get("id"), str) and isinstance(record.get("fingerprint"), str) else None


class Reader:
    """Reads records at their places, keeping the file last used open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1

    def read(self, place: Place) -> bytes:
        """The record's line, newline included."""
        if place.path != self._path:
            self.close()
            self._fd = os.open(place.path, os.O_RDONLY)
            self._path = place.path
        return os.pread(self._fd, place.length, place.offset)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd = None, -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
