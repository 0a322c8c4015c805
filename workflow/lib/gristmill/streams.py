"""Input files as bytes: decompressed, without byte order mark, and cut into lines at b"\\n" only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from gristmill.errors import GristmillError

CHUNK = 1 << 20  # bytes read at a time
MAX_RECORD = 64 << 20  # bytes; a longer line or element becomes an `error` row without being held in memory

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x50\x2a\x4d\x18": "zstd"}  # the last as pzstd begins
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def compression(path: Path) -> str | None:
    """`gzip`, `zstd` or None, by the file's first bytes."""
    with path.open("rb") as file:
        head = file.read(4)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def read_chunks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The decompressed bytes of a file in chunks of at most 1 MiB, the UTF-8 byte order mark left out.

    offset: where to begin in a file that is not compressed, bytes.
    Raises GristmillError for a file that cannot be read, a truncated or corrupt archive, and UTF-16 or UTF-32.
    """
    packed: str | None = None
    try:
        packed = compression(path)
        with path.open("rb", buffering=0) as file:  # opened here, for Arrow takes no name that is not UTF-8
            stream = pa.input_stream(file, compression=packed) if packed else file
            if offset:
                stream.seek(offset)
            chunk = stream.read(CHUNK)
            if offset == 0:
                chunk = _without_mark(chunk, path)
            while chunk:
                yield chunk
                chunk = stream.read(CHUNK)
    except (OSError, pa.ArrowException) as error:
        what = f"{packed} archive is truncated or corrupt" if packed else "file cannot be read"
        raise GristmillError(
            f"the {what}: {error}", where=str(path), help="fetch or write the file again; nothing was sent"
        ) from error


def _without_mark(head: bytes, path: Path) -> bytes:
    for bom, name in _OTHER_BOMS.items():
        if head.startswith(bom):
            raise GristmillError(
                f"the file is {name}, not UTF-8",
                where=str(path),
                help=f"convert it: iconv -f {name} -t UTF-8 {path} > NEW",
            )
    return head.removeprefix(_BOM)


def bom_length(path: Path) -> int:
    """Bytes of the UTF-8 byte order mark that a file begins with: 3 or 0."""
    with path.open("rb") as file:
        return len(_BOM) if file.read(len(_BOM)) == _BOM else 0


def line_offsets(path: Path, numbers: Sequence[int]) -> list[int]:
    """Offsets in bytes at which the lines with these numbers (from 1, ascending) begin in a file that is not packed."""
    offsets: list[int] = []
    line, base = 1, 0  # the line that the chunk begins in, and the chunk's offset
    with path.open("rb") as file:
        while len(offsets) < len(numbers) and (chunk := file.read(CHUNK)):
            ends = chunk.count(b"\n")
            at, position = line, 0
            while len(offsets) < len(numbers) and (wanted := numbers[len(offsets)]) <= line + ends:
                while at < wanted:
                    position = chunk.index(b"\n", position) + 1
                    at += 1
                offsets.append(base + position)
            line, base = line + ends, base + len(chunk)
    return offsets


def split_lines(
    chunks: Iterable[bytes], limit: int = MAX_RECORD, number: int = 1
) -> Iterator[tuple[int, bytes | None]]:
    """Lines with their numbers, cut at b"\\n" only and without it; None for one over `limit` bytes.

    number: of the first line. A line longer than `limit` is passed over in constant memory.
    """
    parts: list[bytes] = []  # the line that runs over the chunk's end
    size = 0
    for chunk in chunks:
        lines = chunk.split(b"\n")
        if len(lines) > 1:
            if parts or size:
                size += len(lines[0])
                parts.append(lines[0])
                yield number, b"".join(parts) if size <= limit else None
                parts, size = [], 0
            else:
                yield number, lines[0] if len(lines[0]) <= limit else None
            for line in lines[1:-1]:
                number += 1
                yield number, line if len(line) <= limit else None
            number += 1
        size += len(lines[-1])
        if size > limit:
            parts = []
        elif lines[-1]:
            parts.append(lines[-1])
    if size:
        yield number, b"".join(parts) if size <= limit else None
