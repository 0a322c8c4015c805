"""How a source is cut into shards, and the ids in it: one pass over an input that is new or changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.campaign import Documents
from gristmill.errors import GristmillError
from gristmill.requests import row_id
from gristmill.sources import Row, Source, Start, read_rows
from gristmill.streams import bom_length, compression, line_offsets

_BUCKET_ROWS = 250_000  # ids sorted at a time


class Cut(NamedTuple):
    """A shard of at most `shard_size` consecutive rows.

    digest: changes when a row of the shard changes. start: [offset, row number] where reading can begin, None in a
    compressed file, which can only be read from its top.
    """

    rows: int
    digest: str
    start: list[int] | None


def id_hash(id: str) -> bytes:
    """16 bytes that stand for an id."""
    return hashlib.blake2b(id.encode(), digest_size=16).digest()


def cut_source(source: Source, shard_size: int, documents: Documents | None, ids: Path) -> list[Cut]:
    """Cut a source, and write the hashes of its ids, 16 bytes a row in order, to the file `ids`.

    Raises GristmillError where the file is not what it claims to be.
    """
    ids.parent.mkdir(parents=True, exist_ok=True)
    id_of = row_id(documents, source)
    cuts: list[Cut] = []
    first: list[Row] = []  # the first row of each shard, its payload left out
    rows, digest = 0, hashlib.blake2b(digest_size=16)
    with ids.open("wb", 1 << 20) as file:
        for row in read_rows(source):
            if rows == 0:
                first.append(row._replace(payload=None, digest=b""))
            digest.update(row.digest)
            digest.update(b"\n")
            file.write(id_hash(id_of(row)))
            rows += 1
            if rows == shard_size:
                cuts.append(Cut(rows, digest.hexdigest(), None))
                rows, digest = 0, hashlib.blake2b(digest_size=16)
    if rows:
        cuts.append(Cut(rows, digest.hexdigest(), None))
    return [cut._replace(start=start) for cut, start in zip(cuts, _starts(source, first), strict=True)]


def _starts(source: Source, first: Sequence[Row]) -> list[list[int] | None]:
    """Where reading can begin for each of these rows."""
    numbers = [row.number for row in first]
    if source.kind in ("parquet", "folder", "empty"):
        return [[0, number] for number in numbers]
    path = Path(source.path)
    if compression(path) is not None:
        return [None] * len(first)
    if source.kind in ("lines", "csv"):
        offsets = line_offsets(path, numbers)
        return [[offset, number] for offset, number in zip(offsets, numbers, strict=True)]
    mark = bom_length(path)
    return [None if row.offset is None else [row.offset + mark, row.number] for row in first]


def rows_from(source: Source, start: Sequence[int] | None, skip: int) -> Iterator[Row]:
    """The rows of a source from `start` on, or after `skip` rows where reading must begin at the top."""
    return islice(read_rows(source), skip, None) if start is None else read_rows(source, Start(*start))


def prove_unique(ids: Sequence[tuple[Source, Path]], documents: Documents | None) -> None:
    """Prove that no id occurs twice in these sources, in constant memory.

    ids: each source and the file with the hashes of its ids. Raises GristmillError naming the ids that do.
    """
    rows = sum(path.stat().st_size // 16 for _, path in ids)
    buckets = -(-rows // _BUCKET_ROWS)
    doubles: set[bytes] = set()
    for bucket in range(buckets):
        doubles |= _doubles([_in_bucket(path, bucket, buckets) for _, path in ids])
    if doubles:
        raise _double_ids(ids, documents, doubles)


def _in_bucket(path: Path, bucket: int, buckets: int) -> Any:
    hashes = np.memmap(path, dtype="<u8", mode="r").reshape(-1, 2) if path.stat().st_size else np.empty((0, 2), "<u8")
    parts = [
        part[part[:, 0] % np.uint64(buckets) == bucket]
        for part in (hashes[i : i + _BUCKET_ROWS] for i in range(0, len(hashes), _BUCKET_ROWS))
    ]
    return np.concatenate(parts) if parts else np.empty((0, 2), "<u8")


def _doubles(parts: Sequence[Any]) -> set[bytes]:
    joined = np.concatenate(parts)
    joined = joined[np.lexsort((joined[:, 1], joined[:, 0]))]
    same = np.flatnonzero((joined[1:] == joined[:-1]).all(axis=1))
    return {joined[place].tobytes() for place in same}


def _double_ids(ids: Sequence[tuple[Source, Path]], documents: Documents | None, doubles: set[bytes]) -> GristmillError:
    places: dict[str, list[str]] = {}
    for source, _ in ids:
        id_of: Callable[[Row], str] = row_id(documents, source)
        for row in read_rows(source):
            if id_hash(id := id_of(row)) in doubles:
                places.setdefault(id, []).append(f"{source.path}:{row.number}")
    lines = [f"  {id!r} at {', '.join(where[:5])}" for id, where in list(places.items())[:20]]
    return GristmillError(
        f"ids must be unique; {len(places)} are not:\n" + "\n".join(lines),
        help="give every row an id of its own; nothing was sent",
    )
