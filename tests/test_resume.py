"""What a rerun asks: exactly the requests whose id and fingerprint are in no journal, and not one more."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from conftest import Finished, Project, Server


def texts_since(server: Server, before: int) -> list[str]:
    return sorted(entry["text"] for entry in server.requests()[before:])


def line(id: str, text: str) -> str:
    message = {"role": "user", "content": text}
    return json.dumps({"id": id, "messages": [message], "max_tokens": 8}) + "\n"


def ok(run: Finished) -> Finished:
    assert run.status == 0, run.output
    return run


def files_under(folder: Path) -> dict[str, int]:
    """Path → time of change, of everything below a folder."""
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_only_what_is_new_is_asked(project: Project, server: Server) -> None:
    """One campaign through edits of its inputs, its cut, its sampling and its endpoint."""
    server.start()
    rows = [line(str(i), f"ask {i}") for i in range(30)] + [line("twin", "ask 5")]
    project.write("requests.jsonl", "".join(rows))
    keys = {"url": server.url, "shard_size": 10, "shards_per_group": 2}
    ok(project.run(project.campaign(**keys)))
    # The same prompt under two ids: two rows, two answers.
    table = {row["id"]: row for row in project.table()}
    assert len(table) == 31 and table["5"]["answer"] == table["twin"]["answer"] == "echo: ask 5"
    assert server.texts()["ask 5"] == 2
    assert len(server.requests()) == 31

    # A row inserted at the top, one deleted, another cut: only the new row is asked.
    rows = [line("new", "ask new"), *rows[:10], *rows[11:]]
    project.write("requests.jsonl", "".join(rows))
    keys.update(shard_size=7, shards_per_group=3)
    ok(project.run(project.campaign(**keys)))
    assert texts_since(server, 31) == ["ask new"]
    assert [row["id"] for row in project.table()] == ["new", *(str(i) for i in range(30) if i != 10), "twin"]

    # A file is added, and the first one grows at its end: the jobs of unchanged shards are not even run again.
    rows += [line("grown", "ask grown")]
    project.write("requests.jsonl", "".join(rows))
    project.write("a-first.jsonl", line("added", "ask added"))
    keys.update(input=["*.jsonl"])
    run = ok(project.run(project.campaign(**keys)))
    assert texts_since(server, 32) == ["ask added", "ask grown"]
    assert "Asking the requests of g0001" in run.output
    assert "Asking the requests of g0000" not in run.output
    assert [row["id"] for row in project.table()][:2] == ["added", "new"]
    assert len(project.table()) == 33

    # Another temperature is another request, for every row.
    keys.update(sampling={"temperature": 0.5})
    ok(project.run(project.campaign(**keys)))
    assert len(server.requests()) == 34 + 33
    assert {row["status"] for row in project.table()} == {"ok"}

    # And back again: what was answered at first is still there. Nothing is asked, so no endpoint needs to be up,
    # and where it would be is no part of a request.
    server.stop()
    keys.update(url="http://127.0.0.1:9/v1", sampling={})
    for path in project.results().iterdir():
        if path.name != "journal":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    ok(project.run(project.campaign(**keys)))
    assert len(server.requests()) == 34 + 33
    assert len(project.table()) == 33
    assert {row["status"] for row in project.table()} == {"ok"}


def test_a_finished_campaign_is_left_alone(project: Project, server: Server) -> None:
    """A dry run, a run, and then nothing: not for the same command, a new address, or a touched input."""
    server.start()
    requests = project.requests(range(25))
    campaign = project.campaign(url=server.url, shard_size=10, shards_per_group=2)

    plan = ok(project.run(campaign, "-n"))
    assert "campaign c: 25 requests in 3 shards, 2 groups" in plan.output
    written = files_under(project.root / "results")
    assert written and {"/".join(Path(name).parts[:2]) for name in written} == {"c", "c/manifest"}
    assert server.requests() == []

    ok(project.run(campaign))
    assert len(server.requests()) == 25
    before = files_under(project.results())

    began = time.monotonic()
    again = ok(project.run(campaign))
    assert time.monotonic() - began < 10
    assert "Nothing to be done" in again.output
    assert files_under(project.results()) == before

    server.stop()
    server.start()  # another port
    os.utime(requests)
    moved = ok(project.run(project.campaign(url=server.url, shard_size=10, shards_per_group=2)))
    assert "Nothing to be done" in moved.output
    after = files_under(project.results())
    assert {Path(name).parts[0] for name in after if after[name] != before.get(name)} <= {"manifest"}
    assert len(server.requests()) == 25


def test_a_campaign_file_is_complete_in_itself(project: Project) -> None:
    """No key of the demo leaks in, and a key that nobody knows is named with the nearest that is known."""
    project.requests(range(3))
    campaign = project.campaign(url="http://127.0.0.1:9/v1")
    plan = ok(project.run(campaign, "-n"))
    assert "campaign c: 3 requests in 1 shard, 1 group, through http://127.0.0.1:9/v1" in plan.output
    assert not (project.root / "results" / "demo").exists()

    lacking = project.write("lacking.yaml", "campaign: lacking\nmodel: smollm2-135m\n")
    run = project.run(lacking, "-n")
    assert run.status != 0
    assert "input is missing" in run.output

    campaign.write_text(campaign.read_text() + "shardsize: 10\n")
    run = project.run(campaign, "-n")
    assert run.status != 0
    assert "unknown key shardsize; did you mean shard_size?" in run.output
    assert "Traceback" not in run.output
