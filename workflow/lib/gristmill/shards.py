"""Shard files: requests in canonical form, cut from one source, and the proof that ids are unique.

shards/<source>/00000.jsonl has a line for each row, {"head": {id, row, fingerprint, route, model, keep[, error]},
"body": {...}}; 00000.ids has the 16-byte hash of each row's id, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gristmill.errors import GristmillError
from gristmill.manifest import Shard
from gristmill.parallel import WORTH_PROCESSES, ordered_map
from gristmill.requests import Recipe, Request, request_maker
from gristmill.sources import Row, RowError, Source, read_rows

_SPLIT = b'}},"body":'  # quotes inside strings are escaped and `keep` is flat: nothing else can look like this
_BUCKET_ROWS = 4_000_000  # ids sorted at a time: 64 MB


def id_hash(id: str) -> bytes:
    """16 bytes that stand for an id."""
    return hashlib.blake2b(id.encode(), digest_size=16).digest()


def encode(request: Request) -> bytes:
    """A line of a shard file, newline included."""
    head = {
        "id": request.id,
        "row": request.row,
        "fingerprint": request.fingerprint,
        "route": request.route,
        "model": request.model,
    }
    if request.error is not None:
        head["error"] = list(request.error)
    head["keep"] = request.keep
    return b'{"head":' + orjson.dumps(head) + b',"body":' + (request.body or b"null") + b"}\n"


def decode(line: bytes) -> Request:
    """The request of a line of a shard file."""
    head_text, split, body = line.rstrip(b"\n").partition(_SPLIT)
    if not split:
        raise GristmillError(f"not a line of a shard file: {line[:80]!r}")
    head = orjson.loads(head_text[len(b'{"head":') :] + b"}}")
    error = RowError(*head["error"]) if "error" in head else None
    text = b"" if error else body[:-1]
    return Request(
        head["id"], head["row"], head["fingerprint"], head["route"], text, head["model"], head["keep"], error
    )


def read_shard(path: Path) -> Iterator[Request]:
    """The requests of a shard file as a stream."""
    with path.open("rb") as file:
        for line in file:
            yield decode(line)


def shard_path(root: Path, shard: Shard) -> Path:
    """Where the shard file is, below the folder of all shards."""
    return root / f"{shard.name}.jsonl"


def write_shards(source: Source, cut: Sequence[Shard], recipe: Recipe, directory: Path, workers: int = 1) -> None:
    """Write the shard files of one source as the manifest says it was cut.

    workers: processes that share the shards of a file that can be read from the middle.
    Raises GristmillError when the source is no longer what the manifest saw, or is not what it claims to be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    maker = request_maker(recipe, source.path)
    rows_in = sum(shard.rows for shard in cut)
    if workers > 1 and rows_in > WORTH_PROCESSES and all(shard.start for shard in cut):
        for _ in ordered_map(partial(_write_alone, recipe, directory), cut, workers):
            pass
        return
    rows = read_rows(source)
    for shard in cut:
        _write_shard(shard, rows, maker, directory)
    if next(rows, None) is not None:
        raise _changed(source)


def _write_alone(recipe: Recipe, directory: Path, shard: Shard) -> None:
    """Write one shard file from where the shard starts in its source."""
    rows = read_rows(shard.source, shard.start)
    _write_shard(shard, rows, request_maker(recipe, shard.source.path), directory)


def _write_shard(shard: Shard, rows: Iterator[Row], maker: Callable[[Row], Request], directory: Path) -> None:
    digest = hashlib.blake2b(digest_size=16)
    base = directory / f"{shard.index:05d}"
    with base.with_suffix(".jsonl").open("wb", 1 << 20) as lines, base.with_suffix(".ids").open("wb") as ids:
        for _ in range(shard.rows):
            row = next(rows, None)
            if row is None:
                raise _changed(shard.source)
            digest.update(row.digest)
            digest.update(b"\n")
            request = maker(row)
            lines.write(encode(request))
            ids.write(id_hash(request.id))
    if shard.source.kind != "parquet" and digest.hexdigest() != shard.digest:
        raise _changed(shard.source)


def _changed(source: Source) -> GristmillError:
    return GristmillError(
        "the input changed while the campaign was starting",
        where=source.path,
        help="run the same command again; answered requests are kept",
    )


def check_shards(shards: Sequence[Shard], root: Path) -> dict[str, int]:
    """Prove that ids are unique and that something can be sent, in constant memory.

    Returns {"rows", "bad"}: all rows, and those that cannot be sent. Raises GristmillError naming double ids.
    """
    total = sum(shard.rows for shard in shards)
    buckets = max(1, -(-total // _BUCKET_ROWS))
    for bucket in range(buckets):
        _check_bucket(shards, root, bucket, buckets)
    bad = _bad_rows(shards, root)
    if bad["count"] == total:
        raise GristmillError(
            f"none of the {total:,} rows can be sent; the first ones:\n" + "\n".join(bad["first"]),
            help="correct the inputs or the keys of the campaign that say how they are read",
        )
    return {"rows": total, "bad": bad["count"]}


def _hashes(shard: Shard, root: Path) -> np.ndarray:
    hashes = np.fromfile(shard_path(root, shard).with_suffix(".ids"), dtype="<u8").reshape(-1, 2)
    if len(hashes) != shard.rows:
        raise GristmillError(
            f"shard {shard.name} has {len(hashes)} ids, expected {shard.rows}",
            where=str(shard_path(root, shard)),
            help="delete it and run again",
        )
    return hashes


def _check_bucket(shards: Sequence[Shard], root: Path, bucket: int, buckets: int) -> None:
    parts = []
    for shard in shards:
        hashes = _hashes(shard, root)
        parts.append(hashes[hashes[:, 0] % np.uint64(buckets) == bucket] if buckets > 1 else hashes)
    joined = np.concatenate(parts)
    # Sort by the first 8 bytes alone: an exact 16-byte double is among the neighbours that this puts together.
    joined = joined[np.argsort(joined[:, 0], kind="stable")]
    same = np.flatnonzero(joined[1:, 0] == joined[:-1, 0])
    doubles = {joined[i].tobytes() for i in same if (joined[i] == joined[i + 1]).all()}
    if doubles:
        raise _double_ids(shards, root, doubles)


def _double_ids(shards: Sequence[Shard], root: Path, doubles: set[bytes]) -> GristmillError:
    places: dict[str, list[str]] = {}
    for shard in shards:
        if not any(row.tobytes() in doubles for row in _hashes(shard, root)):
            continue
        for request in read_shard(shard_path(root, shard)):
            if id_hash(request.id) in doubles:
                places.setdefault(request.id, []).append(f"{shard.source.path}:{request.row}")
    lines = [f"  {id!r} at {', '.join(where[:5])}" for id, where in list(places.items())[:20]]
    return GristmillError(
        f"ids must be unique; {len(places)} are not:\n" + "\n".join(lines),
        help="give every row an id of its own; nothing was sent",
    )


def _bad_rows(shards: Sequence[Shard], root: Path) -> dict[str, Any]:
    count = 0
    first: list[str] = []
    for shard in shards:
        for request in read_shard(shard_path(root, shard)):
            if request.error is not None:
                count += 1
                if len(first) < 20:
                    where = f"{shard.source.path}:{request.row}"
                    first.append(f"  {where}: {request.error.code}: {request.error.message}")
    return {"count": count, "first": first}
