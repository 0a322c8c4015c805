"""Long-lived endpoints as Slurm jobs: started, used, ended, found stale; batches on them, and one-shot runs."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import PROJECT, Project, ScriptedEngine, wait_until
from slurm_cluster import Cluster

LOCAL = PROJECT / "profiles" / "local"
SLURM = [
    part
    for option in ["account=proj", "qos=normal", "partition=gpu", "time=5", "mem=1000", "cpus-per-task=1"]
    for part in ("--slurm", option)
]


@dataclass
class Cli:
    """`gristmill` as a process in a folder."""

    root: Path
    environment: dict[str, str]

    def start(self, *words: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        env = {**os.environ, **self.environment, "XDG_STATE_HOME": str(self.root / "state")}
        command = [*prefix, sys.executable, "-m", "gristmill.cli", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.root, env=env, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *words: str, status: int = 0, prefix: tuple[str, ...] = ()) -> tuple[Any, str]:
        """Run it; gives its JSON (None: it printed none) and its standard error."""
        process = self.start(*words, prefix=prefix)
        out, err = process.communicate(timeout=120)
        assert process.returncode == status, (out, err)
        return json.loads(out) if out.strip() else None, err

    def endpoint(
        self, registry: str, *words: str, status: int = 0, prefix: tuple[str, ...] = (), **options: str
    ) -> tuple[Any, str]:
        """`gristmill endpoint start` on Slurm."""
        slurm = [part for name, value in options.items() for part in ("--slurm", f"{name}={value}")]
        command = ["endpoint", "start", "--model", "m", "--registry", registry, *SLURM, *slurm, *words]
        return self(*command, status=status, prefix=prefix)


@pytest.fixture
def cli(on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> Iterator[Cli]:
    """Afterwards neither a job nor an engine may be left."""
    yield Cli(on_slurm.root, cluster.environment)
    wait_until(lambda: not cluster.queue(), 60, "an empty queue")
    wait_until(lambda: not engine.processes(), 20, "the end of every engine")


def argvs() -> str:
    """The command lines of all processes."""
    lines = []
    for process in psutil.process_iter():
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return "\n".join(lines)


def test_one_endpoint_for_several_batches(
    cli: Cli, on_slurm: Project, cluster: Cluster, engine: ScriptedEngine
) -> None:
    """Two campaigns and a batch on one endpoint with one start; the key is seen nowhere; stop leaves nothing."""
    registry = engine.write(script={"latency_s": 0.05}, workers=1)
    made, _ = cli.endpoint(registry, "--outdir", "E", "--gpus", "2", "--idle", "5")
    folder = on_slurm.root / "E"
    assert {"job_id", "host", "port", "url", "model"} <= made.keys()
    job = cluster.jobs(int(made["job_id"]), "jobid", "account", "qos", "partition", "timelimit", "reqtres")[-1]
    assert job[:5] == (made["job_id"], "proj", "normal", "gpu", "00:05:00")
    assert "gres/gpu=2" in job[5]
    key = (folder / "key").read_text().strip()
    assert len(key) >= 32
    assert key not in argvs()
    for path in folder.iterdir():
        private = stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert private or key not in path.read_text(), path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    on_slurm.requests(range(40), "one.jsonl")
    on_slurm.requests(range(40, 80), "two.jsonl")
    on_slurm.profile = LOCAL
    runs = []
    for name in ("one", "two"):
        endpoint = {"sidecar": str(folder), "concurrency": 4}
        runs.append(on_slurm.start(on_slurm.campaign(name, input=[f"{name}.jsonl"], endpoint=endpoint), "--nolock"))
    for run in runs:
        output, _ = run.communicate(timeout=180)
        assert run.returncode == 0, output
    assert len(on_slurm.table("one")) == len(on_slurm.table("two")) == 40

    on_slurm.requests(range(100, 110), "three.jsonl")
    _, told = cli("batch", "run", "--sidecar", "E", "--in", "three.jsonl", "--out", "three.out.jsonl")
    lines = [json.loads(line) for line in (on_slurm.root / "three.out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [str(id) for id in range(100, 110)]
    assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] == lines[0]["answer"] == "echo: ask 100"
    assert "10 ok" in told
    assert len(engine.starts()) == 1
    assert engine.texts().total() == 90

    state, _ = cli("endpoint", "status", "--job", made["job_id"])
    assert (state["state"], state["in_flight"]) == ("ready", 0)
    assert [entry["state"] for entry in cli("endpoint", "list")[0]] == ["ready"]
    again, error = cli(
        "endpoint", "start", "--model", "m", "--registry", registry, "--outdir", "E", "--local", status=1
    )
    assert again is None and "an endpoint is in this folder already" in error
    assert cli("endpoint", "stop", "--job", made["job_id"])[0]["state"] == "ended"
    assert not cluster.queue() and not engine.processes()
    assert cluster.jobs(int(made["job_id"]), "state") == [("COMPLETED",)]

    campaign = on_slurm.campaign("late", input=["one.jsonl"], endpoint={"sidecar": str(folder)})
    finished = on_slurm.run(campaign, "--retries", "0")
    assert finished.status == 1
    assert "the endpoint has ended: it ended itself: asked to stop" in finished.output


def test_idle_and_its_killed_client(cli: Cli, on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """The endpoint of a client that was killed ends by itself; one whose job was killed hard is called stale."""
    registry = engine.write(script={"latency_s": 0.2}, workers=1)
    made, _ = cli.endpoint(registry, "--outdir", "E", "--idle", "0.05")
    on_slurm.requests(range(1000))
    client = cli.start("batch", "run", "--sidecar", "E", "--in", "requests.jsonl", "--out", "out.jsonl")
    wait_until(lambda: len(engine.requests()) >= 20, 30, "some requests")
    assert cluster.queue() == [made["job_id"]]
    client.kill()
    client.communicate()
    wait_until(lambda: not cluster.queue(), 30, "the end of the endpoint")
    assert cluster.jobs(int(made["job_id"]), "state") == [("COMPLETED",)]
    state, _ = cli("endpoint", "status", "--sidecar", "E", status=1)
    assert (state["state"], state["detail"]) == ("ended", "it ended itself: idle for 0.05 minutes")

    made, _ = cli.endpoint(registry, "--outdir", "E")
    server = psutil.Process(json.loads((on_slurm.root / "E" / "sidecar.json").read_text())["pid"])
    server.send_signal(signal.SIGKILL)
    wait_until(lambda: not cluster.queue(), 30, "the end of the job")
    state, _ = cli("endpoint", "status", "--sidecar", "E", status=1)
    assert state["state"] == "stale"
    assert f"Slurm job {made['job_id']} is over" in state["detail"]
    _, error = cli("batch", "run", "--sidecar", "E", "--in", "requests.jsonl", "--out", "out.jsonl", status=1)
    assert "the sidecar is stale" in error


def test_out_of_time_and_scancel(cli: Cli, on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """An endpoint ends in order before its job's time is up, and on scancel; what is in flight is answered."""
    registry = engine.write(script={"latency_s": 2.0})
    made, _ = cli.endpoint(registry, "--outdir", "A", time="1")
    other, _ = cli.endpoint(registry, "--outdir", "B", "--share")
    on_slurm.requests(range(4))
    slow = cli.start(
        "batch", "run", "--sidecar", "B", "--in", "requests.jsonl", "--out", "o.jsonl", "--concurrency", "4"
    )
    wait_until(lambda: len(engine.requests()) == 4, 30, "four requests")
    cluster.call("scancel", other["job_id"])
    _, error = slow.communicate(timeout=60)
    assert slow.returncode == 0, error
    wait_until(lambda: other["job_id"] not in cluster.queue(), 30, "the end of the cancelled job")
    state, _ = cli("endpoint", "status", "--sidecar", "B", status=1)
    assert (state["state"], state["detail"]) == ("ended", "it ended itself: SIGTERM")
    wait_until(lambda: made["job_id"] not in cluster.queue(), 75, "the end of the short job")
    state, _ = cli("endpoint", "status", "--sidecar", "A", status=1)
    assert state["detail"] == "it ended itself: the walltime of the job ends"
    assert cluster.jobs(int(made["job_id"]), "state")[0] == ("COMPLETED",)


def test_from_another_machine(cli: Cli, on_slurm: Project, engine: ScriptedEngine) -> None:
    """An endpoint on loopback is started, asked, used and stopped through its job; a campaign needs a shared one."""
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh")
    cli.endpoint(engine.write(), "--outdir", "E", prefix=elsewhere)
    state, _ = cli("endpoint", "status", "--sidecar", "E", prefix=elsewhere)
    assert state["state"] == "ready"
    on_slurm.requests(range(3))
    words = ["batch", "run", "--sidecar", "E", "--in", "requests.jsonl", "--out", "out.jsonl"]
    _, told = cli(*words, prefix=elsewhere)
    assert "3 ok" in told
    campaign = on_slurm.campaign("c", endpoint={"sidecar": str(on_slurm.root / "E")})
    words = ["-m", "snakemake", "-s", str(PROJECT / "Snakefile"), "--profile", str(LOCAL)]
    command = [*elsewhere, sys.executable, *words, "--configfile", str(campaign)]
    done = subprocess.run(command, cwd=on_slurm.root, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be reached from elsewhere" in done.stderr + done.stdout
    assert cli("endpoint", "stop", "--sidecar", "E", prefix=elsewhere)[0]["state"] == "ended"


def test_dry_run_refusals_and_failures(cli: Cli, on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """What is wrong is told before anything is submitted, or with the engine's own words after."""
    registry = engine.write(fail="exit")
    before = cluster.next_job
    made, _ = cli.endpoint(registry, "--outdir", "D", "--dry-run", "--gpus", "3")
    script = Path(made["script"]).read_text()
    assert "#SBATCH --account=proj" in script and "#SBATCH --gres=gpu:3" in script
    assert "#SBATCH --nodes=1" in script, "from the profile"
    _, error = cli.endpoint(registry, "--outdir", "X", status=1, qos="tiny", time="10")
    assert "qos tiny allows 00:05:00" in error
    assert cluster.jobs(before, "jobid") == []
    _, error = cli.endpoint(registry, "--outdir", "F", status=1)
    assert "No available memory for the cache blocks" in error
    assert str(on_slurm.root / "F" / "engine.log") in error


def test_one_shot(cli: Cli, on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """One input, one results file, one command: a job of its own, which a rerun resumes."""
    registry = engine.write(script={"latency_s": 0.5})
    on_slurm.requests(range(30))
    words = ["run", "--model", "m", "--registry", registry, "--in", "requests.jsonl", "--out", "out.jsonl", *SLURM]
    first = cli.start(*words, "--concurrency", "2")
    wait_until(lambda: len(engine.requests()) >= 6, 60, "some requests")
    (job,) = cluster.queue()
    cluster.call("scancel", job)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 1
    assert "CANCELLED" in error and not (on_slurm.root / "out.jsonl").exists()
    made, error = cli(*words)
    lines = (on_slurm.root / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in lines] == ["ok"] * 30
    assert engine.texts().total() == 30
    assert cluster.jobs(int(made["job_id"]), "state") == [("COMPLETED",)]
    made, _ = cli(*words, "--no-wait")
    wait_until(lambda: made["job_id"] not in cluster.queue(), 60, "the end of the job")
    assert cluster.jobs(int(made["job_id"]), "state") == [("COMPLETED",)]
    assert len(engine.starts()) == 2, "everything was answered already"
