"""How inputs are cut and grouped, and what stays as it was when they change."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.campaign import Campaign, parse_campaign
from gristmill.errors import GristmillError
from gristmill.layout import Layout
from gristmill.manifest import Manifest, digest_of, read_manifest, update_manifest

PROJECT = Path("/nowhere")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, ids: range | list[Any]) -> None:
    Path(name).write_text("".join(json.dumps({"id": f"{name}-{id}", "prompt": "x"}) + "\n" for id in ids))


def campaign(**keys: Any) -> Campaign:
    data = {"campaign": "c", "input": ["*.jsonl"], "model": "m", "shard_size": 10, "shards_per_group": 2, **keys}
    return parse_campaign(data, "c.yaml")


def update(**keys: Any) -> Manifest:
    made = campaign(**keys)
    manifest = update_manifest(made, PROJECT)
    assert read_manifest(made) == manifest
    assert sorted(shard.name for group in manifest.groups.values() for shard in group) == sorted(
        shard.name for shard in manifest.shards
    )
    return manifest


def short(name: str) -> str:
    """`b-1234abcd.00001` as b1."""
    return name[0] + str(int(name[-5:]))


def groups(manifest: Manifest) -> dict[str, list[str]]:
    return {name: [short(shard.name) for shard in shards] for name, shards in manifest.groups.items()}


def digests(manifest: Manifest) -> dict[str, str]:
    return {short(shard.name): shard.digest for shard in manifest.shards}


def changed(before: Manifest, after: Manifest) -> tuple[set[str], set[str]]:
    """Shards that are new or hold other rows, and groups that do."""
    old, new = digests(before), digests(after)
    shards = {name for name in new if old.get(name) != new[name]}
    states = [{name: digest_of(shards) for name, shards in made.groups.items()} for made in (before, after)]
    return shards, {name for name in states[1] if states[0].get(name) != states[1][name]}


@pytest.fixture
def before() -> Manifest:
    write("b.jsonl", range(25))
    write("c.jsonl", range(12))
    return update()


def test_shards_and_groups(before: Manifest) -> None:
    assert [(short(shard.name), shard.first, shard.rows) for shard in before.shards] == [
        ("b0", 0, 10),
        ("b1", 10, 10),
        ("b2", 20, 5),
        ("c0", 0, 10),
        ("c1", 10, 2),
    ]
    assert groups(before) == {"g0000": ["b0", "b1"], "g0001": ["b2", "c0"], "g0002": ["c1"]}
    assert before.rows == 37
    assert before.group_of() == {shard.name: name for name, shards in before.groups.items() for shard in shards}


def test_nothing_changes_when_nothing_does(before: Manifest) -> None:
    path = Layout("c").manifest
    stat = path.stat()
    assert update() == before
    assert path.stat().st_mtime_ns == stat.st_mtime_ns


def test_an_unchanged_file_is_not_read_again(before: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.manifest.recognise", lambda *_: pytest.fail("it was read"))
    assert update() == before


def test_touching_changes_no_shard(before: Manifest) -> None:
    os.utime("b.jsonl", ns=(1, 1))
    assert update() == before


def test_touching_a_parquet_table_changes_no_shard() -> None:
    keys = {"input": ["t"], "documents": {}, "prompt": "p.j2"}
    pq.write_table(pa.table({"id": range(25), "text": ["x"] * 25}), "t")
    before = update(**keys)
    os.utime("t", ns=(1, 1))
    assert update(**keys) == before
    pq.write_table(pa.table({"id": range(25), "text": ["x"] * 24 + ["y"]}), "t")
    assert changed(before, update(**keys))[0] == {"t2"}


def test_a_file_that_comes_first_is_a_new_group_at_the_end(before: Manifest) -> None:
    write("a.jsonl", range(15))
    after = update()
    assert [short(shard.name) for shard in after.shards] == ["a0", "a1", "b0", "b1", "b2", "c0", "c1"]
    assert groups(after) == {**groups(before), "g0002": ["c1", "a0"], "g0003": ["a1"]}
    assert changed(before, after) == ({"a0", "a1"}, {"g0002", "g0003"})


def test_growing_at_the_end_changes_the_last_shard(before: Manifest) -> None:
    write("b.jsonl", range(35))
    after = update()
    assert changed(before, after) == ({"b2", "b3"}, {"g0001", "g0002"})
    assert groups(after)["g0002"] == ["c1", "b3"]


def test_growing_by_whole_shards_leaves_every_group() -> None:
    write("b.jsonl", range(20))
    before = update()
    write("b.jsonl", range(40))
    assert changed(before, update()) == ({"b2", "b3"}, {"g0001"})


def test_a_row_at_the_top_moves_its_file_alone(before: Manifest) -> None:
    write("b.jsonl", ["new", *range(25)])
    after = update()
    assert changed(before, after) == ({"b0", "b1", "b2"}, {"g0000", "g0001"})
    assert groups(after) == groups(before)


def test_a_row_deleted_in_the_middle_moves_what_follows(before: Manifest) -> None:
    write("b.jsonl", [id for id in range(25) if id != 15])
    assert changed(before, update()) == ({"b1", "b2"}, {"g0000", "g0001"})


def test_a_row_changed_in_place_is_its_shard_alone(before: Manifest) -> None:
    write("b.jsonl", [*range(15), "x", *range(16, 25)])
    assert changed(before, update()) == ({"b1"}, {"g0000"})


def test_removing_a_file_moves_no_other(before: Manifest) -> None:
    Path("b.jsonl").unlink()
    after = update()
    assert changed(before, after) == (set(), {"g0001"})
    assert groups(after) == {"g0001": ["c0"], "g0002": ["c1"]}


def test_removing_the_last_file_takes_its_groups(before: Manifest) -> None:
    Path("c.jsonl").unlink()
    after = update()
    assert groups(after) == {"g0000": ["b0", "b1"], "g0001": ["b2"]}
    write("c.jsonl", range(12))
    assert update() == before


def test_shrinking_a_file_leaves_a_gap(before: Manifest) -> None:
    write("b.jsonl", range(20))
    after = update()
    assert groups(after) == {"g0000": ["b0", "b1"], "g0001": ["c0"], "g0002": ["c1"]}
    assert changed(before, after) == (set(), {"g0001"})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"shard_size": 20}, {"g0000": ["b0", "b1"], "g0001": ["c0"]}),
        ({"shards_per_group": 3}, {"g0000": ["b0", "b1", "b2"], "g0001": ["c0", "c1"]}),
        ({"shards_per_group": 99}, {"g0000": ["b0", "b1", "b2", "c0", "c1"]}),
    ],
)
def test_another_cut_starts_afresh(before: Manifest, keys: dict[str, int], expected: dict[str, list[str]]) -> None:
    write("a.jsonl", range(1))
    update()
    Path("a.jsonl").unlink()
    assert groups(update(**keys)) == expected


def test_other_documents_are_cut_again(before: Manifest) -> None:
    documents = {"documents": {"text": "prompt"}, "prompt": "p.j2"}
    assert update(**documents).sources[0].kind == "lines"
    assert digests(update(**documents)) == digests(before)


def corrupt(data: bytes) -> list[bytes]:
    other = json.dumps({**json.loads(data), "version": 0}).encode()
    return [
        b"",
        data[:1],
        data[: len(data) // 2],
        data[:-2],
        b"\0" * len(data),
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        other,
    ]


def test_a_corrupt_manifest_is_made_again(before: Manifest) -> None:
    path = Layout("c").manifest
    whole = path.read_bytes()
    for data in corrupt(whole):
        path.write_bytes(data)
        with pytest.raises(GristmillError, match="there is no manifest"):
            read_manifest(campaign())
        assert update() == before
        assert path.read_bytes() == whole


@pytest.mark.parametrize("left", [0, 16 * 24, None])
def test_lost_ids_are_made_again(before: Manifest, left: int | None) -> None:
    (source, *_) = before.sources
    ids = Layout("c").ids(source.key)
    whole = ids.read_bytes()
    ids.unlink()
    if left is not None:
        ids.write_bytes(whole[:left])
    assert update() == before
    assert ids.read_bytes() == whole


def test_double_ids_stop_the_run(before: Manifest) -> None:
    path = Layout("c").manifest
    whole = path.read_bytes()
    Path("d.jsonl").write_bytes(Path("b.jsonl").read_bytes().splitlines(keepends=True)[3])
    for _ in range(2):
        with pytest.raises(GristmillError, match=r"'b\.jsonl-3' at b\.jsonl:4, d\.jsonl:1"):
            update()
    assert path.read_bytes() == whole
    Path("d.jsonl").unlink()
    assert update() == before


def test_empty_files_are_no_rows(before: Manifest) -> None:
    Path("a.jsonl").write_bytes(b" \n")
    after = update()
    assert [source.kind for source in after.sources] == ["empty", "lines", "lines"]
    assert groups(after) == groups(before)


@pytest.mark.parametrize("data", [b"", b"\n\n", b"[]", gzip.compress(b"")])
def test_inputs_without_rows_stop_the_run(data: bytes) -> None:
    Path("a.jsonl").write_bytes(data)
    with pytest.raises(GristmillError, match="the inputs have no rows") as caught:
        update()
    assert caught.value.where == "a.jsonl"


def test_packed_files_are_cut_alike(before: Manifest) -> None:
    plain = [(shard.rows, shard.digest) for shard in before.shards if short(shard.name)[0] == "b"]
    Path("b.jsonl").write_bytes(gzip.compress(Path("b.jsonl").read_bytes()))
    after = update()
    assert [(shard.rows, shard.digest) for shard in after.shards if short(shard.name)[0] == "b"] == plain
    assert changed(before, after) == (set(), set())


def test_ten_thousand_shards_are_looked_up_quickly() -> None:
    write("b.jsonl", range(10_000))
    update(shard_size=1)
    began = time.process_time()
    manifest = update_manifest(campaign(shard_size=1), PROJECT)
    assert len(manifest.shards) == 10_000
    assert time.process_time() - began < 3
