"""What the input files are, recognised by content, and their rows as a stream."""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.campaign import Campaign, Documents
from gristmill.errors import GristmillError
from gristmill.jsonarray import NotAnArray, array_elements
from gristmill.layout import find_file
from gristmill.streams import MAX_RECORD, compression, line_offsets, read_chunks, split_lines

Kind = Literal["lines", "array", "csv", "parquet", "folder", "empty"]

_TEXT_SUFFIXES = {".txt", ".text", ".md", ".html", ".htm", ".eml", ".xml"}
_TABLE_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
_PACKED_SUFFIXES = {".gz", ".zst"}
_SNIFFED_LINES = 100
_DELIMITERS = ",;\t|"

csv.field_size_limit(MAX_RECORD)


class RowError(NamedTuple):
    """Why a row cannot become a request."""

    code: str
    message: str


class Start(NamedTuple):
    """A place in a file of lines: offset in bytes, and the number of the line there."""

    offset: int
    line: int


_TOP = Start(0, 1)


class Row(NamedTuple):
    """One row of an input.

    number: line, element or row, counted from 1. payload: JSON text, a mapping of columns, or None.
    digest: bytes that change when the row changes.
    """

    number: int
    payload: bytes | dict[str, Any] | None
    digest: bytes
    error: RowError | None = None


@dataclass(frozen=True)
class Source:
    """One input file, or one folder of text files.

    path: as the campaign gives it, a glob pattern for a folder. base: what ids in a folder are relative to.
    """

    path: str
    kind: Kind
    delimiter: str = ","
    base: str = ""

    @property
    def key(self) -> str:
        """A name for files and wildcards, unique to the path."""
        stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(self.path.rstrip("*/")).name.split(".")[0]).strip("-")[:40]
        return f"{stem or 'input'}-{hashlib.blake2b(self.path.encode(), digest_size=4).hexdigest()}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    def files(self) -> list[Path]:
        """The text files of a folder, in the order of their relative paths."""
        found = (Path(name) for name in glob.iglob(self.path, recursive=True))
        return sorted((path for path in found if path.is_file()), key=lambda path: path.as_posix())


def find_inputs(campaign: Campaign, project: Path) -> list[str]:
    """The paths that the campaign's `input` names, files and folder patterns, each once, in input order."""
    paths: dict[str, None] = {}
    for entry in campaign.input:
        expanded = os.path.expanduser(os.path.expandvars(entry))
        if glob.has_magic(expanded):
            pattern = expanded
            matches = sorted(glob.glob(pattern, recursive=True))
            if not matches:
                pattern = str(project / expanded)
                matches = sorted(glob.glob(pattern, recursive=True))
            files = [match for match in matches if Path(match).is_file()]
            if not files:
                raise GristmillError(
                    f"no file matches {entry}",
                    where=f"input, from {Path.cwd()}",
                    help="correct the pattern in `input`",
                )
            texts = [name for name in files if _suffix(name) in _TEXT_SUFFIXES]
            if campaign.documents is not None and len(texts) == len(files):
                paths[pattern] = None
            else:
                paths.update(dict.fromkeys(files))
            continue
        path = find_file(entry, project, "the input")
        if path.is_dir():
            _check_folder(path, campaign)
            paths[f"{path}/**/*"] = None
        else:
            paths[str(path)] = None
    return list(paths)


def _suffix(name: str) -> str:
    suffixes = [suffix for suffix in Path(name).suffixes if suffix not in _PACKED_SUFFIXES]
    return suffixes[-1].lower() if suffixes else ""


def _check_folder(path: Path, campaign: Campaign) -> None:
    tables = sorted(p.name for p in path.rglob("*") if _suffix(p.name) in _TABLE_SUFFIXES)
    if campaign.documents is None or tables:
        what = f"has tables ({', '.join(tables[:3])})" if tables else "is a folder, and the campaign has no `documents`"
        raise GristmillError(
            f"the input {what}; a folder is read as one text file a document",
            where=str(path),
            help=f"name the files by a pattern instead, such as {path}/*.jsonl",
        )


def identity(path: str) -> list[int]:
    """What tells whether an input changed: [size in bytes, mtime in ns]; sums over a folder's files."""
    if not glob.has_magic(path):
        stat = Path(path).stat()
        return [stat.st_size, stat.st_mtime_ns]
    size, times = 0, hashlib.blake2b(digest_size=7)
    for file in Source(path, "folder").files():
        stat = file.stat()
        size += stat.st_size
        times.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return [size, int.from_bytes(times.digest(), "big")]


def recognise(path: str, documents: Documents | None) -> Source:
    """Say what an input is from its content. Raises GristmillError when it is nothing that can be read."""
    if glob.has_magic(path):
        base = path.split("*", 1)[0].split("?", 1)[0].split("[", 1)[0].rpartition("/")[0]
        return Source(path, "folder", base=base)
    with Path(path).open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        if documents is None:
            raise _unexpected(path, "a Parquet table", "set `documents` and `prompt` to turn its rows into requests")
        return Source(path, "parquet")
    chunks = read_chunks(Path(path))
    head = next(chunks, b"")
    text = head.lstrip(b" \t\r\n")
    if not text:
        if any(chunk.strip() for chunk in chunks):
            raise _unexpected(path, "a megabyte of white space", "check the file")
        return Source(path, "empty")
    if _is_array(head, path):
        return Source(path, "array")
    found = _sniff_lines(head)
    if found == "objects":
        return Source(path, "lines")
    if documents is not None:
        delimiter = _csv_delimiter(head, documents)
        if delimiter:
            return Source(path, "csv", delimiter=delimiter)
    if found == "mixed":
        return Source(path, "lines")
    if text[:1] in b"{[":
        raise _unexpected(path, "broken JSON", 'check its beginning; a request file is JSONL or {"requests": [...]}')
    columns = head.split(b"\n", 1)[0][:200].decode("utf-8", "replace").strip()
    if b"\0" in head or not columns.isprintable():
        raise _unexpected(path, "binary data", "give JSONL, JSON, CSV or Parquet, plain or as .gz or .zst")
    wanted = f"id and text columns {documents.id!r} and {documents.text!r}" if documents else "JSON requests"
    raise _unexpected(
        path,
        f"text that begins with {columns[:80]!r}, without {wanted}",
        "correct documents.id and documents.text" if documents else "set `documents` for tables of documents",
    )


def _unexpected(path: str, found: str, help: str) -> GristmillError:
    return GristmillError(f"the input is {found}", where=path, help=help)


def _is_array(head: bytes, path: str) -> bool:
    first = head.split(b"\n", 1)[0].strip()
    if first.startswith(b"{") and b"\n" in head:
        try:
            value = orjson.loads(first)
        except orjson.JSONDecodeError:
            pass
        else:
            return isinstance(value, dict) and isinstance(value.get("requests"), list)
    elements = array_elements([head], path)
    try:
        next(elements, None)
    except NotAnArray:
        return False
    except GristmillError:
        return True  # an array it is; reading it whole will say what is wrong
    return True


def _sniff_lines(head: bytes) -> Literal["objects", "mixed", "none"]:
    """Whether the first lines are JSON objects: all that are whole, some, or none."""
    lines = [line.strip() for line in head.split(b"\n")]
    if len(lines) > 1:
        lines = lines[:-1] if len(head) >= 1 << 20 else lines
    lines = [line for line in lines if line][:_SNIFFED_LINES]
    good = sum(line.startswith(b"{") and _is_object(line) for line in lines)
    if good == len(lines):
        return "objects"
    if len(lines) == 1 and len(head) >= 1 << 20 and lines[0].startswith(b"{"):
        return "objects"  # one line longer than what is sniffed
    return "mixed" if good else "none"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return line.endswith(b"}") and _is_lenient_object(line)


def _is_lenient_object(line: bytes) -> bool:
    """JSON but for invalid UTF-8, lone surrogates or numbers out of range: one bad row, not a wrong file."""
    try:
        return isinstance(json.loads(line.decode("utf-8", "surrogateescape"), strict=False), dict)
    except ValueError:
        return False


def _csv_delimiter(head: bytes, documents: Documents) -> str | None:
    lines = (line + "\n" for line in head.decode("utf-8", "surrogateescape").split("\n"))
    text = list(lines)
    for delimiter in _DELIMITERS:
        try:
            header = next(csv.reader(text, delimiter=delimiter), [])
        except csv.Error:
            continue
        if documents.id in header and documents.text in header:
            return delimiter
    return None


def read_rows(source: Source, start: Start | None = None) -> Iterator[Row]:
    """The rows of a source as a stream, of a file of lines from `start` on.

    Raises GristmillError where the file is not what it claims to be.
    """
    return _READERS[source.kind](source) if start is None else _read_lines(source, start)


def _read_lines(source: Source, start: Start = _TOP) -> Iterator[Row]:
    for number, line in split_lines(read_chunks(Path(source.path), start.offset), number=start.line):
        if line is None:
            yield Row(number, None, b"", RowError("line_too_long", f"the line is over {MAX_RECORD >> 20} MiB"))
        elif line and not line.isspace():
            yield Row(number, line, line)


def _read_array(source: Source) -> Iterator[Row]:
    for number, element in array_elements(read_chunks(Path(source.path)), source.path):
        yield Row(number, element, element)


def _read_csv(source: Source) -> Iterator[Row]:
    lines = (
        (line + b"\n").decode("utf-8", "surrogateescape") if line is not None else "\0too long\n"
        for _, line in split_lines(read_chunks(Path(source.path)))
    )
    reader = csv.reader(lines, delimiter=source.delimiter, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "unexpected end" in str(error) or "field larger" in str(error):
                raise GristmillError(
                    "a quote is opened and never closed",
                    where=f"{source.path}, line {number}",
                    help="close the quote, or double it inside the field; nothing was sent",
                ) from error
            yield Row(number, None, str(error).encode(), RowError("malformed_row", f"not CSV: {error}"))
            continue
        if cells is None:
            return
        if header is None:
            header = cells
            if len(set(header)) < len(header):
                raise GristmillError("two columns have the same name", where=f"{source.path}, line 1")
        elif len(cells) == len(header):
            yield Row(number, dict(zip(header, cells, strict=True)), repr(cells).encode())
        elif cells:
            message = f"{len(cells)} fields where the header has {len(header)}"
            yield Row(number, None, repr(cells).encode(), RowError("malformed_row", message))


def _read_parquet(source: Source) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(source.path) as table:
            for batch in table.iter_batches(batch_size=512):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values, b"")
    except (OSError, pa.ArrowException) as error:
        raise GristmillError(
            f"the Parquet table cannot be read: {error}", where=source.path, help="write the file again"
        ) from error


def _read_folder(source: Source) -> Iterator[Row]:
    for number, path in enumerate(source.files(), start=1):
        name = os.path.relpath(path, source.base) if source.base else path.as_posix()
        stat = path.stat()
        digest = f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode("utf-8", "surrogateescape")
        yield Row(number, {"id": name, "path": path}, digest)


def read_text(path: Path) -> bytes | RowError:
    """A text file of a folder, decompressed; a RowError when it is no text of at most 64 MiB."""
    parts: list[bytes] = []
    size = 0
    try:
        for chunk in read_chunks(path):
            size += len(chunk)
            if size > MAX_RECORD:
                return RowError("document_too_long", f"the file is over {MAX_RECORD >> 20} MiB")
            if b"\0" in chunk:
                return RowError("not_text", "the file has NUL bytes: binary data, or UTF-16 without its mark")
            parts.append(chunk)
    except GristmillError as error:
        return RowError("not_text", error.found)
    return b"".join(parts)


_READERS: dict[Kind, Callable[[Source], Iterator[Row]]] = {
    "lines": _read_lines,
    "array": _read_array,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "folder": _read_folder,
    "empty": lambda source: iter(()),
}


def count_shards(source: Source, shard_size: int) -> list[dict[str, Any]]:
    """How a source is cut: [{"rows": N, "digest": hex}] for each shard of at most `shard_size` rows.

    Shards of a plain file of lines say where they start as well, as {"start": [offset, line]}.

    A digest changes when a row of the shard changes; of a Parquet table, when the file does.
    """
    if source.kind == "parquet":
        return _parquet_shards(source, shard_size)
    shards: list[dict[str, Any]] = []
    rows, digest = 0, hashlib.blake2b(digest_size=16)
    first: list[int] = []  # lines that shards start at
    for row in read_rows(source):
        if rows == 0:
            first.append(row.number)
        digest.update(row.digest)
        digest.update(b"\n")
        rows += 1
        if rows == shard_size:
            shards.append({"rows": rows, "digest": digest.hexdigest()})
            rows, digest = 0, hashlib.blake2b(digest_size=16)
    if rows:
        shards.append({"rows": rows, "digest": digest.hexdigest()})
    if source.kind == "lines" and compression(Path(source.path)) is None:
        for shard, offset, line in zip(shards, line_offsets(Path(source.path), first), first, strict=True):
            shard["start"] = [offset, line]
    return shards


def _parquet_shards(source: Source, shard_size: int) -> list[dict[str, Any]]:
    try:
        total = pq.read_metadata(source.path).num_rows
    except (OSError, pa.ArrowException) as error:
        raise GristmillError(
            f"the Parquet table cannot be read: {error}", where=source.path, help="write the file again"
        ) from error
    file = f"{identity(source.path)}"
    return [
        {
            "rows": min(shard_size, total - start),
            "digest": hashlib.blake2b(f"{file} {start}".encode(), digest_size=16).hexdigest(),
        }
        for start in range(0, total, shard_size)
    ]
