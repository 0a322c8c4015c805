"""Kill anything at any moment: the same command again ends in a complete table, and nothing is paid for twice.

Every test counts at the endpoint: a text may be asked once, and once more for each request that was in flight when
something was killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import Apart, Project, ScriptedEngine, Server, wait_until
from gristmill.journal import encode

pytestmark = pytest.mark.kill

N = 150
IN_FLIGHT = 8
SLOW = {"latency_s": [0.02, 0.06]}


def complete(project: Project, texts: Counter[str], kills: int, n: int = N) -> None:
    """Every id once and ok, each asked once but for at most IN_FLIGHT requests a kill."""
    rows = project.table()
    assert [row["id"] for row in rows] == [str(i) for i in range(n)]
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["answer"] for row in rows} == {f"echo: ask {i}" for i in range(n)}
    assert set(texts) == {f"ask {i}" for i in range(n)}
    assert texts.total() - n <= kills * IN_FLIGHT
    assert max(texts.values()) <= 1 + kills


def tear(project: Project, tail: bytes) -> None:
    """Leave a torn end: at the newest journal, and as all there is of another attempt's."""
    folder = project.results() / "journal"
    newest = max(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    with newest.open("ab") as file:
        file.write(tail)
    (folder / f"g0000.local-torn-{len(tail)}.jsonl").write_bytes(tail)


def torn_tails() -> list[bytes]:
    line = encode({"id": "7", "fingerprint": "0" * 32, "outcome": "ok", "answer": "Grüße", "raw": "{}"})
    return [line[: len(line) // 2], line[: line.index("ü".encode()) + 1], line[:-1], b"\0" * 512]


def settings(**more: object) -> dict[str, object]:
    return {"endpoint": {"concurrency": IN_FLIGHT, **more}, "shard_size": 40}


def test_client_killed_again_and_again(project: Project, server: Server) -> None:
    """SIGKILL of the infer process at three points, with torn ends in the journal before each rerun."""
    server.start(**SLOW)
    project.requests(range(N))
    campaign = project.campaign(url=server.url, **settings())
    points = sorted(random.Random(2).sample(range(10, N - 10), 3))
    tails = torn_tails()
    for point, tail in zip(points, tails, strict=False):
        run = project.start(campaign)
        wait_until(lambda at=point: len(server.requests()) >= at, 60, f"{point} requests")
        project.client(run).kill()
        output, _ = run.communicate(timeout=60)
        assert run.returncode != 0
        assert "Traceback" not in output
        tear(project, tail)
    tear(project, tails[3])
    finished = project.run(campaign)
    assert finished.status == 0, finished.output
    complete(project, server.texts(), kills=3)


def test_engine_killed(project: Project, engine: ScriptedEngine) -> None:
    """SIGKILL of the engine, twice: one run starts it again and completes; no process is left."""
    registry = engine.write(workers=2, script=SLOW)
    project.requests(range(N))
    campaign = project.campaign(registry=registry, **settings())
    run = project.start(campaign)
    for number, point in enumerate(sorted(random.Random(5).sample(range(10, N - 10), 2)), 1):
        wait_until(lambda at=point: len(engine.requests()) >= at, 60, f"{point} requests")
        wait_until(lambda at=number: len(engine.starts()) == at, 20)
        os.kill(engine.starts()[-1], signal.SIGKILL)
        wait_until(lambda at=number: len(engine.starts()) == at + 1, 20, "a restart")
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 0, output
    assert output.count("the vllm engine died (status 137); starting it again") == 2
    complete(project, engine.texts(), kills=2)
    assert len(engine.starts()) == 3
    assert engine.processes() == []
    # Everything but the journal is lost, and the endpoint is set up differently: nothing is asked, nothing is started.
    for path in project.results().iterdir():
        if path.name != "journal":
            subprocess.run(["rm", "-r", str(path)], check=True)
    finished = project.run(project.campaign(registry=registry, **settings(args={"max-model-len": 1024})))
    assert finished.status == 0, finished.output
    complete(project, engine.texts(), kills=2)
    assert len(engine.starts()) == 3


def test_client_killed_with_an_engine_of_its_own(project: Project, engine: ScriptedEngine) -> None:
    """The keeper ends the engine and its workers within seconds."""
    registry = engine.write(workers=2, script=SLOW)
    project.requests(range(N))
    campaign = project.campaign(registry=registry, **settings())
    run = project.start(campaign)
    wait_until(lambda: len(engine.requests()) >= 60, 60, "60 requests")
    assert len(engine.processes()) == 4
    project.client(run).kill()
    wait_until(lambda: not engine.processes(), 10, "the end of the engine")
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "Traceback" not in output
    finished = project.run(campaign)
    assert finished.status == 0, finished.output
    complete(project, engine.texts(), kills=1)
    assert engine.processes() == []


def test_snakemake_killed_and_two_runs_at_once(project: Project, engine: ScriptedEngine) -> None:
    """A second run is refused while the first lives. The first is killed: its job and engine end by themselves, also
    when nobody reads what they print; the next run says how to unlock."""
    registry = engine.write(workers=1, script=SLOW)
    project.requests(range(N))
    campaign = project.campaign(registry=registry, **settings())
    first = project.start(campaign)
    wait_until(lambda: len(engine.requests()) >= 5, 60, "5 requests")
    client = project.client(first)
    client.suspend()  # so that it cannot finish meanwhile
    second = project.run(campaign)
    assert second.status != 0
    assert "Directory cannot be locked" in second.output
    assert "was killed and left" not in second.output, "the first one lives"
    assert "Traceback" not in second.output
    assert first.stdout is not None
    first.stdout.close()  # the terminal is gone
    first.kill()
    first.wait()
    client.resume()
    wait_until(lambda: not client.is_running(), 20, "the end of the orphaned job")
    wait_until(lambda: not engine.processes(), 10, "the end of the engine")
    sent = len(engine.requests())
    assert sent < N, "it stopped before the end"

    refused = project.run(campaign)
    assert refused.status != 0
    assert f"the last run (process {first.pid}) was killed and left this folder locked" in refused.output
    assert "run the same command with --unlock added" in refused.output
    assert "Traceback" not in refused.output
    assert project.run(campaign, "--unlock").status == 0
    finished = project.run(campaign)
    assert finished.status == 0, finished.output
    complete(project, engine.texts(), kills=0)


def test_sigterm_and_ctrl_c(project: Project, engine: ScriptedEngine) -> None:
    """SIGTERM of the job, Ctrl-C, SIGTERM of Snakemake: what is in flight is kept, so nothing at all is asked twice."""
    registry = engine.write(workers=1, script=SLOW)
    project.requests(range(N))
    campaign = project.campaign(registry=registry, **settings(), shards_per_group=2)

    run = project.start(campaign, "--keep-going")
    wait_until(lambda: len(engine.requests()) >= 20, 60, "20 requests")
    project.client(run).terminate()
    wait_until(lambda: len(engine.starts()) == 2, 30, "the engine of the next group")
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "SIGTERM: stopping; what was answered is kept" in output
    assert "Traceback" not in output
    assert 80 <= sum(engine.texts().values()) < 150, "the other group ran on"

    run = project.start(campaign)
    before = len(engine.requests())
    wait_until(lambda: len(engine.requests()) >= before + 10, 60, "10 requests more")
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "SIGINT: stopping; what was answered is kept" in output
    wait_until(lambda: not engine.processes(), 20, "the end of the engine")

    run = project.start(campaign)
    before = len(engine.requests())
    wait_until(lambda: len(engine.requests()) >= before + 5 or run.poll() is not None, 60, "5 requests more")
    run.terminate()  # Snakemake lets the running job end, and starts no other
    output, _ = run.communicate(timeout=60)
    assert "Traceback" not in output

    finished = project.run(campaign)
    assert finished.status == 0, finished.output
    complete(project, engine.texts(), kills=0)
    assert engine.processes() == []


def test_two_jobs_of_one_group_at_once(apart: Apart, server: Server) -> None:
    """The second waits for the first, and then asks only what the first did not; so too when the first is killed."""
    server.start(**SLOW)
    first = apart.start(N, url=server.url)
    wait_until(lambda: len(server.requests()) >= 10, 20, "10 requests")
    first.send_signal(signal.SIGSTOP)  # so that it cannot finish meanwhile
    others = [apart.start(N, url=server.url) for _ in range(2)]
    for other in others:
        assert other.stdout is not None
        assert f"waiting for process {first.pid} on" in other.stdout.readline()
    first.kill()
    outputs = [other.communicate(timeout=60)[0] for other in others]
    assert [other.returncode for other in others] == [0, 0], outputs
    assert sum(", 0 to ask" in output for output in outputs) == 1, "one of them had nothing left to ask"
    texts = server.texts()
    assert len(texts) == N
    assert texts.total() - N <= IN_FLIGHT


@pytest.mark.parametrize("where", ["journal", "everything"])
def test_disk_full(project: Project, server: Server, small_disk: Callable[[Path, int], None], where: str) -> None:
    """The run stops and says so, every answer that was journalled is kept; with room again it completes."""
    server.start(latency_s=0.1)
    project.requests(range(N))
    campaign = project.campaign(url=server.url, **settings())
    disk = project.results() / "journal" if where == "journal" else project.results()
    small_disk(disk, 4096)
    run = project.start(campaign)
    wait_until(lambda: len(server.requests()) >= 20, 60, "20 requests")
    filler = disk / "filler"
    with filler.open("wb", 0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)
    output, _ = run.communicate(timeout=60)
    assert run.returncode != 0
    assert "gristmill: the disk is full: No space left on device" in output
    assert "results/c/journal/g0000." in output
    assert "help:  free some space (df -h" in output
    assert "Traceback" not in output
    kept = len(project.journal())
    assert 10 < kept < N
    assert len(server.requests()) <= kept + 2 * IN_FLIGHT
    filler.unlink()
    finished = project.run(campaign)
    assert finished.status == 0, finished.output
    complete(project, server.texts(), kills=2)


def test_orphans_are_known_by_their_environment(engine: ScriptedEngine) -> None:
    """What the tests above look for is found where it is."""
    engine.write()
    process = subprocess.Popen(["sleep", "60"], env={"SCRIPTED_ENGINE": str(engine.file)})
    assert engine.processes() == [psutil.Process(process.pid)]
    process.kill()
    process.wait()
    assert engine.processes() == []
