"""The demo as a newcomer runs it: the embedded engine and the small model, from the documents to the shown table."""

from __future__ import annotations

import json
import subprocess
import sys

from conftest import PROJECT, Project


def test_demo_from_documents_to_the_shown_table(project: Project) -> None:
    snakemake = [sys.executable, "-m", "snakemake", "-s", str(PROJECT / "Snakefile")]
    command = [*snakemake, "--profile", str(PROJECT / "profiles" / "local")]
    run = subprocess.run(command, cwd=project.root, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "60 requests in 1 shard, 1 group, through smollm2-135m on llamacpp" in run.stderr
    documents = [json.loads(line) for line in (PROJECT / "config/demo/documents.jsonl").read_text().splitlines()]
    rows = project.table("demo")
    assert [row["id"] for row in rows] == [document["id"] for document in documents]
    assert {row["status"] for row in rows} == {"ok"}
    labels = {document["gold"] for document in documents}
    assert len(labels) == 5 and {row["label"] for row in rows} <= labels
    assert [row["gold"] for row in rows] == [document["gold"] for document in documents]

    show = [sys.executable, "-m", "gristmill.cli", "show", str(PROJECT / "config" / "config.yaml"), "--rows", "3"]
    shown = subprocess.run(show, cwd=project.root, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "doc-" in shown.stdout and "results/demo/answers.parquet" in shown.stdout and "60 ok" in shown.stdout

    again = subprocess.run(command, cwd=project.root, capture_output=True, text=True, timeout=60)
    assert "Nothing to be done" in again.stdout + again.stderr


def test_demo_of_ready_made_requests(project: Project) -> None:
    run = project.run(PROJECT / "config" / "campaigns" / "demo-requests.yaml", timeout=300)
    assert run.status == 0, run.output
    rows = project.table("demo-requests")
    assert [row["id"] for row in rows] == ["q1", "q2", "q3", "q4", "q5", "q6"]
    assert {row["status"] for row in rows} <= {"ok", "invalid"}
    assert all(row["raw"] and row["completion_tokens"] for row in rows)


def test_show_without_results_says_what_to_run(project: Project) -> None:
    show = [sys.executable, "-m", "gristmill.cli", "show", str(PROJECT / "config" / "config.yaml")]
    shown = subprocess.run(show, cwd=project.root, capture_output=True, text=True)
    assert shown.returncode == 1
    assert "has no table yet" in shown.stderr and "snakemake --profile profiles/local" in shown.stderr
