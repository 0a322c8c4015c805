"""Campaigns on a real Slurm: what is submitted, with what, and what becomes of it."""

from __future__ import annotations

from conftest import Project, Server
from slurm_cluster import Cluster


def test_ten_groups_over_three_nodes(on_slurm: Project, cluster: Cluster, server: Server) -> None:
    """One job a group, each with the account, qos and partition of the profile, on whichever node is free."""
    server.start()
    on_slurm.requests(range(100))
    campaign = on_slurm.campaign(url=server.url, shard_size=5, shards_per_group=2, resources={"cpus_per_task": 3})
    before = len(cluster.jobs("jobid"))
    finished = on_slurm.run(campaign)
    assert finished.status == 0, finished.output
    assert [row["id"] for row in on_slurm.table()] == [str(id) for id in range(100)]
    jobs = cluster.jobs("account", "qos", "partition", "state", "nodelist", "timelimit")[before:]
    assert len(jobs) == 10
    assert {job[:4] for job in jobs} == {("proj", "normal", "gpu", "COMPLETED")}
    assert {job[4] for job in jobs} == {"n1", "n2", "n3"}
    assert server.texts().total() == 100
