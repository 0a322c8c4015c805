"""What input files are taken for, and the rows that are read from them."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill import sources
from gristmill.campaign import Campaign, Documents, parse_campaign
from gristmill.errors import GristmillError
from gristmill.requests import Recipe, Request, request_maker, row_id
from gristmill.sources import Row, Source, find_inputs, identity, read_rows, recognise

DOCUMENTS = Documents()
ARRAY = '{"requests": [%s]}'
CHAT = '{"id": "%s", "messages": [{"role": "user", "content": "hello"}]}'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, "zstd", asbytes=True)
    return packed


def write(data: bytes | str, name: str = "input") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return name


def requests(source: Source, documents: Documents | None) -> list[Request]:
    """What the rows of a source become; the id of each is the same when its request is not made."""
    template = "{{ text }}" if documents else None
    maker = request_maker(Recipe(documents, template, None, None, "m", None), source.path)
    id_of = row_id(documents, source)
    made = []
    for row in read_rows(source):
        made.append(maker(row))
        assert id_of(row) == made[-1].id
    return made


def outcomes(data: bytes | str, documents: Documents | None = None) -> list[tuple[str, str | None]]:
    """Id and error code of every row."""
    found = requests(recognise(write(data), documents), documents)
    return [(request.id, request.error.code if request.error else None) for request in found]


def prompts(data: bytes | str, documents: Documents = DOCUMENTS, name: str = "input") -> dict[str, str]:
    """Id → prompt of documents, all of which can be sent."""
    made = requests(recognise(write(data, name), documents), documents)
    assert [request.error for request in made if request.error] == []
    return {request.id: json.loads(request.body)["messages"][0]["content"] for request in made}


# -- what a file is ---------------------------------------------------------------------------------------------------

NOTES = '{"notes": "%s", ' % ("x" * (2 << 20))
CHATS = [CHAT % number for number in range(3)]
FILES: dict[str, tuple[bytes | str, str, int]] = {
    "lines": ("\n".join(CHATS), "lines", 3),
    "lines with CRLF": ("\r\n".join(CHATS) + "\r\n", "lines", 3),
    "lines after a mark": ("\ufeff" + "\n".join(CHATS), "lines", 3),
    "one line": (CHATS[0], "lines", 1),
    "lines with blank ones": ("\n \n" + "\n\n\t\n".join(CHATS) + "\n\n", "lines", 3),
    "lines, the first of them bad": ("{oops\n" + "\n".join(CHATS), "lines", 4),
    "lines, the first of them nested without end": ('{"a": ' + "[" * 99_999 + "}\n" + CHATS[0], "lines", 2),
    "lines, the last of them cut": ("\n".join(CHATS)[:-9], "lines", 3),
    "lines, one of them prose with brackets": (f"{CHATS[0]}\nsee [1]\n{CHATS[1]}", "lines", 3),
    "lines, gzip": (gzip.compress("\n".join(CHATS).encode()), "lines", 3),
    "lines, zstd": (zstd("\n".join(CHATS).encode()), "lines", 3),
    "requests in one line": (ARRAY % ", ".join(CHATS), "array", 3),
    "requests in one line, with a newline": (ARRAY % ", ".join(CHATS) + "\n", "array", 3),
    "requests, indented": (
        json.dumps({"requests": [json.loads(chat) for chat in CHATS]}, indent=2),
        "array",
        3,
    ),
    "requests among other keys": (
        json.dumps({"version": [1], "requests": [json.loads(chat) for chat in CHATS], "n": {"requests": []}}),
        "array",
        3,
    ),
    "requests after two megabytes of others": (
        NOTES + ARRAY[1:] % ", ".join(CHATS),
        "array",
        3,
    ),
    "a bare array": ("[\n" + ",\n".join(CHATS) + "\n]\n", "array", 3),
    "a bare array, gzip": (gzip.compress(f"[{','.join(CHATS)}]".encode()), "array", 3),
    "no requests": ('{"requests": []}', "array", 0),
    "nothing": ("", "empty", 0),
    "a mark alone": ("\ufeff", "empty", 0),
    "blanks alone": (" \n\r\n\t\n" * 300_000, "empty", 0),
    "an empty archive": (gzip.compress(b""), "empty", 0),
    "a long first line": (NOTES + f"{CHATS[0][1:]}\n{CHATS[1]}", "lines", 2),
    "a long first line after a mark": ("\ufeff" + NOTES + CHATS[0][1:], "lines", 1),
}


@pytest.mark.parametrize(("data", "kind", "rows"), FILES.values(), ids=FILES.keys())
def test_request_files_are_recognised(data: bytes | str, kind: str, rows: int) -> None:
    source = recognise(write(data), None)
    assert source.kind == kind
    assert len(list(read_rows(source))) == rows


TABLE = "id,text\n1,hello\n2,world\n"
PROSE = "Dear all,\nthe meeting is on Monday [sic].\n"
REFUSED: dict[str, tuple[bytes | str, Documents | None, str]] = {
    "CSV for requests": (TABLE, None, "text that begins with 'id,text'"),
    "HTML": ("<!DOCTYPE html>\n<html><body>[1]</body></html>", None, "text that begins with '<!DOCTYPE html>'"),
    "HTML for documents": ("<html>{}</html>", DOCUMENTS, "without id and text columns"),
    "prose": (PROSE, None, "text that begins with 'Dear all,'"),
    "prose for documents": (PROSE, DOCUMENTS, "without id and text columns"),
    "a table without the columns": ("key;body\n1;a\n", DOCUMENTS, "without id and text columns 'id' and 'text'"),
    "binary": (bytes(range(256)) * 50, None, "binary data"),
    "NULs": (b"\0" * 5000, None, "binary data"),
    "an executable": (b"\x7fELF\x02\x01\x01\0\0\0[{", DOCUMENTS, "binary data"),
    "a ZIP": (b"PK\x03\x04\x14\0\0\0\x08\0{}[]", None, "binary data"),
    "one broken object": ('{"id": 1, "messages": [', None, "broken JSON"),
    "lines that are all broken": ("{oops\n{oops\n", None, "broken JSON"),
    "old Mac line ends": ("\r".join(CHATS), None, "broken JSON"),
    "UTF-16": ("\n".join(CHATS).encode("utf-16"), None, "the file is UTF-16"),
    "a megabyte of blanks": (b" " * (1 << 20) + CHATS[0].encode(), None, "a megabyte of white space"),
}


@pytest.mark.parametrize(("data", "documents", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_input_stops_the_run(data: bytes | str, documents: Documents | None, message: str) -> None:
    with pytest.raises(GristmillError, match=message) as caught:
        recognise(write(data), documents)
    assert caught.value.where == "input"
    assert caught.value.help


def test_parquet_needs_documents() -> None:
    pq.write_table(pa.table({"id": ["1"], "text": ["a"]}), "input")
    with pytest.raises(GristmillError, match="a Parquet table"):
        recognise("input", None)
    assert recognise("input", DOCUMENTS).kind == "parquet"


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_a_truncated_archive_stops_the_run(pack: Callable[[bytes], bytes]) -> None:
    data = "\n".join(CHAT % number for number in range(50_000)).encode()
    path = write(pack(data)[:-10])
    with pytest.raises(GristmillError, match="truncated or corrupt"):
        list(read_rows(recognise(path, None)))


# -- rows of request files --------------------------------------------------------------------------------------------


def test_one_bad_line_is_one_bad_row() -> None:
    lines = [CHAT % 1, "{oops", CHAT % 2, "42", '"text"', "[]", "null", CHAT % 3]
    assert outcomes("\n".join(lines)) == [
        ("1", None),
        ("input:2", "malformed_json"),
        ("2", None),
        *((f"input:{number}", "malformed_json") for number in (4, 5, 6, 7)),
        ("3", None),
    ]


def test_one_bad_element_is_one_bad_row() -> None:
    elements = [CHAT % 1, "42", CHAT % 2, '{"id": "a" "b"}', "null", "[1]", CHAT % 3]
    assert outcomes(ARRAY % ", ".join(elements)) == [
        ("1", None),
        ("input:2", "malformed_json"),
        ("2", None),
        *((f"input:{number}", "malformed_json") for number in (4, 5, 6)),
        ("3", None),
    ]


def test_separators_of_unicode_end_no_line() -> None:
    text = "a\u2028b\u2029c\x85d"
    lines = [json.dumps(json.loads(CHAT % f"{text}{number}"), ensure_ascii=False) for number in range(2)]
    assert outcomes("\n".join(lines)) == [(f"{text}0", None), (f"{text}1", None)]


LIMIT = 64 << 20


def test_long_lines() -> None:
    fitting = CHAT % 1 + " " * (50_000_000 - len(CHAT % 1))
    with Path("input").open("w") as file:
        file.write(f"{CHAT % 0}\n{fitting}\n")
        for _ in range(80):
            file.write("x" * (1 << 20))
        file.write(f"\n{CHAT % 2}\n")
    found = requests(recognise("input", None), None)
    assert [(request.id, request.error and request.error.code) for request in found] == [
        ("0", None),
        ("1", None),
        ("input:3", "line_too_long"),
        ("2", None),
    ]


def test_lines_can_be_read_from_the_middle(tmp_path: Path) -> None:
    data = "\ufeff" + "\n\n".join(CHATS) + "\n"
    source = recognise(write(data), None)
    whole = list(read_rows(source))
    assert [row.number for row in whole] == [1, 3, 5]
    offset = data.encode().index(CHATS[1].encode())
    assert list(read_rows(source, sources.Start(offset, 3))) == whole[1:]


# -- tables of documents ----------------------------------------------------------------------------------------------

TABLES: dict[str, tuple[bytes | str, dict[str, str]]] = {
    "commas": (TABLE, {"1": "hello", "2": "world"}),
    "semicolons": ("id;text\n1;a,b\n", {"1": "a,b"}),
    "tabs": ("id\ttext\n1\ta,b;c\n", {"1": "a,b;c"}),
    "bars": ("id|text\n1|a,b;c\n", {"1": "a,b;c"}),
    "CRLF": ("id,text\r\n1,a\r\n2,b\r\n", {"1": "a", "2": "b"}),
    "no last newline": ("id,text\n1,a", {"1": "a"}),
    "a mark": ("\ufeffid,text\n1,a\n", {"1": "a"}),
    "blank lines": ("id,text\n\n1,a\n\n2,b\n\n", {"1": "a", "2": "b"}),
    "quoted newlines": ('id,text\n1,"a\nb\r\n\nc"\n2,d\n', {"1": "a\nb\r\n\nc", "2": "d"}),
    "quoted quotes": ('id,text\n"1","a ""b"" c"\n', {"1": 'a "b" c'}),
    "brackets": ("id,text\n1,see [1] and {2}\n", {"1": "see [1] and {2}"}),
    "JSON in a field": ('id,text\n1,"{""a"": [1]}"\n', {"1": '{"a": [1]}'}),
    "separators of Unicode": ("id,text\n1,a\u2028b\x85c\n", {"1": "a\u2028b\x85c"}),
    "other columns": ("n,text,id\n5,a,1\n", {"1": "a"}),
    "gzip": (gzip.compress(TABLE.encode()), {"1": "hello", "2": "world"}),
}


@pytest.mark.parametrize(("data", "expected"), TABLES.values(), ids=TABLES.keys())
def test_csv(data: bytes | str, expected: dict[str, str]) -> None:
    assert recognise(write(data), DOCUMENTS).kind == "csv"
    assert prompts(data) == expected


def test_csv_rows_that_do_not_fit() -> None:
    data = 'id,text\n1,a\n2\n3,b,c\n4,"d"e\n5,f\r6\n7,g\n'
    assert outcomes(data, DOCUMENTS) == [
        ("1", None),
        ("input:3", "malformed_row"),
        ("input:4", "malformed_row"),
        ("input:5", "malformed_row"),
        ("input:6", "malformed_row"),
        ("7", None),
    ]


def test_csv_latin_1() -> None:
    data = "id,text\n1,café\n2,tea\n".encode("latin-1")
    assert outcomes(data, DOCUMENTS) == [("1", "invalid_utf8"), ("2", None)]
    assert prompts(data, Documents(invalid_text="replace")) == {"1": "caf\ufffd", "2": "tea"}


@pytest.mark.parametrize(
    ("data", "message", "where"),
    [
        ('id,text\n1,a\n2,"b\n3,c\n', "a quote is opened and never closed", "input, line 3"),
        ("id,text,text\n1,a,b\n", "two columns have the same name", "input, line 1"),
    ],
)
def test_csv_that_cannot_be_trusted_stops_the_run(data: str, message: str, where: str) -> None:
    with pytest.raises(GristmillError, match=message) as caught:
        outcomes(data, DOCUMENTS)
    assert caught.value.where == where


@pytest.mark.parametrize("quote", ["", '"'])
def test_csv_lines_that_are_too_long_stop_the_run(quote: str) -> None:
    with Path("input").open("w") as file:
        file.write(f"id,text\n1,a\n2,{quote}")
        for _ in range(65):
            file.write("x" * (1 << 20))
        file.write(f"{quote}\n3,b\n")
    with pytest.raises(GristmillError, match="a line of the CSV table is over 64 MiB") as caught:
        list(read_rows(recognise("input", DOCUMENTS)))
    assert caught.value.where == "input, line 3"


def parquet(name: str = "input", **columns: Any) -> Source:
    pq.write_table(pa.table(columns), name, row_group_size=2)
    return recognise(name, DOCUMENTS)


def made(source: Source, documents: Documents = DOCUMENTS) -> list[tuple[str, str | None]]:
    return [(request.id, request.error.code if request.error else None) for request in requests(source, documents)]


def test_parquet() -> None:
    source = parquet(id=["a", "b", "c"], text=["x", None, " "])
    assert made(source) == [("a", None), ("b", "empty_document"), ("c", "empty_document")]
    assert made(parquet(id=pa.array([], pa.string()), text=pa.array([], pa.string()))) == []


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        (pa.array([1, 2]), ["not_text"] * 2),
        (pa.array([1.5, None]), ["not_text", "empty_document"]),
        (pa.array([["a"], []]), ["not_text"] * 2),
        (pa.array([b"a", b"\xff"]), [None, "invalid_utf8"]),
        (pa.array(["a", "b"]).dictionary_encode(), [None, None]),
        (pa.array(["a", "b"], pa.large_string()), [None, None]),
        (pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xed\xa0\x80"]).buffers()), [None, "invalid_utf8"]),
    ],
    ids=["integers", "floats", "lists", "binary", "dictionary", "large", "invalid UTF-8 declared as text"],
)
def test_parquet_texts(values: pa.Array, codes: list[str | None]) -> None:
    assert [code for _, code in made(parquet(id=["1", "2"], text=values))] == codes


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pa.array([7, 2**63 - 1]), ["7", "9223372036854775807"]),
        (pa.array([2**64 - 1, 8], pa.uint64()), ["18446744073709551615", "8"]),
        (pa.array([0, 86_400], pa.timestamp("s")), ["1970-01-01 00:00:00", "1970-01-02 00:00:00"]),
        (pa.array([1.0, None]), ["input:1 bad_id", "input:2 missing_id"]),
        (pa.array([True, False]), ["input:1 bad_id", "input:2 bad_id"]),
        (pa.array(["", "x"]), ["input:1 bad_id", "x"]),
    ],
    ids=["integers", "unsigned", "dates", "floats", "booleans", "empty"],
)
def test_parquet_ids(ids: pa.Array, expected: list[str]) -> None:
    assert [f"{id} {code}" if code else id for id, code in made(parquet(id=ids, text=["a", "b"]))] == expected


def test_parquet_replaces_what_is_not_unicode() -> None:
    text = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff"]).buffers())
    (request,) = requests(parquet(id=["1"], text=text), Documents(invalid_text="replace"))
    assert json.loads(request.body)["messages"][0]["content"] == "a\ufffd"


def test_a_corrupt_parquet_table_stops_the_run() -> None:
    source = parquet(id=["1"], text=["a"])
    Path("input").write_bytes(Path("input").read_bytes()[:-30])
    with pytest.raises(GristmillError, match="the Parquet table cannot be read"):
        list(read_rows(source))


@pytest.mark.parametrize(
    ("data", "documents", "message"),
    [
        ("\n".join(CHATS), DOCUMENTS, "JSONL, and none of the first 3 rows has both 'id' and 'text'"),
        (ARRAY % ", ".join(CHATS), DOCUMENTS, "a JSON list, and none of the first 3 rows has both 'id' and 'text'"),
        ('{"id": 1, "text": "a"}\n' * 999, None, "JSONL, and none of the first 100 rows has messages, prompt or body"),
        ('[1, {"id": 1, "text": "a"}]', None, "a JSON list, and none of the first 1 rows has messages, prompt or body"),
    ],
)
def test_files_of_the_other_sort_stop_the_run(data: str, documents: Documents | None, message: str) -> None:
    with pytest.raises(GristmillError, match=message):
        recognise(write(data), documents)


def test_a_parquet_table_without_the_columns_stops_the_run() -> None:
    with pytest.raises(GristmillError, match="none of the first 2 rows has both 'id' and 'text'"):
        parquet(id=[1, 2], body=["a", "b"])


def test_one_row_of_the_other_sort_is_one_bad_row() -> None:
    assert outcomes('{"id": 1, "text": "a"}\n' + CHATS[2]) == [("1", "malformed_request"), ("2", None)]
    assert outcomes(CHATS[2] + '\n{"id": 1, "text": "a"}\n', DOCUMENTS) == [("2", "missing_text"), ("1", None)]


def test_documents_may_have_a_column_of_requests() -> None:
    lines = [json.dumps({"id": number, "text": "a", "requests": [1]}) for number in range(2)]
    assert prompts("\n".join(lines)) == {"0": "a", "1": "a"}


# -- folders ----------------------------------------------------------------------------------------------------------


def campaign(*entries: str, documents: bool = True) -> Campaign:
    data: dict[str, Any] = {"campaign": "c", "input": list(entries), "model": "m"}
    return parse_campaign(data | ({"documents": {}, "prompt": "p.j2"} if documents else {}), "c.yaml")


def folder(path: str = "docs") -> Source:
    (found,) = find_inputs(campaign(path), Path("/nowhere"))
    return recognise(found, DOCUMENTS)


def test_a_folder_is_its_files() -> None:
    write("one", "docs/b.txt")
    write("two", "docs/deep/er/a.md")
    write(gzip.compress(b"three"), "docs/c.txt.gz")
    write(zstd(b"four"), "docs/d")
    write("hidden", "docs/.hidden")
    write("hidden", "docs/.git/config")
    made = requests(folder(), DOCUMENTS)
    assert {request.id: json.loads(request.body)["messages"][0]["content"] for request in made} == {
        "b.txt": "one",
        "c.txt.gz": "three",
        "d": "four",
        "deep/er/a.md": "two",
    }


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "empty_document"),
        (b" \n\n", "empty_document"),
        (b"\xef\xbb\xbf", "empty_document"),
        ("café".encode("latin-1"), "invalid_utf8"),
        (b"a\0b", "not_text"),
        ("a".encode("utf-16"), "not_text"),
        (b"\x89PNG\r\n\x1a\n\0\0\0", "not_text"),
        (gzip.compress(b"text" * 9999)[:-9], "not_text"),
        (gzip.compress(b"x" * (LIMIT + 1), 1), "document_too_long"),
        (gzip.compress(b"x" * LIMIT, 1), None),
    ],
)
def test_text_files_that_are_none(data: bytes, code: str | None) -> None:
    write("fine", "docs/a.txt")
    write(data, "docs/b.txt")
    assert made(folder()) == [("a.txt", None), ("b.txt", code)]


@pytest.mark.parametrize("name", ["docs", "a [b] c", "what?*", "[[x"])
def test_any_name_of_a_folder_will_do(name: str) -> None:
    write("one", f"{name}/x/a.txt")
    assert made(folder(name)) == [("x/a.txt", None)]


def test_names_that_are_not_unicode() -> None:
    name = os.fsdecode(b"docs/caf\xe9.txt")
    write("one", name)
    assert made(folder()) == [("caf\\udce9.txt", "invalid_utf8")]
    source = recognise(write(CHATS[0], os.fsdecode(b"caf\xe9.jsonl")), None)
    assert source.key.startswith("caf-")
    assert made(source, None) == [("0", None)]  # type: ignore[arg-type]


def test_tables_in_a_folder_stop_the_run() -> None:
    write("text", "docs/a.txt")
    write("{}", "docs/b.jsonl.gz")
    with pytest.raises(GristmillError, match=r"has tables \(b\.jsonl\.gz\)"):
        folder()


# -- which files ------------------------------------------------------------------------------------------------------


def test_inputs_are_found_in_order_and_once() -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl"):
        write(CHATS[0], name)
    found = find_inputs(campaign("b.jsonl", "*.jsonl", "**/*.jsonl", documents=False), Path("/nowhere"))
    assert found == ["b.jsonl", "a.jsonl", "deep/c.jsonl"]


def test_names_with_brackets_are_files() -> None:
    for name in ("x[1].jsonl", "x1.jsonl", "what?.jsonl"):
        write(CHAT % name, name)
    found = find_inputs(campaign("*.jsonl", documents=False), Path("/nowhere"))
    assert [made(recognise(name, None), None)[0][0] for name in found] == [  # type: ignore[arg-type]
        "what?.jsonl",
        "x1.jsonl",
        "x[1].jsonl",
    ]
    assert find_inputs(campaign("x[1].jsonl", documents=False), Path("/nowhere")) == ["x[1].jsonl"]


def test_patterns_of_texts_are_folders_of_documents() -> None:
    write("one", "mail/2024/a.txt")
    write("two", "mail/2025/a.txt")
    (found,) = find_inputs(campaign("mail/*/*.txt"), Path("/nowhere"))
    assert made(recognise(found, DOCUMENTS)) == [("2024/a.txt", None), ("2025/a.txt", None)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("none.jsonl", "the input does not exist: none.jsonl"),
        ("none/*.jsonl", r"no file matches none/\*\.jsonl"),
        ("docs", "is a folder, and the campaign has no `documents`"),
    ],
)
def test_inputs_that_are_not_there(entry: str, message: str) -> None:
    write("text", "docs/a.txt")
    with pytest.raises(GristmillError, match=message):
        find_inputs(campaign(entry, documents=False), Path("/nowhere"))


def test_inputs_are_looked_for_in_the_project_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(CHATS[0], "project/data/a.jsonl")
    monkeypatch.setenv("DATA", "data")
    project = tmp_path / "project"
    assert find_inputs(campaign("$DATA/a.jsonl", documents=False), project) == [str(project / "data/a.jsonl")]
    assert find_inputs(campaign("data/*.jsonl", documents=False), project) == [str(project / "data/a.jsonl")]


def test_identity_tells_changes() -> None:
    write("one", "docs/a.txt")
    seen = [identity("docs/**/*"), identity("docs/a.txt")]
    write("two!", "docs/a.txt")
    seen += [identity("docs/**/*"), identity("docs/a.txt")]
    write("two", "docs/b.txt")
    seen += [identity("docs/**/*")]
    assert len({tuple(entry) for entry in seen}) == 5
    assert identity("docs/**/*") == seen[-1]


def test_row_digests_tell_changes() -> None:
    def digest(data: str, documents: Documents | None = None) -> list[bytes]:
        return [row.digest for row in read_rows(recognise(write(data), documents))]

    assert digest("\n".join(CHATS)) == digest("\n\n" + "\n".join(CHATS))
    assert digest('{"id": 1, "prompt": "a"}') != digest('{"id": 1, "prompt": "b"}')
    assert digest("id,text\n1,a\n", DOCUMENTS) != digest("id,text\n1,b\n", DOCUMENTS)
    assert isinstance(Row(1, b"", b""), tuple)
