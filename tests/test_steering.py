"""What is told of a run while it goes on: telemetry with reasons, lines in the log, a bar, `gristmill watch`."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conftest import KEY, PROJECT, Asking, Project, Server, wait_until
from gristmill import watch
from gristmill.admission import Limit
from gristmill.engines import Attachment
from gristmill.layout import Layout
from gristmill.telemetry import Snapshot, Telemetry, duration, is_stale, last_snapshots


def told(folder: Path = Path()) -> list[dict[str, Any]]:
    files = sorted((folder / "results" / "c" / "telemetry").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_decision_and_its_reason_is_logged(server: Server, asking: Asking) -> None:
    """The limit grows for a reason, the engine's gauges stand beside it, and the last line says what it came to."""
    server.start(latency_s=0.2)
    asking.run(Attachment(server.url, KEY, "m"), range(2000), limit=Limit(16))
    lines = told()
    limits = [line["limit"] for line in lines]
    assert limits[0] > 16 and max(limits) > 32, "0.2 s an answer, however many: more brings more"
    assert all(line["reason"] and line["bound"] in ("engine", "client", "source", "nobody") for line in lines)
    assert any(line["reason"] == "does more bring more?" for line in lines)
    assert all(line["in_flight"] <= max(limits) for line in lines)
    assert any(line.get("running", 0) > 0 for line in lines)
    last = lines[-1]
    assert (last["answered"], last["sent"], last["outcomes"], last["ended"]) == (2000, 2000, {"ok": 2000}, True)
    assert last["completion_tokens"] > 0 and last["rows"] == last["total"] == 2000


def test_a_pinned_limit_stays(server: Server, asking: Asking) -> None:
    server.start(latency_s=0.02)
    asking.run(Attachment(server.url, KEY, "m"), range(300), concurrency=4)
    assert {line["limit"] for line in told()} == {4}
    assert {line["reason"] for line in told()} <= {"the start", "pinned by endpoint.concurrency"}


def test_an_endpoint_that_refuses_gets_less_and_everybody_is_answered(server: Server, asking: Asking) -> None:
    server.start(latency_s=0.05, capacity=10)
    records = asking.run(Attachment(server.url, KEY, "m"), range(400), limit=Limit(64))
    assert len(records) == 400
    assert any("refused" in line["reason"] for line in told())
    assert min(line["limit"] for line in told()) < 64
    refused = sum(entry.get("do") == "capacity" for entry in server.requests())
    assert len(server.requests()) == 400 + refused


def snapshot(**given: Any) -> Snapshot:
    return Snapshot(**{"at": time.time(), "group": "g0000", "rows": 100, "total": 100, **given})


def test_the_line_of_a_log() -> None:
    line = snapshot(
        answered=40,
        outcomes={"ok": 37, "invalid": 2, "error": 1},
        rate=2.0,
        tokens_per_s=1234.4,
        in_flight=9,
        retries=3,
    ).line()
    assert line == ("40 of 100 answered, 2.0/s, 1,234 tokens/s, 9 in flight, 0:30 left, 1 error, 2 invalid, 3 retries")
    assert snapshot().line() == "0 of 100 answered, 0.0/s, 0 tokens/s, 0 in flight"
    assert [duration(s) for s in (0, 59.6, 3599, 90061)] == ["0:00", "1:00", "59:59", "25:01:01"]


def test_telemetry_that_is_torn_foreign_or_missing(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path / "a.jsonl")
    telemetry.write(snapshot(answered=1))
    telemetry.write(snapshot(answered=2))
    telemetry.close()
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"at": 3, "answ')
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.jsonl").write_bytes(b'nonsense\n{"at": 1}\n')
    (tmp_path / "d.jsonl").write_bytes(b'{"at": 1, "group": "g", "rows": 1, "total": 1, "of_a_later_version": 5}\n')
    assert [(name, seen.answered) for name, seen in last_snapshots(tmp_path)] == [("a", 2), ("d", 0)]
    assert list(last_snapshots(tmp_path / "nowhere")) == []
    assert is_stale(snapshot(at=time.time() - 100)) and not is_stale(snapshot(at=time.time() - 100, ended=True))
    Telemetry(Path("/proc/nowhere/x.jsonl")).write(snapshot())


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A campaign of four groups as it is shown: one done, one at work, one that went silent, one not begun."""
    monkeypatch.chdir(tmp_path)
    layout = Layout("c")
    groups = {"g0000": 100, "g0001": 100, "g0002": 100, "g0003": 50}
    (layout.answers / "g0000").mkdir(parents=True)
    for name, given in {
        "g0000.local-1": {"answered": 100, "ended": True},
        "g0001.local-0": {"answered": 10, "ended": True, "at": time.time() - 500, "group": "g0001"},
        "g0001.local-2": {
            "group": "g0001",
            "total": 90,
            "answered": 30,
            "rate": 3.0,
            "tokens_per_s": 99.0,
            "in_flight": 16,
            "limit": 18,
            "running": 14.0,
            "waiting": 2.0,
            "kv_use": 0.5,
            "bound": "engine",
            "trouble": "HTTP 503: busy [red]x[/red]",
            "outcomes": {"ok": 28, "error": 2},
            "gpu_s": 7200.0,
        },
        "g0002.local-3": {"group": "g0002", "answered": 20, "at": time.time() - 100},
    }.items():
        telemetry = Telemetry(layout.telemetry / f"{name}.jsonl")
        telemetry.write(snapshot(**given))
        telemetry.close()
    out = io.StringIO()
    watch.watch(lambda: watch.look("c", groups, layout), once=True, console=Console(file=out, width=150))
    return out.getvalue()


def test_watch_shows_each_group(seen: str) -> None:
    lines = seen.splitlines()
    assert lines[0].startswith("c: 160 of 350 rows, 1 of 4 groups done, 1 at work, 3.0/s, 1:03 left at this rate")
    assert "2.00 GPU-hours" in seen
    (running,) = [line for line in lines if line.startswith("g0001 ")]
    assert " ".join(running.split()[1:]) == "running 40/100 3.0 99 16/18 14 run, 2 wait, KV 50% 0:20 2"
    assert [line.split()[1] for line in lines if line.startswith(("g0000", "g0002"))] == ["done", "silent"]
    assert "g0001: HTTP 503: busy [red]x[/red]" in seen, "as it is, no markup"


def test_watch_beside_a_run_that_holds_the_lock(project: Project, server: Server) -> None:
    server.start(latency_s=0.5)
    project.requests(range(120))
    campaign = project.campaign(url=server.url, endpoint={"concurrency": 4})
    run = project.start(campaign)
    wait_until(lambda: len(told(project.root)) >= 2, 60, "telemetry")
    command = [sys.executable, "-m", "gristmill.cli", "watch", str(campaign), "--once"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "workflow" / "lib")}
    shown = subprocess.run(command, cwd=project.root, env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "of 120 rows" in shown.stdout and "g0000  running" in shown.stdout
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0
    assert "of 120 answered" in output, "lines in the log, as there is no terminal"


def test_a_bar_on_a_terminal_and_lines_in_the_log(project: Project, server: Server) -> None:
    server.start(latency_s=0.4)
    project.requests(range(60))
    campaign = project.campaign(url=server.url, endpoint={"concurrency": 4})
    main, other = pty.openpty()
    command = [sys.executable, "-m", "snakemake", "-s", str(PROJECT / "Snakefile"), "--profile", str(project.profile)]
    environment = {**os.environ, "SCRIPTED_KEY": KEY, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen(
        [*command, "--configfile", str(campaign)], cwd=project.root, env=environment, stdout=other, stderr=other
    )
    os.close(other)
    shown = b""
    while True:
        try:
            shown += os.read(main, 65536)
        except OSError:
            break
    os.close(main)
    assert process.wait(timeout=30) == 0, shown.decode()
    assert "━".encode() in shown and b"of 60 answered" in shown
    log = (project.results() / "logs" / "infer" / "g0000.log").read_text()
    assert "of 60 answered" in log and "━" not in log and "\x1b" not in log
