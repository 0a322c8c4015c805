"""The journal: what was appended whole is found again, whatever else stands in the files."""

from __future__ import annotations

import errno
import random
import resource
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.journal import Journal, Reader, encode, scan

FINGERPRINT = "0123456789abcdef" * 2


def record(id: str, fingerprint: str = FINGERPRINT, raw: str = "{}") -> dict[str, Any]:
    return {"id": id, "fingerprint": fingerprint, "outcome": "ok", "answer": "a", "raw": raw}


def write(path: Path, *records: dict[str, Any]) -> None:
    with Journal(path) as journal:
        for item in records:
            journal.append(item)


def found(folder: Path, *ids: str, fingerprint: str = FINGERPRINT) -> dict[str, dict[str, Any]]:
    """The records of these ids as `scan` and `Reader` give them."""
    places = scan(folder, {fingerprint: set(ids)}).places
    with Reader() as reader:
        return {id: orjson.loads(reader.read(place)) for (_, id), place in places.items()}


def test_a_record_is_found_by_id_and_fingerprint(tmp_path: Path) -> None:
    other = "f" * 32
    write(tmp_path / "a.jsonl", record("1"), record("2"), record("3", other))
    assert found(tmp_path, "1", "3") == {"1": record("1")}
    assert found(tmp_path, "3", fingerprint=other) == {"3": record("3", other)}
    assert found(tmp_path, "4") == {}


def test_one_prompt_under_two_ids_is_two_records(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", record("1"), record("2"))
    assert set(found(tmp_path, "1", "2")) == {"1", "2"}


def test_the_first_record_wins(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", record("1", raw="late"))
    write(tmp_path / "a.jsonl", record("1", raw="first"), record("1", raw="second"))
    assert found(tmp_path, "1")["1"]["raw"] == "first"


def test_no_folder_and_no_records_are_no_answers(tmp_path: Path) -> None:
    assert found(tmp_path / "none", "1") == {}
    Journal(tmp_path / "a.jsonl").close()
    assert list(tmp_path.iterdir()) == [], "an attempt without answers leaves no file"


LINE = encode(record("torn", raw='{"text":"Grüße, 你好"}'))
TAILS = {
    "half a record": LINE[: len(LINE) // 2],
    "half a character": LINE[: LINE.index("ü".encode()) + 1],
    "no newline": LINE[:-1],
    "half a record and a newline": LINE[: len(LINE) // 2] + b"\n",
    "half a character and a newline": LINE[: LINE.index("ü".encode()) + 1] + b"\n",
    "NULs": b"\0" * 4096,
    "NULs and a newline": b"\0" * 4096 + b"\n",
    "a record that ends in NULs": LINE[:-40] + b"\0" * 40 + b"\n",
    "the beginning alone": b'{"fingerprint":"',
    "something else": b'["fingerprint"]\n42\n\n{}\n\xff\xfe\n',
    "an id of another kind": LINE.replace(b'"id":"torn"', b'"id":["torn"]'),
    "nothing but the keys": b'{"fingerprint":"' + FINGERPRINT.encode() + b'"}\n',
}


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS.keys())
def test_a_torn_line_costs_itself_alone(tmp_path: Path, tail: bytes) -> None:
    whole = tmp_path / "a.jsonl"
    write(whole, record("1"), record("2"))
    with whole.open("ab") as file:
        file.write(tail)
    (tmp_path / "b.jsonl").write_bytes(tail)
    write(tmp_path / "c.jsonl", record("3"))
    assert found(tmp_path, "1", "2", "3", "torn") == {id: record(id) for id in "123"}


def test_every_cut_of_a_file_keeps_its_whole_lines(tmp_path: Path) -> None:
    lines = [encode(record(str(i), raw="ß\u2028\x85" * i)) for i in range(3)]
    data = b"".join(lines)
    for end in range(len(data) + 1):
        (tmp_path / "a.jsonl").write_bytes(data[:end])
        whole = data[:end].count(b"\n")
        assert set(found(tmp_path, "0", "1", "2")) == {str(i) for i in range(whole)}, end


TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # what JSON from a server decodes to: no lone surrogates


@settings(max_examples=60, deadline=None)
@given(
    records=st.dictionaries(TEXT, st.tuples(TEXT, TEXT), min_size=1, max_size=20),
    cut=st.integers(0, 10**6),
    files=st.integers(1, 3),
)
def test_what_was_appended_is_read_back(records: dict[str, tuple[str, str]], cut: int, files: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = {}
        for index, (id, (answer, raw)) in enumerate(records.items()):
            item = {**record(id, raw=raw), "answer": answer}
            write(folder / f"{index % files}.jsonl", item)
            expected[id] = item
        assert found(folder, *records) == expected
        victim = folder / "0.jsonl"
        data = victim.read_bytes()
        victim.write_bytes(data[: cut % (len(data) + 1)])
        left = found(folder, *records)
        assert left.items() <= expected.items()
        assert len(left) >= len(expected) - data.count(b"\n")


def test_a_record_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    """A write is cut short at a file's limit, as on a full disk; half a record must not stay."""
    path = tmp_path / "journal" / "a.jsonl"
    journal = Journal(path)
    written = 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # Python ignores SIGXFSZ: the write gives EFBIG
    try:
        with pytest.raises(OSError) as caught:
            while True:
                journal.append(record(str(written), raw="x" * random.Random(written).randrange(500)))
                written += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    data = path.read_bytes()
    assert len(data) > 19_000
    assert data.endswith(b"\n") and data.count(b"\n") == written
    journal.append(record("after"))
    journal.close()
    ids = [*map(str, range(written)), "after"]
    assert set(found(path.parent, *ids)) == set(ids)


def test_a_full_disk_leaves_the_journal_whole_and_usable(tmp_path: Path, small_disk: Any) -> None:
    folder = tmp_path / "journal"
    small_disk(folder, 16)
    path = folder / "a.jsonl"
    journal = Journal(path)
    written = 0
    with pytest.raises(OSError) as caught:
        while True:
            journal.append(record(str(written), raw="x" * 300))
            written += 1
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert path.read_bytes().count(b"\n") == written and path.read_bytes().endswith(b"\n")
    subprocess.run(["mount", "-o", "remount,size=64k", str(folder)], check=True)
    journal.append(record("after"))
    journal.close()
    assert set(found(folder, "0", "after")) == {"0", "after"}
