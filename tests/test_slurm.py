"""What is understood of Slurm's words, without a Slurm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import PROJECT
from gristmill import slurm, stopping
from gristmill.retry import Pace


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("10:30", 630),
        ("2:00:00", 7200),
        ("1-0", 86400),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("", None),
        ("INVALID", None),
    ],
)
def test_times(text: str, seconds: float | None) -> None:
    assert slurm.seconds(text) == seconds


@pytest.mark.parametrize(
    ("given", "gpus", "made"),
    [
        ("gpu:1", 4, "gpu:4"),
        ("gpu", 2, "gpu:2"),
        ("gpu:a100:1", 4, "gpu:a100:4"),
        ("gpu:a100", 2, "gpu:a100:2"),
        ("", 2, "gpu:2"),
        ("gpu:1", 0, ""),
    ],
)
def test_generic_resources(given: str, gpus: int, made: str) -> None:
    assert slurm.gres(given, gpus) == made
    assert slurm.gpus({"gres": made}) == gpus


def test_gpus_of_a_job() -> None:
    assert slurm.gpus({}) is None
    assert slurm.gpus({"gpu": 2, "gres": "gpu:1"}) == 2
    assert slurm.gpus({"gres": "shard:4"}) == 0


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [
        ("PartitionTimeLimit", True),
        ("QOSMaxWallDurationPerJobLimit", True),
        ("QOSMaxGRESPerJob", True),
        ("QOSMinGRES", True),
        ("AssocMaxNodePerJobLimit", True),
        ("Resources", False),
        ("Priority", False),
        ("QOSMaxJobsPerUserLimit", False),
        ("QOSGrpGRES", False),
        ("AssocGrpCPUMinutesLimit", False),
        ("ReqNodeNotAvail", False),
        ("BeginTime", False),
    ],
)
def test_reasons_to_wait(reason: str, hopeless: bool) -> None:
    assert (slurm.why_hopeless(reason) is not None) == hopeless


def test_options_of_the_profile(tmp_path: Path) -> None:
    """As of the first attempt; the project's own profile is read so, too."""
    options = slurm.profile_options(PROJECT / "profiles" / "slurm")
    assert options["account"] == "my_account"
    assert (options["time"], options["mem"], options["gres"]) == ("120", "32000", "gpu:1")
    for given in (
        {"runtime": "min(60 * attempt, 90)", "mem_mb": 5, "constraint": "a&b"},
        ["runtime=min(60 * attempt, 90)", "mem_mb=5", "constraint=a&b"],
    ):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"default-resources": given}))
        assert slurm.profile_options(tmp_path) == {"time": "60", "mem": "5", "constraint": "a&b"}


def test_the_profiles_agree() -> None:
    """Where both profiles say something that is not about where jobs run, they say the same."""
    local, cluster = (
        yaml.safe_load((PROJECT / "profiles" / name / "config.yaml").read_text()) for name in ("local", "slurm")
    )
    for key in ("keep-going", "rerun-incomplete", "rerun-triggers", "show-failed-logs"):
        assert local[key] == cluster[key], key
    assert "retries" not in local
    assert not any(key.startswith("slurm-array") for key in cluster)


def squeue(monkeypatch: pytest.MonkeyPatch, out: str, status: int = 0) -> None:
    monkeypatch.setattr(slurm, "ask", lambda *words, **options: slurm.Answer(status, out, ""))


@pytest.mark.parametrize(("left_s", "margin_s"), [(60, 15), (300, 30), (3600, 60)])
def test_the_deadline_of_a_job(monkeypatch: pytest.MonkeyPatch, left_s: int, margin_s: int) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left_s))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    squeue(monkeypatch, end)
    until = stopping.deadline()
    assert until is not None
    assert abs(until - time.monotonic() - (left_s - margin_s)) < 2


def test_the_deadline_where_slurm_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    squeue(monkeypatch, "N/A")
    assert stopping.deadline() is None
    monkeypatch.setattr(stopping.psutil.Process, "create_time", lambda self: time.time() - 100)
    until = stopping.deadline(runtime_min=10)
    assert until is not None
    assert 420 < until - time.monotonic() < 460
    monkeypatch.delenv("SLURM_JOB_ID")
    assert stopping.deadline(runtime_min=10) is None


def test_a_job_that_slurm_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {
        "": (0, "", "GONE"),
        "RUNNING": (0, "RUNNING\n", "RUNNING"),
        "silent": (1, "", None),
    }
    for status, out, state in answers.values():
        squeue(monkeypatch, out.strip(), status)
        assert slurm.job_state("7") == state
    assert slurm.is_over("GONE") and slurm.is_over("PREEMPTED")
    assert not slurm.is_over(None) and not slurm.is_over("COMPLETING")


def test_recent_answers_set_the_pace() -> None:
    """One slow answer long ago does not end admission early."""
    pace = Pace()
    assert pace.would_end(100.0) == 100.0
    pace.observe(50.0, 1)
    assert pace.would_end(100.0) == 150.0
    for _ in range(300):
        pace.observe(2.0, 1)
    assert pace.would_end(100.0) == 102.0
    assert pace.slowest_s == 50.0
