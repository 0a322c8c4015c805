"""Answers of all groups to answers.parquet: input order, declared schema, constant memory, completeness proved."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from gristmill import __version__
from gristmill.cutting import id_hash
from gristmill.errors import GristmillError
from gristmill.layout import Layout, write_atomically
from gristmill.outcomes import Answer, AnswerCheck, interpret, json_text
from gristmill.parallel import WORTH_PROCESSES, ordered_map

_ROW_GROUP_BYTES = 32 << 20
_ROW_GROUP_ROWS = 100_000
_BATCH_BYTES = 16 << 20

_BEFORE = {
    "id": pa.string(),
    "status": pa.string(),
    "answer": pa.string(),
    "label": pa.string(),
    "confidence": pa.float64(),
}
_AFTER = {
    "reasoning": pa.string(),
    "finish_reason": pa.string(),
    "error_code": pa.string(),
    "error_message": pa.string(),
    "prompt_tokens": pa.int64(),
    "completion_tokens": pa.int64(),
    "latency_s": pa.float64(),
    "attempts": pa.int32(),
    "model": pa.string(),
    "fingerprint": pa.string(),
    "source_file": pa.string(),
    "source_row": pa.int64(),
    "raw": pa.string(),
}
_AGAIN = "delete the results' answers/ folder and run again: the journal keeps all, nothing is asked twice"
_SCALARS = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}


@dataclass(frozen=True)
class Table:
    """The declared form of answers.parquet.

    properties: property of the answer schema → (column, type); a property that has no scalar type of its own is
    kept as JSON text. keep: input column → column; one whose name is taken is called input_<name>.
    """

    properties: dict[str, tuple[str, pa.DataType]]
    keep: dict[str, str]

    def schema(self) -> pa.Schema:
        middle = {column: kind for column, kind in self.properties.values() if column not in _BEFORE}
        fields = {**_BEFORE, **middle, **_AFTER, **dict.fromkeys(self.keep.values(), pa.string())}
        metadata = {"gristmill": __version__}
        return pa.schema([pa.field(name, kind) for name, kind in fields.items()], metadata=metadata)


def table_for(check: AnswerCheck, keep: Sequence[str]) -> Table:
    """The table of a campaign with this answer check and these kept columns."""
    taken = set(_BEFORE) | set(_AFTER)
    properties: dict[str, tuple[str, pa.DataType]] = {}
    for name, schema in ((check.schema or {}).get("properties") or {}).items():
        kind = _column_type(schema)
        if name == "label" and kind == pa.string():
            properties[name] = ("label", kind)
            continue
        column = name
        while column in taken:
            column = f"answer_{column}"
        taken.add(column)
        properties[name] = (column, kind)
    columns = {}
    for name in dict.fromkeys(keep):
        column = f"input_{name}" if name in taken else name
        if column in taken:
            raise GristmillError(
                f"two columns of answers.parquet would be called {column!r}",
                help="rename the column in documents.keep",
            )
        taken.add(column)
        columns[name] = column
    return Table(properties, columns)


def _column_type(schema: Any) -> pa.DataType:
    if not isinstance(schema, dict):
        return pa.string()
    kinds = schema.get("type")
    names = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    if names == [None] and isinstance(schema.get("enum"), list) and all(isinstance(v, str) for v in schema["enum"]):
        return pa.string()
    return _SCALARS.get(str(names[0]), pa.string()) if len(names) == 1 else pa.string()


@dataclass
class Summary:
    """What came of a campaign: rows by status, errors by code, tokens, and the agreement with gold labels."""

    rows: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    error_codes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    gold_rows: int = 0
    gold_right: int = 0

    def add(self, other: Summary) -> None:
        """Count another summary in."""
        self.rows += other.rows
        self.statuses.update(other.statuses)
        self.error_codes.update(other.error_codes)
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.gold_rows += other.gold_rows
        self.gold_right += other.gold_right

    @property
    def not_ok_share(self) -> float:
        """Share of rows that are not `ok`."""
        return (self.rows - self.statuses["ok"]) / self.rows if self.rows else 0.0

    def as_json(self) -> dict[str, Any]:
        accuracy = self.gold_right / self.gold_rows if self.gold_rows else None
        return {
            "rows": self.rows,
            "ok": self.statuses["ok"],
            "invalid": self.statuses["invalid"],
            "error": self.statuses["error"],
            "not_ok_share": self.not_ok_share,
            "error_codes": dict(self.error_codes.most_common()),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "gold": {"rows": self.gold_rows, "right": self.gold_right, "accuracy": accuracy}
            if self.gold_rows
            else None,
        }


@dataclass(frozen=True)
class Part:
    """One shard's answers to convert."""

    path: Path
    source_file: str
    rows: int
    table: Table
    check: AnswerCheck
    gold: str | None


@dataclass
class Converted:
    """A shard's answers as Arrow batches (serialised), the lines of errors.jsonl, and their count."""

    batches: list[bytes]
    errors: bytes
    summary: Summary


def convert(part: Part) -> Converted:
    """Read one shard's answers, interpret and type them."""
    schema = part.table.schema()
    result = Converted([], b"", Summary())
    errors: list[bytes] = []
    cells: list[tuple[Any, ...]] = []
    size = 0
    if not part.path.exists():
        raise GristmillError("an answers file is missing", where=str(part.path), help=_AGAIN)
    # A file's name need not be Unicode: it is shown, never lost.
    part = replace(part, source_file=part.source_file.encode("utf-8", "backslashreplace").decode())
    with part.path.open("rb", 1 << 20) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise GristmillError(
                    f"the answers file is damaged: {error}", where=f"{part.path}, line {number}", help=_AGAIN
                ) from error
            answer, record = answer_of(row, part.check)
            cells.append(_cells(row, record, answer, part))
            if answer.status != "ok":
                errors.append(_error_line(row, answer, part.source_file))
                result.summary.error_codes[answer.error_code or "unknown"] += 1
            if part.gold is not None and (right := row["keep"].get(part.gold)) is not None:
                result.summary.gold_rows += 1
                result.summary.gold_right += answer.status == "ok" and answer.label == right
            size += len(line)
            if size > _BATCH_BYTES:
                _finish_batch(cells, schema, result)
                cells, size = [], 0
    if cells:
        _finish_batch(cells, schema, result)
    result.errors = b"".join(errors)
    return result


def _finish_batch(cells: list[tuple[Any, ...]], schema: pa.Schema, result: Converted) -> None:
    columns = dict(zip(schema.names, zip(*cells, strict=True), strict=True))
    arrays = [pa.array(columns[field.name], field.type) for field in schema]
    result.batches.append(bytes(pa.record_batch(arrays, schema=schema).serialize()))
    summary = result.summary
    summary.rows += len(cells)
    summary.statuses.update(columns["status"])
    # A row with no attempt of its own has the answer of a twin, which was paid for once.
    paid = [bool(attempts) for attempts in columns["attempts"]]
    summary.prompt_tokens += sum(filter(None, compress(columns["prompt_tokens"], paid)))
    summary.completion_tokens += sum(filter(None, compress(columns["completion_tokens"], paid)))


def answer_of(row: dict[str, Any], check: AnswerCheck) -> tuple[Answer, dict[str, Any] | None]:
    """The answer in a line of an answers file, and its record, None when it was never sent."""
    if "error" in row:
        code, message = row["error"]
        return Answer("error", error_code=code, error_message=message), None
    record = row["record"]
    return interpret(record["http_status"], record["raw"], row["route"], check), record


def _typed(answer: Answer, table: Table) -> dict[str, Any]:
    """The typed columns of an answer; one that does not fit its type makes the row `invalid`."""
    typed: dict[str, Any] = {}
    for name, (column, kind) in table.properties.items():
        value = (answer.values or {}).get(name)
        if value is None:
            typed[column] = None
        elif kind == pa.string():
            typed[column] = value if isinstance(value, str) else json_text(value)
            if typed[column] is None:
                _refuse(answer, "schema_mismatch", f"{name} is nested too deeply")
        elif kind == pa.float64():
            typed[column] = float(value)
        elif kind == pa.int64():
            typed[column] = _int64(value)
            if typed[column] is None:
                _refuse(answer, "number_out_of_range", f"{name} is beyond 64 bits")
        else:
            typed[column] = value
    return typed


def _int64(value: int | float) -> int | None:
    """The value as a 64-bit integer, None when it is none; integers beyond 64 bits were read as floats."""
    least = -(2**63) if isinstance(value, int) else -(2**63) + 1
    return number if least <= (number := int(value)) < 2**63 else None


def _refuse(answer: Answer, code: str, message: str) -> None:
    answer.status, answer.error_code, answer.error_message = "invalid", code, message


def _cells(row: dict[str, Any], record: dict[str, Any] | None, answer: Answer, part: Part) -> tuple[Any, ...]:
    """The values of a row in the order of the schema."""
    typed = _typed(answer, part.table) if part.table.properties else {}
    label = typed.pop("label", answer.label)
    keep = row["keep"]
    return (
        row["id"],
        answer.status,
        answer.answer,
        label,
        None,
        *typed.values(),
        answer.reasoning,
        answer.finish_reason,
        answer.error_code,
        answer.error_message,
        answer.prompt_tokens,
        answer.completion_tokens,
        record["timings"]["latency_s"] if record else None,
        record["attempts"] if record else 0,
        answer.model or row["model"],
        row["fingerprint"],
        part.source_file,
        row["row"],
        record["raw"] if record else None,
        *[keep.get(name) for name in part.table.keep],
    )


def _error_line(row: dict[str, Any], answer: Answer, source_file: str) -> bytes:
    return (
        orjson.dumps(
            {
                "id": row["id"],
                "status": answer.status,
                "error_code": answer.error_code,
                "error_message": answer.error_message,
                "source_file": source_file,
                "source_row": row["row"],
            }
        )
        + b"\n"
    )


def merge(
    parts: Sequence[Part],
    ids: Sequence[tuple[str, Path]],
    workers: int,
    outputs: tuple[Path, Path, Path],
) -> Summary:
    """Write answers.parquet, errors.jsonl and summary.json (`outputs`) and prove that the table is complete.

    parts: one for each shard, in the order of the inputs. ids: each input and the file with the hashes of its ids.
    workers: processes that convert.
    Raises GristmillError naming what is missing, twice or out of place; then no output is left.
    """
    table_path, errors_path, summary_path = outputs
    schema = parts[0].table.schema()
    summary = Summary()
    rows_in = sum(part.rows for part in parts)
    temporary = table_path.with_name(f".{table_path.name}.{os.getpid()}.tmp")
    temporary_errors = errors_path.with_name(f".{errors_path.name}.{os.getpid()}.tmp")
    try:
        with (
            temporary_errors.open("wb") as errors,
            pq.ParquetWriter(temporary, schema, compression="zstd", compression_level=1) as writer,
        ):
            waiting: list[pa.RecordBatch] = []
            for converted in ordered_map(convert, parts, workers if rows_in > WORTH_PROCESSES else 1):
                summary.add(converted.summary)
                errors.write(converted.errors)
                waiting += [pa.ipc.read_record_batch(pa.py_buffer(data), schema) for data in converted.batches]
                rows, size = sum(b.num_rows for b in waiting), sum(b.nbytes for b in waiting)
                if rows >= _ROW_GROUP_ROWS or size >= _ROW_GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(waiting, schema))
                    waiting = []
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting, schema))
        prove_complete(temporary, ids)
        temporary_errors.replace(errors_path)
        temporary.replace(table_path)
    finally:
        temporary.unlink(missing_ok=True)
        temporary_errors.unlink(missing_ok=True)
    write_atomically(summary_path, json.dumps(summary.as_json(), indent=1) + "\n")
    return summary


def prove_complete(table: Path, ids: Sequence[tuple[str, Path]]) -> None:
    """Read the ids back from the table and compare them with those of the inputs, one by one and in order.

    ids: each input and the file with the hashes of its ids, which were proved unique before anything was sent; so
    every id is in the table exactly once.
    """
    with pq.ParquetFile(table) as file:
        written = _hashes_of(file)
        for source, hashes in ids:
            for row, want in enumerate(_stored(hashes), start=1):
                got = next(written, None)
                if got is None or got[1] != want:
                    found = "nothing" if got is None else repr(got[0])
                    raise GristmillError(
                        f"the table is not complete: found {found} in the place of row {row} of {source}",
                        where=str(table),
                        help=_AGAIN,
                    )
        extra = next(written, None)
        if extra is not None:
            raise GristmillError(f"the table has a row too many: {extra[0]!r}", where=str(table), help=_AGAIN)


def _stored(path: Path) -> Iterator[bytes]:
    with path.open("rb", 1 << 16) as file:
        while hashed := file.read(16):
            yield hashed


def _hashes_of(file: pq.ParquetFile) -> Iterator[tuple[str, bytes]]:
    for batch in file.iter_batches(batch_size=8192, columns=["id"]):
        for id in batch.column(0).to_pylist():
            yield id, id_hash(id)


def too_many(bad: int, rows: int, max_error_share: float) -> bool:
    """Whether more rows are not `ok` than a share allows."""
    return bad > max_error_share * rows + 1e-6  # a hair, for shares that binary fractions do not have


def verdict(summary: dict[str, Any], max_error_share: float, layout: Layout) -> None:
    """Raise GristmillError when more rows than allowed are not `ok`; everything stays written."""
    bad = summary["invalid"] + summary["error"]
    if not too_many(bad, summary["rows"], max_error_share):
        return
    codes = ", ".join(f"{code} {count:,}" for code, count in list(summary["error_codes"].items())[:8])
    raise GristmillError(
        f"{bad:,} of {summary['rows']:,} rows ({summary['not_ok_share']:.2%}) are not ok, "
        f"more than limits.max_error_share = {max_error_share:g} allows: {codes}",
        where=f"{layout.errors} says which; the table is complete all the same: {layout.table}",
        help="correct the inputs or the prompt and run again, or raise limits.max_error_share",
    )
