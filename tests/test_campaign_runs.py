"""Campaigns through a real Snakemake and a scripted endpoint: complete tables, and nothing done twice."""

from __future__ import annotations

import json

from conftest import Project, Server


def test_one_row_for_every_request_in_input_order(project: Project, server: Server) -> None:
    server.start()
    project.requests(range(120))
    run = project.run(project.campaign(url=server.url, shard_size=50, shards_per_group=2))
    assert run.status == 0, run.output
    rows = project.table()
    assert [row["id"] for row in rows] == [str(i) for i in range(120)]
    assert {row["status"] for row in rows} == {"ok"}
    assert rows[7]["answer"] == "echo: ask 7"
    assert rows[7]["source_file"] == "requests.jsonl"
    assert rows[7]["source_row"] == 8
    assert json.loads(rows[7]["raw"])["choices"][0]["message"]["content"] == "echo: ask 7"
    assert set(server.texts().values()) == {1}
    assert (project.results() / "errors.jsonl").read_text() == ""
