"""The table: typed columns, input order, and the proof that it is complete."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill import merge as merging
from gristmill.cutting import id_hash
from gristmill.errors import GristmillError
from gristmill.layout import Layout
from gristmill.merge import Part, Summary, merge, table_for, verdict
from gristmill.outcomes import AnswerCheck

ANY = AnswerCheck()
COLUMNS = "id status answer label confidence reasoning finish_reason error_code error_message prompt_tokens".split()  # noqa: SIM905
COLUMNS += ["completion_tokens", "latency_s", "attempts", "model", "fingerprint", "source_file", "source_row", "raw"]


def line(
    id: str, content: str | None = "hello", row: int = 1, keep: dict[str, Any] | None = None, **more: Any
) -> bytes:
    """A line of an answers file as the group's job writes it."""
    head = {"id": id, "row": row, "fingerprint": "f" * 32, "route": "/chat/completions", "model": "asked"}
    body = {
        "model": "served",
        "choices": [{"message": {"content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    timings = {"sent": 1.0, "latency_s": 0.25}
    record = {"attempts": 2, "http_status": 200, "timings": timings, "raw": json.dumps(body), **more}
    return orjson.dumps({**head, "keep": keep or {}, "record": record}) + b"\n"


def refused(id: str, code: str = "bad_role", row: int = 1) -> bytes:
    head = {"id": id, "row": row, "fingerprint": None, "route": "", "model": None, "keep": {}}
    return orjson.dumps({**head, "error": [code, "because"]}) + b"\n"


class Results:
    """Answers files of shards, and what the inputs' ids are."""

    def __init__(self, root: Path, check: AnswerCheck = ANY, keep: Sequence[str] = (), gold: str | None = None) -> None:
        self.root, self.check, self.gold = root, check, gold
        self.table = table_for(check, keep)
        self.parts: list[Part] = []
        self.ids: list[tuple[str, Path]] = []
        self.outputs = (root / "answers.parquet", root / "errors.jsonl", root / "summary.json")

    def source(self, name: str, ids: Sequence[str], *shards: Sequence[bytes]) -> Results:
        hashes = self.root / f"{name}.ids"
        hashes.write_bytes(b"".join(map(id_hash, ids)))
        self.ids.append((name, hashes))
        for index, lines in enumerate(shards):
            path = self.root / f"{name}.{index:05d}.jsonl"
            path.write_bytes(b"".join(lines))
            self.parts.append(Part(path, name, len(lines), self.table, self.check, self.gold))
        return self

    def merge(self, workers: int = 1) -> Summary:
        return merge(self.parts, self.ids, workers, self.outputs)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.outputs[0]).to_pylist()
        return rows

    def left(self) -> set[str]:
        return {path.name for path in self.root.iterdir() if not path.name.endswith((".ids", "0.jsonl", "1.jsonl"))}


def merged(folder: Path, check: AnswerCheck, *contents: str | None) -> tuple[pa.Schema, list[dict[str, Any]]]:
    ids = [str(number) for number in range(len(contents))]
    results = Results(folder, check)
    results.source("a", ids, [line(id, content) for id, content in zip(ids, contents, strict=True)]).merge()
    return pq.read_schema(results.outputs[0]), results.rows()


def test_a_row_is_told_whole(tmp_path: Path) -> None:
    results = Results(tmp_path, keep=["label", "n"]).source(
        "a.jsonl", ["1"], [line("1", row=7, keep={"label": "x", "n": "5"})]
    )
    results.merge()
    (row,) = results.rows()
    assert list(row) == [*COLUMNS, "input_label", "n"]
    raw = json.loads(row.pop("raw"))
    assert raw["model"] == "served"
    assert row == {
        "id": "1",
        "status": "ok",
        "answer": "hello",
        "label": None,
        "confidence": None,
        "reasoning": None,
        "finish_reason": "stop",
        "error_code": None,
        "error_message": None,
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "latency_s": 0.25,
        "attempts": 2,
        "model": "served",
        "fingerprint": "f" * 32,
        "source_file": "a.jsonl",
        "source_row": 7,
        "input_label": "x",
        "n": "5",
    }


def test_rows_that_were_never_sent_are_there_too(tmp_path: Path) -> None:
    results = Results(tmp_path).source("a", ["a:1", "b"], [refused("a:1"), line("b", "", row=2)])
    results.merge()
    found = [
        (row["id"], row["status"], row["error_code"], row["attempts"], row["raw"] is None) for row in results.rows()
    ]
    assert found == [("a:1", "error", "bad_role", 0, True), ("b", "invalid", "empty", 2, False)]
    errors = [json.loads(text) for text in results.outputs[1].read_text().splitlines()]
    assert [error["id"] for error in errors] == ["a:1", "b"]
    assert errors[0] == {
        "id": "a:1",
        "status": "error",
        "error_code": "bad_role",
        "error_message": "because",
        "source_file": "a",
        "source_row": 1,
    }


def test_rows_stand_in_input_order(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.source("z", ["9", "8", "7"], [line("9"), refused("8")], [line("7")])
    results.source("empty", [])
    results.source("a", ["1"], [line("1")])
    summary = results.merge()
    assert [row["id"] for row in results.rows()] == ["9", "8", "7", "1"]
    assert [row["source_file"] for row in results.rows()] == ["z", "z", "z", "a"]
    assert (summary.rows, summary.statuses["ok"], summary.statuses["error"]) == (4, 3, 1)
    assert results.left() == {"answers.parquet", "errors.jsonl", "summary.json"}


def test_small_batches_and_row_groups_make_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [str(number) for number in range(57)]
    lines = [line(id, f"answer {id}") for id in ids]
    results = Results(tmp_path).source("a", ids, lines[:20], lines[20:21], lines[21:])
    results.merge()
    rows = results.rows()
    monkeypatch.setattr(merging, "_BATCH_BYTES", 1500)
    monkeypatch.setattr(merging, "_ROW_GROUP_ROWS", 15)
    monkeypatch.setattr(merging, "WORTH_PROCESSES", 5)
    results.merge(workers=2)
    assert results.rows() == rows
    assert pq.read_metadata(results.outputs[0]).num_row_groups > 1


# -- types ------------------------------------------------------------------------------------------------------------

TYPES: dict[str, tuple[Any, pa.DataType]] = {
    "string": ({"type": "string"}, pa.string()),
    "integer": ({"type": "integer"}, pa.int64()),
    "number": ({"type": "number"}, pa.float64()),
    "boolean": ({"type": "boolean"}, pa.bool_()),
    "nullable": ({"type": ["integer", "null"]}, pa.int64()),
    "null first": ({"type": ["null", "boolean"]}, pa.bool_()),
    "two types": ({"type": ["integer", "string"]}, pa.string()),
    "enum": ({"enum": ["a", "b"]}, pa.string()),
    "array": ({"type": "array"}, pa.string()),
    "object": ({"type": "object"}, pa.string()),
    "null": ({"type": "null"}, pa.string()),
    "anything": ({}, pa.string()),
    "true": (True, pa.string()),
    "anyOf": ({"anyOf": [{"type": "integer"}]}, pa.string()),
}


@pytest.mark.parametrize(("schema", "kind"), TYPES.values(), ids=TYPES.keys())
def test_types_of_properties(schema: Any, kind: pa.DataType) -> None:
    table = table_for(AnswerCheck(schema={"properties": {"x": schema}}), ())
    assert table.schema().field("x").type == kind


def test_values_are_typed(tmp_path: Path) -> None:
    properties = {
        name: {"type": [name, "null"]} for name in ("string", "integer", "number", "boolean", "array", "object")
    }
    check = AnswerCheck(schema={"type": "object", "properties": {**properties, "any": {}}})
    schema, rows = merged(
        tmp_path,
        check,
        '{"string": "s", "integer": 5, "number": 2, "boolean": true, "array": [1, "ä"], "object": {"a": null}}',
        '{"integer": 5.0, "number": 0.5, "boolean": false, "array": null, "any": 1.5, "undeclared": 1}',
        '{"any": [null]}',
        "no JSON",
    )
    names = [*properties, "any"]
    assert schema.names == [*COLUMNS[:5], *names, *COLUMNS[5:]]
    assert [[row[name] for name in names] for row in rows] == [
        ["s", 5, 2.0, True, '[1,"ä"]', '{"a":null}', None],
        [None, 5, 0.5, False, None, None, "1.5"],
        [None, None, None, None, None, None, "[null]"],
        [None] * 7,
    ]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "invalid"]


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("9007199254740993", 2**53 + 1),
        ("9223372036854775808", None),
        ("-9223372036854775809", None),
        ("18446744073709551616", None),
        ("1e300", None),
    ],
)
def test_integers_beyond_64_bits_are_invalid(tmp_path: Path, number: str, value: int | None) -> None:
    check = AnswerCheck(schema={"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    _, (row,) = merged(tmp_path, check, f'{{"n": {number}, "s": "kept"}}')
    assert (row["n"], row["s"]) == (value, "kept")
    assert (row["status"], row["error_code"]) == (("ok", None) if value else ("invalid", "number_out_of_range"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["error_codes"] == ({} if value else {"number_out_of_range": 1})


def test_answers_nested_too_deeply_are_invalid(tmp_path: Path) -> None:
    check = AnswerCheck(schema={"properties": {"x": {"type": "array"}}})
    _, rows = merged(tmp_path, check, *[f'{{"x": {"[" * depth + "]" * depth}}}' for depth in (200, 300)])
    assert [(row["status"], row["error_code"]) for row in rows] == [("ok", None), ("invalid", "schema_mismatch")]
    assert rows[1]["answer"].startswith('{"x": [[[')


def test_names_that_are_taken() -> None:
    schema = {name: {"type": "string"} for name in ("label", "answer_status", "status", "id", "answer_id", "mine")}
    table = table_for(AnswerCheck(schema={"properties": schema}), ["label", "n", "label", "raw", "mine"])
    assert {name: column for name, (column, _) in table.properties.items()} == {
        "label": "label",
        "answer_status": "answer_status",
        "status": "answer_answer_status",
        "id": "answer_id",
        "answer_id": "answer_answer_id",
        "mine": "mine",
    }
    assert table.keep == {"label": "input_label", "n": "n", "raw": "input_raw", "mine": "input_mine"}
    names = table.schema().names
    assert len(names) == len(set(names)) == len(COLUMNS) + 5 + 4
    with pytest.raises(GristmillError, match=r"two columns of answers\.parquet would be called 'input_label'"):
        table_for(ANY, ["input_label", "label"])


@pytest.mark.parametrize(
    ("schema", "column", "value"),
    [({"type": "string"}, "label", "x"), ({"type": "integer"}, "answer_label", 5), ({}, "label", "x")],
)
def test_a_property_that_is_called_label(tmp_path: Path, schema: dict[str, Any], column: str, value: Any) -> None:
    check = AnswerCheck(schema={"properties": {"first": {}, "label": schema, "last": {}}})
    _, (row,) = merged(tmp_path, check, json.dumps({"first": "1", "label": value, "last": "3"}))
    assert (row["first"], row[column], row["last"]) == ("1", value, "3")


def test_text_is_kept_whatever_is_in_it(tmp_path: Path) -> None:
    text = "\x00\u2028\x85\r\n\U0001f600\ufffd"
    results = Results(tmp_path, keep=["k"]).source("a", [text], [line(text, text, keep={"k": text})])
    results.merge()
    (row,) = results.rows()
    assert (row["id"], row["answer"], row["k"]) == (text, text, text)
    escaped = line("x", "TEXT").replace(b"TEXT", b"a\\\\ud83d")
    other = tmp_path / "other"
    other.mkdir()
    surrogate = Results(other).source("a", ["x"], [escaped])
    surrogate.merge()
    assert surrogate.rows()[0]["answer"] == "a\ufffd"
    assert "\\ud83d" in surrogate.rows()[0]["raw"]


def test_a_source_whose_name_is_not_unicode(tmp_path: Path) -> None:
    results = Results(tmp_path).source("a", ["1", "2"], [line("1"), refused("2")])
    results.parts = [Part(**{**vars(results.parts[0]), "source_file": "caf\udce9.jsonl"})]
    results.merge()
    assert results.rows()[0]["source_file"] == "caf\\udce9.jsonl"
    assert json.loads(results.outputs[1].read_text())["source_file"] == "caf\\udce9.jsonl"


# -- completeness -----------------------------------------------------------------------------------------------------

L1, L2, L3 = line("1"), line("2"), line("3")
INCOMPLETE: dict[str, tuple[list[list[bytes]], str]] = {
    "one missing": ([[L1], [L3]], "found '3' in the place of row 2 of a"),
    "the last missing": ([[L1, L2], []], "found nothing in the place of row 3 of a"),
    "all missing": ([[], []], "found nothing in the place of row 1 of a"),
    "one twice": ([[L1, L1], [L2, L3]], "found '1' in the place of row 2 of a"),
    "the last twice": ([[L1, L2], [L3, L3]], "a row too many: '3'"),
    "two swapped": ([[L2, L1], [L3]], "found '2' in the place of row 1 of a"),
    "shards swapped": ([[L3], [L1, L2]], "found '3' in the place of row 1 of a"),
    "another": ([[L1, line("x")], [L3]], "found 'x' in the place of row 2 of a"),
    "half a line": ([[L1, L2[:50]], [L3]], "the answers file is damaged"),
    "NULs": ([[L1, b"\0" * 80 + b"\n"], [L3]], "the answers file is damaged"),
}


@pytest.mark.parametrize(("shards", "message"), INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_a_table_that_is_not_complete_is_none(tmp_path: Path, shards: list[list[bytes]], message: str) -> None:
    results = Results(tmp_path).source("a", ["1", "2", "3"], *shards)
    with pytest.raises(GristmillError, match=message) as caught:
        results.merge()
    assert "answers/ folder" in str(caught.value.help)
    assert results.left() == set()


def test_the_second_source_is_proved_too(tmp_path: Path) -> None:
    results = Results(tmp_path).source("a", ["1"], [L1]).source("b", ["2", "3"], [L3, L2])
    with pytest.raises(GristmillError, match="found '3' in the place of row 1 of b"):
        results.merge()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    results = Results(tmp_path).source("a", ["1", "2"], [L1, L2[:-9]])
    with pytest.raises(GristmillError) as caught:
        results.merge()
    assert caught.value.where == f"{tmp_path}/a.00000.jsonl, line 2"
    results.parts[0].path.unlink()
    with pytest.raises(GristmillError, match="an answers file is missing"):
        results.merge()


def test_an_old_table_survives_a_failed_merge(tmp_path: Path) -> None:
    results = Results(tmp_path).source("a", ["1"], [L1])
    results.merge()
    old = [path.read_bytes() for path in results.outputs]
    results.parts[0].path.write_bytes(L2)
    with pytest.raises(GristmillError):
        results.merge()
    assert [path.read_bytes() for path in results.outputs] == old


# -- summary ----------------------------------------------------------------------------------------------------------


def test_summary(tmp_path: Path) -> None:
    check = AnswerCheck(labels=("spam", "ham"))
    gold = ["spam", "ham", "ham", "spam", None, "ham"]
    contents = ["spam", "Ham", "spam", "eggs", "ham", "ham"]
    lines = [
        line(str(number), content, keep={"gold": right})
        for number, (content, right) in enumerate(zip(contents, gold, strict=True))
    ]
    results = Results(tmp_path, check, ["gold"], "gold")
    results.source("a", [*"012345", "x", "y"], lines[:2], [*lines[2:], refused("x"), refused("y")])
    results.merge()
    assert json.loads(results.outputs[2].read_text()) == {
        "rows": 8,
        "ok": 5,
        "invalid": 1,
        "error": 2,
        "not_ok_share": 3 / 8,
        "error_codes": {"bad_role": 2, "not_in_labels": 1},
        "prompt_tokens": 30,
        "completion_tokens": 12,
        "gold": {"rows": 5, "right": 3, "accuracy": 0.6},
    }


def test_a_campaign_without_gold_has_none(tmp_path: Path) -> None:
    results = Results(tmp_path).source("a", ["1"], [L1])
    results.merge()
    summary = json.loads(results.outputs[2].read_text())
    assert (summary["gold"], summary["not_ok_share"], summary["error_codes"]) == (None, 0.0, {})


@pytest.mark.parametrize(
    ("rows", "bad", "share", "fails"),
    [
        (100, 1, 0.01, False),
        (100, 2, 0.01, True),
        (10, 1, 0.1, False),
        (3, 3, 1, False),
        (3, 1, 0, True),
        (3, 0, 0, False),
    ],
)
def test_verdict(rows: int, bad: int, share: float, fails: bool) -> None:
    summary = {
        "rows": rows,
        "invalid": bad,
        "error": 0,
        "not_ok_share": bad / rows,
        "error_codes": {"truncated": bad},
    }
    if not fails:
        verdict(summary, share, Layout("c"))
        return
    with pytest.raises(GristmillError, match=f"{bad} of {rows} rows .* truncated {bad}") as caught:
        verdict(summary, share, Layout("c"))
    assert "results/c/errors.jsonl" in str(caught.value.where)
