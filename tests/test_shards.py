"""Shard files: what is written is what is read, and memory stays flat."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.campaign import Campaign, parse_campaign
from gristmill.errors import GristmillError
from gristmill.manifest import Manifest, Shard, update_manifest
from gristmill.requests import Recipe, Request, fingerprint
from gristmill.shards import decode, encode, read_shard, write_shards
from gristmill.sources import RowError

REQUESTS = Recipe(None, None, None, None, "m", ("m",))
PROJECT = Path("/nowhere")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text(st.sampled_from('}{",:body\\\n'), max_size=12)
BODIES = st.dictionaries(TEXT, TEXT, max_size=3)


@given(TEXT, st.integers(1, 2**63 - 1), BODIES, st.dictionaries(TEXT, st.none() | TEXT, max_size=3), TEXT)
def test_a_request_is_read_as_it_was_written(
    id: str, row: int, fields: dict[str, str], keep: dict[str, str | None], model: str
) -> None:
    body = orjson.dumps(fields)
    request = Request(id, row, fingerprint("/x", body), "/chat/completions", body, model, keep)
    line = encode(request)
    assert line.count(b"\n") == 1
    assert decode(line) == request
    assert set(json.loads(line)) == {"head", "body"}
    refused = Request(id, row, None, "", b"", None, keep, RowError("code", model))
    assert decode(encode(refused)) == refused


def test_a_line_of_something_else_is_an_error() -> None:
    with pytest.raises(GristmillError, match="not a line of a shard file"):
        decode(b'{"id": 1}\n')


def campaign(**keys: object) -> Campaign:
    data = {"campaign": "c", "input": ["input"], "model": "m", "shard_size": 3, **keys}
    return parse_campaign(data, "c.yaml")


def write(ids: range | list[str], name: str = "input") -> None:
    Path(name).write_text("".join(json.dumps({"id": str(id), "prompt": "x"}) + "\n" for id in ids))


def ids(shards: list[Shard]) -> list[list[str]]:
    return [[request.id for request in read_shard(Path("out") / shard.file)] for shard in shards]


def cut(**keys: object) -> Manifest:
    return update_manifest(campaign(**keys), PROJECT)


def test_shards_hold_consecutive_rows() -> None:
    write(range(7))
    manifest = cut()
    write_shards(manifest.shards, REQUESTS, Path("out"))
    assert ids(manifest.shards) == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
    (request, *_) = read_shard(Path("out") / manifest.shards[1].file)
    assert (request.row, request.route, request.body) == (4, "/completions", b'{"prompt":"x","model":"m"}')


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_any_selection_of_shards_can_be_written(pack: type[bytes]) -> None:
    write(range(20), "a")
    write([f"b{number}" for number in range(7)], "b")
    for name in ("a", "b"):
        Path(name).write_bytes(pack(Path(name).read_bytes()))
    shards = cut(input=["a", "b"]).shards
    picked = [shards[place] for place in (8, 1, 2, 5, 0)]
    write_shards(picked, REQUESTS, Path("out"))
    assert ids(picked) == [["b3", "b4", "b5"], ["3", "4", "5"], ["6", "7", "8"], ["15", "16", "17"], ["0", "1", "2"]]


CHANGES = {
    "a row changed": lambda: write([*"012345x"]),
    "a row too few": lambda: write(range(5)),
    "a row before": lambda: write(["x", *map(str, range(7))]),
    "nothing left": lambda: Path("input").write_bytes(b""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_input_that_changed_meanwhile_stops_the_run(change: object) -> None:
    write(range(7))
    manifest = cut()
    change()  # type: ignore[operator]
    with pytest.raises(GristmillError, match="the input changed while the campaign was starting") as caught:
        write_shards(manifest.shards, REQUESTS, Path("out"))
    assert caught.value.where == "input"


def test_a_parquet_table_that_shrank_meanwhile_stops_the_run() -> None:
    documents = {"documents": {}, "prompt": "p.j2"}
    pq.write_table(pa.table({"id": [1, 2], "text": ["a", "b"]}), "input")
    manifest = cut(**documents)
    pq.write_table(pa.table({"id": [1], "text": ["a"]}), "input")
    made_by = Recipe(campaign(**documents).documents, "{{ text }}", None, None, "m", ("m",))
    with pytest.raises(GristmillError, match="the input changed"):
        write_shards(manifest.shards, made_by, Path("out"))


# -- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from pathlib import Path
from gristmill.campaign import parse_campaign
from gristmill.manifest import update_manifest
from gristmill.requests import Recipe
from gristmill.shards import write_shards

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

def run(name):
    campaign = parse_campaign({"campaign": name, "input": [name], "model": "m"}, "c")
    manifest = update_manifest(campaign, Path("/nowhere"))
    write_shards(manifest.shards, Recipe(None, None, None, None, "m", ("m",)), Path("out"))
    return manifest.rows

run("small")
before = peak()
print(run("input"), peak() - before)
"""
MIB = 1 << 20
BODY = "x" * 4000


def pack(name: str, *, array: bool = False, long_line: bool = False) -> None:
    """A gzip of 25,000 requests, 100 MiB, or of three of which one is 200 MiB long."""
    rows = 3 if long_line else 25_000
    with gzip.open(name, "wt", compresslevel=1) as file:
        file.write('{"requests": [' if array else "")
        for number in range(rows):
            file.write(f'{{"id": {number}, "prompt": "{BODY}')
            for _ in range(200 if long_line and number == 1 else 0):
                file.write("x" * MIB)
            file.write('"},\n' if array and number < rows - 1 else '"}\n')
        file.write("]}" if array else "")


@pytest.mark.parametrize(
    ("made", "rows", "limit_mib"),
    [({}, 25_000, 50), ({"array": True}, 25_000, 50), ({"long_line": True}, 3, 100)],
    ids=["lines", "array", "a line of 200 MiB"],
)
def test_memory_does_not_grow_with_the_input(made: dict[str, bool], rows: int, limit_mib: int) -> None:
    pack("input", **made)
    write(range(10), "small")
    library = str(Path(__file__).parents[1] / "workflow" / "lib")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE], env={**os.environ, "PYTHONPATH": library}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found, growth = map(int, run.stdout.split())
    assert found == rows
    assert growth < limit_mib
