"""What the input files are, recognised by content, and their rows as a stream."""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.campaign import Campaign, Documents
from gristmill.errors import GristmillError
from gristmill.jsonarray import NotAnArray, array_elements
from gristmill.layout import find_file
from gristmill.streams import MAX_RECORD, read_chunks, split_lines

Kind = Literal["lines", "array", "csv", "parquet", "folder", "empty"]

_TEXT_SUFFIXES = {".txt", ".text", ".md", ".html", ".htm", ".eml", ".xml"}
_TABLE_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"}
_PACKED_SUFFIXES = {".gz", ".zst"}
_KINDS = {"lines": "JSONL", "array": "a JSON list", "csv": "CSV", "parquet": "Parquet", "folder": "a folder"}
_WHOLE_FOLDER = "/**/*"
_SNIFFED_LINES = 100
_DELIMITERS = ",;\t|"

csv.field_size_limit(MAX_RECORD)


class RowError(NamedTuple):
    """Why a row cannot become a request."""

    code: str
    message: str


class Start(NamedTuple):
    """Where to begin in a source: offset in bytes, and the number of the row there."""

    offset: int
    number: int


_TOP = Start(0, 1)


class Row(NamedTuple):
    """One row of an input.

    number: line, element or row, counted from 1. payload: JSON text, a mapping of columns, or None.
    digest: bytes that change when the row changes. offset: where it starts in the file, bytes, if that is known.
    """

    number: int
    payload: bytes | dict[str, Any] | None
    digest: bytes
    error: RowError | None = None
    offset: int | None = None


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
        return f"{stem or 'input'}-{hashlib.blake2b(os.fsencode(self.path), digest_size=4).hexdigest()}"

    def as_json(self) -> dict[str, str]:
        return asdict(self)

    def files(self) -> list[Path]:
        """The text files of a folder, in the order of their relative paths."""
        if self.path.endswith(_WHOLE_FOLDER):
            found = _walk(self.base or ".")
        else:
            found = (Path(name) for name in glob.iglob(self.path, recursive=True))
        return sorted((path for path in found if path.is_file()), key=lambda path: path.as_posix())


def _walk(folder: str) -> Iterator[Path]:
    """Files below a folder; hidden ones and folders that are links (which may lead in a circle) are left out."""

    def unreadable(error: OSError) -> None:
        raise GristmillError(
            f"a folder of the input cannot be read: {error.strerror}", where=str(error.filename), help="see its mode"
        )

    for here, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in files if not name.startswith("."))


def find_inputs(campaign: Campaign, project: Path) -> list[str]:
    """The paths that the campaign's `input` names, files and folder patterns, each once, in input order."""
    paths: dict[str, None] = {}
    for entry in campaign.input:
        expanded = os.path.expanduser(os.path.expandvars(entry))
        if glob.has_magic(expanded) and not Path(expanded).exists():
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
            paths[f"{glob.escape(str(path))}/**/*"] = None
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
    if not _is_pattern(path):
        stat = Path(path).stat()
        return [stat.st_size, stat.st_mtime_ns]
    size, times = 0, hashlib.blake2b(digest_size=7)
    for file in Source(path, "folder").files():
        stat = file.stat()
        size += stat.st_size
        times.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return [size, int.from_bytes(times.digest(), "big")]


def _is_pattern(path: str) -> bool:
    """Whether a path of `find_inputs` is a folder's pattern; a file's name may hold `*`, `?` and `[`, too."""
    return glob.has_magic(path) and not Path(path).is_file()


def _fixed_part(pattern: str) -> str:
    """The folder that a pattern starts from: its parts that are not patterns themselves."""
    parts: list[str] = []
    for part in pattern.split("/")[:-1]:
        plain = re.sub(r"\[([*?\[])\]", r"\1", part)
        if glob.escape(plain) != part:
            break
        parts.append(plain)
    return "/".join(parts)


def recognise(path: str, documents: Documents | None) -> Source:
    """Say what an input is from its content. Raises GristmillError when it is nothing that can be read."""
    if _is_pattern(path):
        return Source(path, "folder", base=_fixed_part(path))
    with Path(path).open("rb") as file:
        magic = file.read(4)
    if magic == b"PAR1":
        if documents is None:
            raise _unexpected(path, "a Parquet table", "set `documents` and `prompt` to turn its rows into requests")
        return _checked(Source(path, "parquet"), documents)
    chunks = read_chunks(Path(path))
    head = next(chunks, b"")
    text = head.lstrip(b" \t\r\n")
    if not text:
        if any(chunk.strip() for chunk in chunks):
            raise _unexpected(path, "a megabyte of white space", "check the file")
        return Source(path, "empty")
    more = next(chunks, b"")
    if _is_array(head, chain([more], chunks), path):
        return _checked(Source(path, "array"), documents)
    found = _sniff_lines(head, whole=not more)
    if found == "objects":
        return _checked(Source(path, "lines"), documents)
    if documents is not None:
        delimiter = _csv_delimiter(head, documents)
        if delimiter:
            return Source(path, "csv", delimiter=delimiter)
    if found == "mixed":
        return _checked(Source(path, "lines"), documents)
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


def _checked(source: Source, documents: Documents | None) -> Source:
    """The source, unless its first rows are all of the other sort: documents for requests, requests for documents."""
    seen = 0
    for row in islice(read_rows(source), _SNIFFED_LINES):
        names = _names(row.payload)
        if names is None:
            continue
        if documents is None and names & {"messages", "prompt", "body"}:
            return source
        if documents is not None and {documents.id, documents.text} <= names:
            return source
        seen += 1
    if seen == 0:
        return source
    if documents is None:
        wanted, help = "messages, prompt or body", "set `documents` and `prompt` for documents"
    else:
        wanted = f"both {documents.id!r} and {documents.text!r}"
        help = "correct documents.id and documents.text, or take `documents` out for requests"
    raise _unexpected(source.path, f"{_KINDS[source.kind]}, and none of the first {seen} rows has {wanted}", help)


def _names(payload: bytes | dict[str, Any] | None) -> set[str] | None:
    """The keys of a row, None when it has none."""
    if isinstance(payload, bytes):
        try:
            payload = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return None
    return set(payload) if isinstance(payload, dict) else None


def _unexpected(path: str, found: str, help: str) -> GristmillError:
    return GristmillError(f"the input is {found}", where=path, help=help)


def _is_array(head: bytes, rest: Iterable[bytes], path: str) -> bool:
    first, _, others = head.partition(b"\n")
    if others.strip() and _is_object(first.strip()):
        return False  # a line that is whole, and more lines
    try:
        next(array_elements(chain([head], rest), path), None)
    except NotAnArray:
        return False
    except GristmillError:
        return True  # an array it is; reading it whole will say what is wrong
    return True


def _sniff_lines(head: bytes, whole: bool) -> Literal["objects", "mixed", "none"]:
    """Whether the first lines are JSON objects: all that are whole, some, or none. whole: `head` is all there is."""
    lines = [line.strip() for line in head.split(b"\n")]
    if len(lines) > 1 and not whole:
        lines.pop()
    lines = [line for line in lines if line][:_SNIFFED_LINES]
    good = sum(line.startswith(b"{") and _is_object(line) for line in lines)
    if good == len(lines):
        return "objects"
    if len(lines) == 1 and not whole and lines[0].startswith(b"{"):
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
    except (ValueError, RecursionError):
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


def read_rows(source: Source, start: Start = _TOP) -> Iterator[Row]:
    """The rows of a source as a stream, from `start` on.

    Raises GristmillError where the file is not what it claims to be.
    """
    return _READERS[source.kind](source, start)


def _read_lines(source: Source, start: Start) -> Iterator[Row]:
    for number, line in split_lines(read_chunks(Path(source.path), start.offset), number=start.number):
        if line is None:
            yield Row(number, None, b"", RowError("line_too_long", f"the line is over {MAX_RECORD >> 20} MiB"))
        elif line and not line.isspace():
            yield Row(number, line, line)


def _read_array(source: Source, start: Start) -> Iterator[Row]:
    chunks = read_chunks(Path(source.path), start.offset)
    for element in array_elements(chunks, source.path, inside=None if start == _TOP else start):
        yield Row(element.number, element.text, element.text, None, element.offset)


def _csv_line(line: bytes | None, where: str) -> str:
    if line is None:  # its quotes are not seen, so nothing that follows could be read with certainty
        raise GristmillError(
            f"a line of the CSV table is over {MAX_RECORD >> 20} MiB", where=where, help="take it out; nothing was sent"
        )
    return (line + b"\n").decode("utf-8", "surrogateescape")


def _csv_reader(source: Source, start: Start) -> Any:
    chunks = read_chunks(Path(source.path), start.offset)
    lines = split_lines(chunks, number=start.number)
    texts = (_csv_line(line, f"{source.path}, line {number}") for number, line in lines)
    return csv.reader(texts, delimiter=source.delimiter, strict=True)


def _read_csv(source: Source, start: Start) -> Iterator[Row]:
    header: list[str] | None = None if start == _TOP else next(_csv_reader(source, _TOP))
    reader = _csv_reader(source, start)
    while True:
        number = reader.line_num + start.number
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


def _read_parquet(source: Source, start: Start) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(source.path) as table:
            sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
            while sizes and number + sizes[0] < start.number:
                number += sizes.pop(0)
            groups = range(table.num_row_groups - len(sizes), table.num_row_groups)
            for batch in table.iter_batches(batch_size=512, row_groups=list(groups)):
                for values in _row_values(batch):
                    number += 1
                    if number >= start.number:
                        yield Row(number, values, repr(values).encode("utf-8", "backslashreplace"))
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise GristmillError(
            f"the Parquet table cannot be read: {error}", where=source.path, help="write the file again"
        ) from error


def _row_values(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch; texts as bytes when one of them is not UTF-8, which Parquet does not prevent."""
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        columns = [
            column.cast(pa.binary())
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            else column
            for column in batch.columns
        ]
        rows = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    return rows


def _read_folder(source: Source, start: Start) -> Iterator[Row]:
    for number, path in enumerate(source.files()[start.number - 1 :], start=start.number):
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


_READERS: dict[Kind, Callable[[Source, Start], Iterator[Row]]] = {
    "lines": _read_lines,
    "array": _read_array,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "folder": _read_folder,
    "empty": lambda source, start: iter(()),
}
