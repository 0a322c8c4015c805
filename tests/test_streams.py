"""Bytes of an input: decompressed, marked, and cut into lines at b"\\n" alone."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import GristmillError
from gristmill.streams import CHUNK, line_offsets, read_chunks, split_lines

DATA = b"".join(b"line %d\n" % number for number in range(200_000))
HALF = len(DATA) // 2
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0size"  # how pzstd begins each frame


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, "zstd", asbytes=True)
    return packed


def write(folder: Path, data: bytes) -> Path:
    path = folder / "input"
    path.write_bytes(data)
    return path


PACKED = {
    "plain": DATA,
    "gzip": gzip.compress(DATA),
    "gzip of several members": gzip.compress(DATA[:HALF]) + gzip.compress(b"") + gzip.compress(DATA[HALF:]),
    "zstd": zstd(DATA),
    "zstd of several frames": zstd(DATA[:HALF]) + zstd(DATA[HALF:]),
    "zstd as pzstd writes it": SKIPPABLE + zstd(DATA[:HALF]) + SKIPPABLE + zstd(DATA[HALF:]),
}


@pytest.mark.parametrize("data", PACKED.values(), ids=PACKED.keys())
def test_archives_are_read_whole(tmp_path: Path, data: bytes) -> None:
    chunks = list(read_chunks(write(tmp_path, data)))
    assert b"".join(chunks) == DATA
    assert max(map(len, chunks)) <= CHUNK


BROKEN = {
    "gzip without its end": (gzip.compress(DATA)[:-4], "gzip"),
    "half a gzip": (gzip.compress(DATA)[:20_000], "gzip"),
    "gzip with a wrong checksum": (gzip.compress(DATA)[:-8] + b"\0" * 8, "gzip"),
    "gzip with something after it": (gzip.compress(DATA) + b"\0" * 512, "gzip"),
    "a second member cut": (gzip.compress(DATA) + gzip.compress(DATA)[:-9], "gzip"),
    "a gzip header alone": (gzip.compress(DATA)[:5], "gzip"),
    "half a zstd": (zstd(DATA)[:500], "zstd"),
    "a second frame cut": (zstd(DATA) + zstd(DATA)[:-5], "zstd"),
    "zstd with something after it": (zstd(DATA) + b"junk", "zstd"),
}


@pytest.mark.parametrize(("data", "name"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_archive_is_an_error(tmp_path: Path, data: bytes, name: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(GristmillError, match=f"the {name} archive is truncated or corrupt") as caught:
        list(read_chunks(path))
    assert caught.value.where == str(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    path = write(tmp_path, f'{mark}{{"id": 1}}\n'.encode(encoding))
    with pytest.raises(GristmillError, match=f"the file is {encoding[:6].upper()}, not UTF-8") as caught:
        list(read_chunks(path))
    assert "iconv -f" in str(caught.value.help)


def test_a_mark_is_left_out_at_the_beginning_alone(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    path = write(tmp_path, mark + b"one\n" + mark + b"two\n\xff\xfethree\n")
    assert b"".join(read_chunks(path)) == b"one\n" + mark + b"two\n\xff\xfethree\n"
    second, third = line_offsets(path, [2, 3])
    assert b"".join(read_chunks(path, second)) == mark + b"two\n\xff\xfethree\n"
    assert b"".join(read_chunks(path, third)) == b"\xff\xfethree\n"
    assert list(read_chunks(write(tmp_path, gzip.compress(mark + b"one")))) == [b"one"]


def test_no_bytes_are_no_chunks(tmp_path: Path) -> None:
    for data in (b"", b"\xef\xbb\xbf", gzip.compress(b""), zstd(b"")):
        assert list(read_chunks(write(tmp_path, data))) == []


def test_only_a_newline_ends_a_line() -> None:
    text = "a\u2028b\u2029c\x85d\re\x0bf\x0cg\x1ch\x00i"
    assert list(split_lines([f"{text}\n{text}\r\n".encode()])) == [(1, text.encode()), (2, f"{text}\r".encode())]


PIECE = st.binary(max_size=5) | st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\xe2\x80\xa8"])
CUT = st.lists(st.lists(PIECE, max_size=5).map(b"".join), max_size=6)


@given(CUT, st.integers(0, 8), st.integers(1, 9))
def test_lines_are_the_same_however_they_are_chunked(chunks: list[bytes], limit: int, number: int) -> None:
    whole = b"".join(chunks)
    lines = whole.split(b"\n")
    expected = lines if lines[-1] else lines[:-1]
    found = list(split_lines(chunks, limit, number))
    assert found == [(place, line if len(line) <= limit else None) for place, line in enumerate(expected, start=number)]


@settings(max_examples=50, deadline=None)
@given(data=CUT, which=st.sets(st.integers(1, 12), max_size=4))
def test_offsets_are_where_lines_begin(data: list[bytes], which: set[int]) -> None:
    whole = b"".join(data)
    lines = dict(split_lines([whole]))
    numbers = sorted(which & set(lines))
    with tempfile.TemporaryDirectory() as folder:
        offsets = line_offsets(write(Path(folder), whole), numbers)
    for number, offset in zip(numbers, offsets, strict=True):
        assert dict(split_lines([whole[offset:]], number=number))[number] == lines[number]


def test_offsets_reach_over_chunks(tmp_path: Path) -> None:
    path = write(tmp_path, DATA)
    for number, offset in zip([1, 150_000, 200_000], line_offsets(path, [1, 150_000, 200_000]), strict=True):
        assert DATA[offset:].startswith(b"line %d\n" % (number - 1))
