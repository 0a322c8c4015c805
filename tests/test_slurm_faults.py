"""What a cluster does to jobs, on a real Slurm: every campaign ends complete, and nothing is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest

from conftest import Project, ScriptedEngine, wait_until
from slurm_cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.kill]


def running(cluster: Cluster) -> dict[str, str]:
    """Job → node of the jobs that run."""
    rows = cluster.call("squeue", "-h", "-t", "running", "-o", "%i %N").splitlines()
    return {job: node for job, node in (row.split() for row in rows)}


def group_of(project: Project, job: str) -> str:
    """The group that a job works on, by its lease."""
    for lease in (project.results() / "journal").glob("*.lease"):
        if f'"job_id": "{job}"' in lease.read_text():
            return lease.stem
    return ""


def assert_nothing_left(cluster: Cluster, engine: ScriptedEngine) -> None:
    wait_until(lambda: not cluster.queue(), 60, "an empty queue")
    wait_until(lambda: not engine.processes(), 20, "the end of every engine")


def asked_twice(engine: ScriptedEngine) -> int:
    texts = engine.texts()
    return texts.total() - len(texts)


def test_all_that_befalls_jobs(on_slurm: Project, cluster: Cluster, engine: ScriptedEngine, tmp_path: Path) -> None:
    """scancel, preemption, timeout, a dead slurmd, a restarted slurmctld, a silent squeue, sacct failing all along."""
    broken = tmp_path / "bin"
    broken.mkdir()
    silent = tmp_path / "silent"
    scripts = {
        "sacct": "echo 'sacct: error: slurmdbd is down' >&2\nexit 1\n",
        "squeue": f'[ -e {silent} ] && exit 1\nexec {shutil.which("squeue")} "$@"\n',
    }
    for name, text in scripts.items():
        (broken / name).write_text(f"#!/bin/sh\n{text}")
        (broken / name).chmod(0o755)
    registry = engine.write(script={"latency_s": 3.0}, workers=1)
    on_slurm.requests(range(240))
    campaign = on_slurm.campaign(
        registry=registry,
        shard_size=40,
        shards_per_group=1,
        endpoint={"gpus": 2, "concurrency": 2},
        resources={"qos": ["low", "normal"], "runtime": 5},
    )
    run = on_slurm.start(campaign, PATH=f"{broken}{os.pathsep}{os.environ['PATH']}")
    began = cluster.next_job
    wait_until(lambda: len(running(cluster)) == 6, 60, "six running jobs")
    jobs = running(cluster)
    assert sorted(jobs.values()) == ["n1", "n1", "n2", "n2", "n3", "n3"]
    (cancelled, timed_out) = [job for job, node in jobs.items() if node == "n1"]
    assert "Requeue=0" in cluster.call("scontrol", "show", "job", cancelled)
    wait_until(lambda: len({entry["pid"] for entry in engine.requests()}) == 6, 60, "six groups that ask")
    wait_until(lambda: len(engine.requests()) > 30, 30, "some requests")

    assert cluster.quiet("scontrol", "update", f"jobid={timed_out}", "TimeLimit=1")
    cluster.call("scancel", cancelled)
    high = ["-A", "proj", "-q", "high", "-p", "gpu", "-t", "5", "-w", "n2", "--gres=gpu:4", "-c1", "--mem=100"]
    preempting = cluster.call("sbatch", "--parsable", *high, "-o", "/dev/null", "--wrap", "sleep 300")
    cluster.end("n3", signal.SIGKILL)  # its jobs go on
    failed = ["squeue", "-h", "-t", "NODE_FAIL", "-o", "%i"]
    wait_until(lambda: len(cluster.call(*failed).split()) == 2, 60, "two jobs that failed with their node")
    wait_until(lambda: preempting in running(cluster), 60, "the job that preempts")
    silent.touch()  # no status round succeeds
    cluster.end("slurmctld")
    cluster.start_controller()
    cluster.start_node("n3")
    cluster.call("scancel", preempting)
    speak_again = threading.Timer(10, silent.unlink)
    speak_again.start()
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output
    assert [row["status"] for row in on_slurm.table()] == ["ok"] * 240
    states = [state.split()[0] for (state,) in cluster.jobs(began, "state")]
    assert {"CANCELLED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "COMPLETED"} <= set(states), states
    assert asked_twice(engine) <= 2 * 2, "what the jobs of the dead node had in flight"
    assert_nothing_left(cluster, engine)


def test_walltime(on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """A job ends itself before its time is up; the next attempt has more time, and asks only what is left."""
    registry = engine.write(script={"latency_s": 1.0})
    on_slurm.requests(range(160))
    campaign = on_slurm.campaign(
        registry=registry, shard_size=200, endpoint={"concurrency": 3}, resources={"runtime": [1, 5]}
    )
    began = cluster.next_job
    finished = on_slurm.run(campaign, timeout=300)
    assert finished.status == 0, finished.output
    assert len(on_slurm.table()) == 160
    assert cluster.jobs(began, "state", "timelimit") == [("FAILED", "00:01:00"), ("COMPLETED", "00:05:00")]
    assert "the walltime of the job ends" in finished.output
    assert asked_twice(engine) == 0
    assert_nothing_left(cluster, engine)


def test_out_of_memory(on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """Slurm kills a job for its memory; the next attempt has more, and is one job with one attempt."""
    # Long enough for Slurm, which looks every few seconds.
    registry = engine.write(hog_mb=1100, script={"latency_s": 3.0})
    on_slurm.requests(range(20))
    keys = {"resources": {"mem_mb": [1000, 2500]}, "endpoint": {"concurrency": 4}}
    campaign = on_slurm.campaign(registry=registry, **keys)
    began = cluster.next_job
    finished = on_slurm.run(campaign, timeout=300)
    assert finished.status == 0, finished.output
    assert len(on_slurm.table()) == 20
    jobs = cluster.jobs(began, "state", "reqmem")
    assert [memory for _, memory in jobs] == ["1000M", "2500M"], jobs
    assert jobs[0][0] in ("FAILED", "OUT_OF_MEMORY")  # without cgroups Slurm says FAILED
    assert "exceeded memory limit" in finished.output
    assert_nothing_left(cluster, engine)


def test_snakemake_killed(on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """Its jobs run on; after --unlock a rerun submits second ones, to which the first hand over."""
    registry = engine.write(script={"latency_s": 3.0}, workers=1)
    on_slurm.requests(range(120))
    keys = {"registry": registry, "shard_size": 60, "shards_per_group": 1, "endpoint": {"concurrency": 2}}
    campaign = on_slurm.campaign(**keys)
    run = on_slurm.start(campaign)
    wait_until(lambda: len(engine.requests()) >= 10, 60, "some requests")
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    first = set(running(cluster))
    engine.write(script={"latency_s": 0.1}, workers=1)  # for the engines that are still to be started
    locked = on_slurm.run(campaign)
    assert locked.status != 0
    assert "--unlock" in locked.output
    assert on_slurm.run(campaign, "--unlock").status == 0
    finished = on_slurm.run(campaign, timeout=300)
    assert finished.status == 0, finished.output
    assert len(on_slurm.table()) == 120
    assert asked_twice(engine) == 0, "the first jobs finish what they have in flight"
    for job in first:
        log = next((on_slurm.root / "results" / "slurm_logs").rglob(f"{job}.log")).read_text()
        assert re.search(r"Slurm job \d+, process \d+ on \S+ works on it now: stopping", log), log
    assert_nothing_left(cluster, engine)
