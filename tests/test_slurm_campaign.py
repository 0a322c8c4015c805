"""Campaigns on a real Slurm: what is submitted, with what, and what becomes of it."""

from __future__ import annotations

import os
import re

from conftest import Project, ScriptedEngine, Server
from slurm_cluster import Cluster


def test_ten_groups_over_three_nodes(on_slurm: Project, cluster: Cluster, server: Server) -> None:
    """One job a group, each with the account, qos and partition of the profile, on whichever node is free."""
    server.start()
    on_slurm.requests(range(100))
    campaign = on_slurm.campaign(url=server.url, shard_size=5, shards_per_group=2, resources={"cpus_per_task": 3})
    before = cluster.next_job
    finished = on_slurm.run(campaign)
    assert finished.status == 0, finished.output
    assert [row["id"] for row in on_slurm.table()] == [str(id) for id in range(100)]
    jobs = cluster.jobs(before, "account", "qos", "partition", "state", "nodelist", "timelimit")
    assert len(jobs) == 10
    assert {job[:4] for job in jobs} == {("proj", "normal", "gpu", "COMPLETED")}
    assert {job[4] for job in jobs} == {"n1", "n2", "n3"}
    assert server.texts().total() == 100


def test_overrides(on_slurm: Project, cluster: Cluster, server: Server) -> None:
    """Profile < campaign < command line; logs of its own stay, the plugin's old ones go."""
    server.start()
    on_slurm.requests(range(3))
    resources = {"qos": "low", "runtime": 9, "slurm_partition": "cpu", "slurm_extra": "--nice=7"}
    campaign = on_slurm.campaign(url=server.url, resources=resources)
    old = [on_slurm.write(f"results/{folder}/old.log", "old") for folder in ("c/logs", "slurm_logs")]
    for path in old:
        os.utime(path, (0, 0))
    before = cluster.next_job
    finished = on_slurm.run(campaign, "--set-resources", "infer:qos=high", "infer:runtime=7")
    assert finished.status == 0, finished.output
    jobs = cluster.jobs(before, "account", "qos", "partition", "timelimit", "state")
    assert jobs == [("proj", "high", "cpu", "00:07:00", "COMPLETED")]
    assert [path.exists() for path in old] == [True, False]
    assert on_slurm.run(campaign).output.count("Nothing to be done") == 1


REFUSED: dict[str, tuple[dict[str, object], list[str]]] = {
    "account": ({"slurm_account": "nobody"}, ["nvalid account", "nobody", "proj"]),
    "qos": ({"qos": "platinum"}, ["Invalid qos", "--qos=platinum", "proj (high,low,normal,tiny)"]),
    "partition": ({"slurm_partition": "fast"}, ["nvalid partition", "fast", "debug (up to 30:00)"]),
    "partition time": (
        {"slurm_partition": "debug", "runtime": 120},
        ["120 minutes", "partition debug allows 00:30:00"],
    ),
    "qos time": ({"qos": "tiny", "runtime": 10}, ["10 minutes", "qos tiny allows 00:05:00"]),
    "gpus": ({"gres": "gpu:9"}, ["node configuration is not available", "--gres=gpu:9"]),
}


def test_what_slurm_refuses(on_slurm: Project, cluster: Cluster, server: Server) -> None:
    """Before anything is submitted, in the first screen, with the values tried and those that would do."""
    server.start()
    on_slurm.requests(range(3))
    before = cluster.next_job
    for what, (resources, words) in REFUSED.items():
        campaign = on_slurm.campaign(url=server.url, resources=resources)
        finished = on_slurm.run(campaign)
        assert finished.status == 1, what
        lines = [line for line in finished.output.splitlines() if line.strip()]
        told = next(number for number, line in enumerate(lines) if "Slurm" in line or "wait for ever" in line)
        assert told < 45, (what, finished.output)
        for word in words:
            assert word in finished.output, (what, finished.output)
        assert "Traceback" not in finished.output
    assert cluster.jobs(before, "jobid") == []
    assert not list((on_slurm.root / ".snakemake" / "locks").glob("*"))


def test_a_job_that_can_never_start(on_slurm: Project, cluster: Cluster, engine: ScriptedEngine) -> None:
    """A failed attempt names every log; the next asks for more time than there is, which is told and ends the run."""
    registry = engine.write(fail="exit")
    on_slurm.requests(range(3))
    campaign = on_slurm.campaign(registry=registry, resources={"slurm_partition": "debug", "runtime": [5, 120]})
    finished = on_slurm.run(campaign, "--retries", "1")
    assert finished.status == 1
    assert "attempt 2 of a job, should it come to that, would fail" in finished.output
    assert "No available memory for the cache blocks" in finished.output
    for what in ("engine", "job", "Slurm"):
        found = re.search(rf"^ +{what} log: (\S+)$", finished.output, re.M)
        assert found, finished.output
        assert (on_slurm.root / found[1]).exists()
    assert "can never start (PartitionTimeLimit)" in finished.output
    assert not cluster.queue()
