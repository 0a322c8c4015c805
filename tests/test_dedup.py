"""Requests that are the same are sent once, and answer every id."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import Project, Server
from gristmill.requests import Request, is_repeatable


@pytest.mark.parametrize(
    ("route", "body", "repeatable"),
    [
        ("/chat/completions", b'{"temperature": 0}', True),
        ("/chat/completions", b'{"temperature": 0.0, "seed": null}', True),
        ("/chat/completions", b'{"temperature": 1, "seed": 7}', True),
        ("/chat/completions", b'{"temperature": 0.1}', False),
        ("/chat/completions", b'{"temperature": null}', False),
        ("/completions", b"{}", False),
        ("/embeddings", b'{"input": "x"}', True),
        ("/responses", b'{"temperature": 0}', True),
    ],
)
def test_what_gives_the_same_answer_again(route: str, body: bytes, repeatable: bool) -> None:
    assert is_repeatable(Request("a", 1, "f", route, body, "m", {})) is repeatable


def same(project: Project, server: Server, **keys: Any) -> list[dict[str, Any]]:
    run = project.run(project.campaign(url=server.url, **keys))
    assert run.status == 0, run.output
    return project.table()


def test_one_request_answers_all_of_its_ids(project: Project, server: Server) -> None:
    server.start(latency_s=0.01)
    project.requests(range(40), text="the same", temperature=0)
    rows = same(project, server)
    assert len(server.requests()) == 1
    assert [row["id"] for row in rows] == [str(i) for i in range(40)]
    assert {row["answer"] for row in rows} == {"echo: the same"}
    assert sorted(row["attempts"] for row in rows) == [0] * 39 + [1]
    summary = (project.results() / "summary.json").read_text()
    assert f'"prompt_tokens": {rows[0]["prompt_tokens"]}' in summary, "paid for once"
    # More of the same: the journal has the answer.
    project.requests(range(60), text="the same", temperature=0)
    assert len(same(project, server)) == 60
    assert len(server.requests()) == 1


def test_another_group_takes_what_the_journals_have(project: Project, server: Server) -> None:
    server.start()
    project.requests(range(40), text="the same", temperature=0)
    rows = same(project, server, shard_size=10, shards_per_group=1)
    assert {row["status"] for row in rows} == {"ok"} and len(rows) == 40
    assert len(server.requests()) == 1, "one group runs after the other here"


@pytest.mark.parametrize("keys", [{"dedup": False}, {}])
def test_each_is_sent_when_it_is_sampled_or_dedup_is_off(
    project: Project, server: Server, keys: dict[str, Any]
) -> None:
    server.start()
    project.requests(range(12), text="the same", temperature=0 if keys else 0.7)
    assert {row["attempts"] for row in same(project, server, **keys)} == {1}
    assert len(server.requests()) == 12


def test_a_refusal_is_everybodys(project: Project, server: Server) -> None:
    server.start(rules=[{"contains": "the same", "do": "too_long"}])
    project.requests(range(5), text="the same", temperature=0)
    rows = same(project, server, limits={"max_error_share": 1})
    assert {row["error_code"] for row in rows} == {"too_long"}
    assert len(server.requests()) == 1
