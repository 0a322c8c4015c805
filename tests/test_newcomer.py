"""Mistakes and surprises of a newcomer: each stops before anything is sent, or is mended by the next run."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import Project, Server
from gristmill.campaign import parse_campaign
from gristmill.cli import _printable
from gristmill.errors import GristmillError
from gristmill.sources import Source

DOCUMENTS = {"documents": {}, "prompt": "p.j2", "input": ["docs.csv"]}


def test_a_deleted_table_is_written_again_and_nothing_is_asked(project: Project, server: Server) -> None:
    server.start()
    project.requests(range(12))
    campaign = project.campaign(url=server.url)
    assert project.run(campaign).status == 0
    (project.results() / "answers.parquet").unlink()
    run = project.run(campaign)
    assert run.status == 0, run.output
    assert len(project.table()) == 12
    assert len(server.requests()) == 12


@pytest.mark.parametrize(
    ("prompt", "found"), [("{{ textt }}", "fits none of the first rows"), (" \n", "the prompt template is empty")]
)
def test_a_prompt_that_fits_no_row_stops_at_once(prompt: str, found: str, project: Project) -> None:
    project.write("docs.csv", "id,text\na,one\nb,two\n")
    project.write("p.j2", prompt)
    run = project.run(project.campaign(url="http://127.0.0.1:9/v1", **DOCUMENTS), "-n")
    assert run.status == 1
    assert found in run.output and "Traceback" not in run.output


def test_a_kept_column_that_no_row_has_is_named(project: Project) -> None:
    project.write("docs.csv", "id,text\na,one\nb,two\n")
    project.write("p.j2", "{{ text }}")
    keys = {**DOCUMENTS, "documents": {"keep": ["sentt"]}}
    run = project.run(project.campaign(url="http://127.0.0.1:9/v1", **keys), "-n")
    assert run.status == 0
    assert "none of the first rows has a column 'sentt'" in run.output


def test_a_key_with_nothing_under_it_is_an_error() -> None:
    with pytest.raises(GristmillError, match="answer is empty; give it a value or remove it"):
        parse_campaign({"campaign": "c", "input": ["a"], "model": "m", "answer": None}, "c.yaml")


def test_links_to_folders_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.txt").write_text("hi")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "root").symlink_to("/")
    (tmp_path / "b.txt").symlink_to(tmp_path / "below" / "a.txt")
    files = Source(f"{tmp_path}/**/*", "folder", base=str(tmp_path)).files()
    assert files == [tmp_path / "b.txt", tmp_path / "below" / "a.txt"]


def test_what_a_terminal_would_act_on_is_shown_as_text() -> None:
    assert _printable("a\x1b[31m\u202e ü") == "a\\x1b[31m\\u202e ü"
