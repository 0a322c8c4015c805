"""Shard files: requests in canonical form.

shards/<group>/<source>.00000.jsonl has a line for each row, {"head": {id, row, fingerprint, route, model, keep
[, error]}, "body": {...}}.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from gristmill.cutting import rows_from
from gristmill.errors import GristmillError
from gristmill.manifest import Shard
from gristmill.requests import Recipe, Request, request_maker
from gristmill.sources import Row, RowError

_SPLIT = b'}},"body":'  # quotes inside strings are escaped and `keep` is flat: nothing else can look like this


def head(request: Request) -> dict[str, Any]:
    """What is kept of a request besides its body; `keep` comes last, see `_SPLIT`."""
    fields: dict[str, Any] = {
        "id": request.id,
        "row": request.row,
        "fingerprint": request.fingerprint,
        "route": request.route,
        "model": request.model,
    }
    if request.error is not None:
        fields["error"] = list(request.error)
    fields["keep"] = request.keep
    return fields


def encode(request: Request) -> bytes:
    """A line of a shard file, newline included."""
    return b'{"head":' + orjson.dumps(head(request)) + b',"body":' + (request.body or b"null") + b"}\n"


def decode(line: bytes) -> Request:
    """The request of a line of a shard file."""
    head_text, split, body = line.rstrip(b"\n").partition(_SPLIT)
    if not split:
        raise GristmillError(f"not a line of a shard file: {line[:80]!r}")
    fields = orjson.loads(head_text[len(b'{"head":') :] + b"}}")
    error = RowError(*fields["error"]) if "error" in fields else None
    text = b"" if error else body[:-1]
    return Request(
        fields["id"],
        fields["row"],
        fields["fingerprint"],
        fields["route"],
        text,
        fields["model"],
        fields["keep"],
        error,
    )


def read_shard(path: Path) -> Iterator[Request]:
    """The requests of a shard file as a stream."""
    with path.open("rb") as file:
        for line in file:
            yield decode(line)


def write_shards(shards: Sequence[Shard], recipe: Recipe, directory: Path) -> None:
    """Write the shard files of a group as the manifest says they are cut.

    Raises GristmillError when an input is no longer what the manifest saw, or is not what it claims to be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows: Iterator[Row] = iter(())
    before: Shard | None = None
    for shard in shards:
        # Neighbours are read in one go; the rest from where they start.
        if before is None or before.source != shard.source or before.index + 1 != shard.index:
            rows = rows_from(shard.source, shard.start, shard.first)
        _write_shard(shard, rows, request_maker(recipe, shard.source.path), directory / shard.file)
        before = shard


def _write_shard(shard: Shard, rows: Iterator[Row], maker: Callable[[Row], Request], path: Path) -> None:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("wb", 1 << 20) as file:
        for row in islice(rows, shard.rows):
            digest.update(row.digest)
            digest.update(b"\n")
            file.write(encode(maker(row)))
    if digest.hexdigest() != shard.digest:
        raise GristmillError(
            "the input changed while the campaign was starting",
            where=shard.source.path,
            help="run the same command again; answered requests are kept",
        )
