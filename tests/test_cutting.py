"""Shards are the same whether a source is read from its top or from where a shard starts; ids are proved unique."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill import cutting
from gristmill.campaign import Documents
from gristmill.cutting import cut_source, id_hash, prove_unique, rows_from
from gristmill.errors import GristmillError
from gristmill.sources import Source, read_rows, recognise

ROWS = [{"id": f"d{i}", "text": f'text {i}\nsecond \u2028 line, "quoted" {"x" * (i % 7)}'} for i in range(23)]


def _lines(path: Path) -> None:
    path.write_text("\n\n".join(json.dumps(row) for row in ROWS) + "\n")


def _array(path: Path) -> None:
    path.write_text(json.dumps({"before": [1], "requests": ROWS, "after": {"a": []}}, indent=1))


def _array_with_mark(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS).encode())


def _csv(path: Path) -> None:
    quoted = ['"' + row["text"].replace('"', '""') + '"' for row in ROWS]
    path.write_text("id,text\r\n" + "".join(f"{row['id']},{text}\r\n" for row, text in zip(ROWS, quoted, strict=True)))


def _parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4)


def _gzip(path: Path) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))


def _folder(path: Path) -> None:
    path.mkdir()
    for row in ROWS:
        (path / f"{row['id']}.txt").write_text(row["text"])


@pytest.mark.parametrize("make", [_lines, _array, _array_with_mark, _csv, _parquet, _gzip, _folder])
@pytest.mark.parametrize("size", [1, 5, 23, 40])
def test_a_shard_read_from_its_start_has_the_rows_of_the_whole(make: object, size: int, tmp_path: Path) -> None:
    path = tmp_path / "input"
    make(path)  # type: ignore[operator]
    name = f"{path}/**/*" if path.is_dir() else str(path)
    source = recognise(name, Documents())
    whole = [row._replace(offset=None) for row in read_rows(source)]
    assert len(whole) == 23
    cuts = cut_source(source, size, Documents(), tmp_path / "ids")
    first = 0
    for cut in cuts:
        assert (cut.start is None) == (make is _gzip)
        rows = rows_from(source, cut.start, first)
        assert [next(rows)._replace(offset=None) for _ in range(cut.rows)] == whole[first : first + cut.rows]
        first += cut.rows
    assert first == 23


def _source(path: Path, ids: list[object]) -> tuple[Source, Path]:
    path.write_text("".join(json.dumps({"id": id, "messages": []}) + "\n" for id in ids))
    source = recognise(str(path), None)
    hashes = path.with_suffix(".ids")
    cut_source(source, 10, None, hashes)
    return source, hashes


def test_ids_are_those_of_the_rows_in_order(tmp_path: Path) -> None:
    _, hashes = _source(tmp_path / "a.jsonl", ["x", 7, None])
    expected = ["x", "7", f"{tmp_path}/a.jsonl:3"]
    assert hashes.read_bytes() == b"".join(map(id_hash, expected))


@pytest.mark.parametrize("bucket_rows", [1_000_000, 7])
def test_an_id_that_occurs_twice_is_named_with_its_places(
    bucket_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "_BUCKET_ROWS", bucket_rows)
    first = _source(tmp_path / "a.jsonl", [*range(30), "twice"])
    second = _source(tmp_path / "b.jsonl", ["twice", *range(100, 130), "29"])
    empty = _source(tmp_path / "c.jsonl", [])
    with pytest.raises(GristmillError) as caught:
        prove_unique([first, second, empty], None)
    message = str(caught.value)
    assert "2 are not" in message
    assert f"'twice' at {tmp_path}/a.jsonl:31, {tmp_path}/b.jsonl:1" in message
    assert f"'29' at {tmp_path}/a.jsonl:30, {tmp_path}/b.jsonl:32" in message
    prove_unique([first, empty], None)
