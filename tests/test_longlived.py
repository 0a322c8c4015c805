"""Long-lived endpoints on this machine: who may read what, how they end, what is told of dead ones."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from conftest import Project, ScriptedEngine, wait_until
from gristmill.layout import only_one


class Local:
    """`gristmill endpoint` without Slurm, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "XDG_STATE_HOME": str(root / "state")}
        self.environment.pop("SLURM_JOB_ID", None)

    def __call__(self, *words: str, status: int = 0) -> tuple[Any, str]:
        command = [sys.executable, "-m", "gristmill.cli", *words]
        pipe = subprocess.PIPE
        done = subprocess.run(command, cwd=self.root, env=self.environment, stdout=pipe, stderr=pipe, text=True)
        assert done.returncode == status, (done.stdout, done.stderr)
        return json.loads(done.stdout) if done.stdout.strip() else None, done.stderr

    def start(self, registry: str, *words: str, status: int = 0) -> tuple[Any, str]:
        where = ("--model", "m", "--registry", registry, "--outdir", "E")
        return self("endpoint", "start", "--local", *where, *words, status=status)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(json.loads((self.root / "E" / "sidecar.json").read_text())["pid"])


@pytest.fixture
def local(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Local]:
    made = Local(tmp_path)
    yield made
    if (tmp_path / "E" / "sidecar.json").exists():
        made("endpoint", "stop", "--sidecar", "E")
    wait_until(lambda: not engine.processes(), 20, "the end of every engine")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("group", [False, True])
def test_who_may_read_the_key(local: Local, engine: ScriptedEngine, group: bool) -> None:
    """Nobody else; the group when it is asked for. Another folder of the same name is left alone."""
    made, _ = local.start(engine.write(), *(["--group-readable"] if group else []))
    folder = local.root / "E"
    assert mode(folder) == (0o750 if group else 0o700)
    assert mode(folder / "key") == mode(folder / "authorization") == (0o640 if group else 0o600)
    key = (folder / "key").read_text().strip()
    for path in folder.iterdir():
        assert mode(path) & 0o007 == 0 or key not in path.read_text(), path
    with OpenAI(base_url=made["url"], api_key=key, max_retries=0) as client:
        assert client.models.list().data[0].id == "m"
    process = local.process
    assert process.net_connections("inet")[0].laddr.ip == "127.0.0.1"
    assert key not in " ".join(process.cmdline())


def test_a_folder_that_is_no_endpoints(local: Local, engine: ScriptedEngine) -> None:
    (local.root / "E").mkdir()
    (local.root / "E" / "thesis.tex").write_text("mine")
    _, error = local.start(engine.write(), status=1)
    assert "the folder is not empty" in error
    assert [path.name for path in (local.root / "E").iterdir()] == ["thesis.tex"]


def test_two_starts_at_once(local: Local, engine: ScriptedEngine) -> None:
    """In one folder, one of them; its name may hold anything."""
    registry = engine.write(boot_s=1.0)
    where = ["--model", "m", "--registry", registry, "--outdir", "E", "--no-wait"]
    command = [sys.executable, "-m", "gristmill.cli", "endpoint", "start", "--local", *where]
    pipe = subprocess.PIPE
    several = [
        subprocess.Popen(command, cwd=local.root, env=local.environment, stdout=pipe, stderr=pipe, text=True)
        for _ in range(4)
    ]
    said = [process.communicate(timeout=60)[1] for process in several]
    assert sorted(process.returncode for process in several) == [0, 1, 1, 1], said
    assert sum("in this folder" in error for error in said) == 3, said
    wait_until(lambda: local("endpoint", "status", "--sidecar", "E")[0]["state"] == "ready", 20, "readiness")
    assert len(engine.starts()) == 1


def test_wrong_words(local: Local, engine: ScriptedEngine) -> None:
    """Told before anything is started."""
    registry = engine.write()
    assert "model 'x' is not in the registry" in local.start(registry, "--model", "x", status=1)[1]
    assert "exclude each other" in local.start(registry, "--slurm", "qos=a", status=1)[1]
    slurm = ["endpoint", "start", "--model", "m", "--registry", registry, "--outdir", "E", "--slurm", "qos"]
    assert "--slurm takes NAME=VALUE" in local(*slurm, status=1)[1]
    split = local.start(registry, "--gpus", "3", "--arg", "tensor-parallel-size=2", status=1)[1]
    assert "3 GPUs cannot be split by tensor-parallel-size: 2" in split
    assert "the folder cannot be made" in local.start(registry, "--outdir", "/proc/E", status=1)[1]
    assert "invalid positive_number value: '-1'" in local.start(registry, "--idle", "-1", status=2)[1]
    assert "there is no endpoint in this folder" in local("endpoint", "status", "--sidecar", "E", status=1)[1]
    assert "no endpoint with job id 7" in local("endpoint", "stop", "--job", "7", status=1)[1]
    assert engine.starts() == []


def test_the_engine_dies_and_comes_back(local: Local, engine: ScriptedEngine) -> None:
    """The endpoint keeps its address and key."""
    made, _ = local.start(engine.write(workers=1))
    key = (local.root / "E" / "key").read_text().strip()
    psutil.Process(engine.starts()[0]).kill()
    wait_until(lambda: len(engine.starts()) == 2, 20, "another start")
    with OpenAI(base_url=made["url"], api_key=key, max_retries=10) as client:
        message: Any = {"role": "user", "content": "hello"}
        answer = client.chat.completions.create(model="m", messages=[message])
    assert answer.choices[0].message.content == "echo: hello"


def test_stop_while_the_engine_starts_again(local: Local, engine: ScriptedEngine) -> None:
    """Nothing is in flight then, so nothing is waited for."""
    registry = engine.write()
    local.start(registry)
    engine.write(boot_s=600)
    psutil.Process(engine.starts()[0]).kill()
    wait_until(lambda: len(engine.starts()) == 2, 20, "another start")
    process = local.process
    process.terminate()
    psutil.wait_procs([process], timeout=15)
    assert not process.is_running()
    assert local("endpoint", "status", "--sidecar", "E", status=1)[0]["detail"] == "it ended itself: SIGTERM"


def test_killed_hard(local: Local, engine: ScriptedEngine) -> None:
    """The sidecar says that it runs; whoever asks is told that it does not, also when another has its port by now."""
    made, _ = local.start(engine.write(workers=1))
    local.process.kill()
    wait_until(lambda: not engine.processes(), 20, "the end of the engine, by its keeper")
    state, _ = local("endpoint", "status", "--job", made["job_id"], status=1)
    assert (state["state"], state["detail"]) == ("stale", "its process is gone")
    assert [entry["state"] for entry in local("endpoint", "list")[0]] == ["stale"]
    again, _ = local.start(engine.write(), "--port", str(made["port"]))
    assert again["port"] == made["port"] and again["job_id"] != made["job_id"]


def test_a_batch_and_its_rerun(local: Local, engine: ScriptedEngine) -> None:
    """`run --local`: every line an answer or an error, in order; again, and nothing is asked."""
    registry = engine.write(script={"rules": [{"contains": "ask 3", "do": "400"}]})
    lines = [{"id": str(n), "messages": [{"role": "user", "content": f"ask {n}"}]} for n in range(6)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "not JSON\n"
    (local.root / "in $HOME [1].jsonl").write_text(text)
    words = [
        "run",
        "--local",
        "--model",
        "m",
        "--registry",
        registry,
        "--in",
        "in $HOME [1].jsonl",
        "--out",
        "out.jsonl",
    ]
    _, error = local(*words, status=1)
    assert "2 of 7 rows are not ok" in error
    rows = [json.loads(line) for line in (local.root / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows[:6]] == ["0", "1", "2", "3", "4", "5"]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "error", "ok", "ok", "error"]
    assert rows[3]["error"]["code"] == "rejected" and rows[3]["response"]["status_code"] == 400
    assert rows[6]["error"]["code"] == "malformed_json" and rows[6]["response"] is None
    assert rows[0]["response"]["body"]["object"] == "chat.completion"
    before = (local.root / "out.jsonl").read_bytes()
    local(*words, "--max-error-share", "0.5")
    assert (local.root / "out.jsonl").read_bytes() == before
    assert len(engine.starts()) == 1
    with only_one(local.root / "out.jsonl.gristmill", "busy"):
        assert "another batch writes this output" in local(*words, status=1)[1]
    assert "does not exist" in local(*[*words[:-3], "nothing.jsonl", *words[-2:]], status=1)[1]


def test_a_batch_that_is_killed(local: Local, engine: ScriptedEngine) -> None:
    registry = engine.write(script={"latency_s": 0.2})
    lines = [{"id": str(n), "messages": [{"role": "user", "content": f"ask {n}"}]} for n in range(40)]
    (local.root / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["run", "--local", "--model", "m", "--registry", registry, "--in", "in.jsonl", "--out", "out.jsonl"]
    command = [sys.executable, "-m", "gristmill.cli", *words, "--concurrency", "4"]
    with subprocess.Popen(command, cwd=local.root, env=local.environment, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: len(engine.requests()) >= 12, 30, "some requests")
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not engine.processes(), 20, "the end of the engine")
    assert not (local.root / "out.jsonl").exists()
    local(*words)
    assert len((local.root / "out.jsonl").read_text().splitlines()) == 40
    assert engine.texts().total() - 40 <= 4


def test_a_finished_campaign_needs_no_endpoint(local: Local, engine: ScriptedEngine, project: Project) -> None:
    """What the journal answers is not asked, so nobody has to be there to answer."""
    local.start(engine.write())
    project.requests(range(4))
    keys = {"endpoint": {"sidecar": str(local.root / "E")}}
    assert project.run(project.campaign(**keys)).status == 0
    local("endpoint", "stop", "--sidecar", "E")
    shutil.rmtree(project.results() / "answers")
    assert project.run(project.campaign(**keys)).status == 0
    project.requests(range(5))
    finished = project.run(project.campaign(**keys))
    assert finished.status == 1
    assert "the endpoint has ended: it ended itself: asked to stop" in finished.output
    assert "job log:" in finished.output
