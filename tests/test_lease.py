"""The lease of a group: one attempt at a time, whoever dies, and which of two goes on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from conftest import wait_until
from gristmill import lease, slurm
from gristmill.errors import GristmillError
from gristmill.lease import Lease


@pytest.fixture
def as_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """`as_job("7")`: leases made from now on belong to Slurm job 7, of which Slurm says nothing; beats are quick."""
    monkeypatch.setattr(lease, "_BEAT_S", 0.05)
    monkeypatch.setattr(lease, "_POLL_S", 0.05)
    monkeypatch.setattr(slurm, "job_state", lambda job_id: None)

    def become(job_id: str | None) -> None:
        if job_id is None:
            monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        else:
            monkeypatch.setenv("SLURM_JOB_ID", job_id)

    become(None)
    return become


class Waiting(threading.Thread):
    """Enters a lease in a thread."""

    def __init__(self, made: Lease) -> None:
        super().__init__(daemon=True)
        self.lease, self.entered, self.error = made, threading.Event(), ""
        self.leave = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.lease:
                self.entered.set()
                self.leave.wait(20)
        except GristmillError as error:
            self.error = str(error)


def elsewhere(path: Path, **holder: object) -> None:
    """A lease that another machine holds."""
    made = {"attempt": "a", "job_id": None, "host": "elsewhere", "pid": 1, "started": 1.0, "beat": 1.0}
    path.write_text(json.dumps({**made, **holder}))


def test_a_later_job_takes_over(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    """The earlier one is asked to hand over, and the later one waits until it has."""
    path = tmp_path / "g.lease"
    as_job("7")
    with Lease(path, "g") as first:
        as_job("8")
        second = Waiting(Lease(path, "g"))
        wait_until(lambda: first.wanted, 5, "the request")
        assert first.wanted is not None and "Slurm job 8" in first.wanted
        assert not second.entered.is_set()
    assert second.entered.wait(5)
    second.leave.set()
    second.join(5)
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_job_stops(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    """What Slurm requeues beside a resubmitted job says why it stops, and disturbs nobody."""
    as_job("10")
    with Lease(tmp_path / "g.lease", "g") as later:
        as_job("9")
        earlier = Waiting(Lease(tmp_path / "g.lease", "g"))
        earlier.join(5)
        assert re.search(r"Slurm job 10, .* a later attempt, works on it", earlier.error)
        assert later.wanted is None


def test_a_requeued_job_takes_over_from_itself(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    as_job("10")
    with Lease(tmp_path / "g.lease", "g") as first:
        again = Waiting(Lease(tmp_path / "g.lease", "g"))
        wait_until(lambda: first.wanted, 5, "the request")
    assert again.entered.wait(5)
    again.leave.set()


def test_outside_slurm_the_second_waits(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    gone: list[str] = []
    with Lease(tmp_path / "g.lease", "g") as first:
        second = Waiting(Lease(tmp_path / "g.lease", "g", lambda: gone[0] if gone else None))
        assert not second.entered.wait(0.5)
        assert first.wanted is None
        gone.append("Snakemake is gone")
        second.join(5)
        assert "stopped (Snakemake is gone) while waiting for process" in second.error


def test_the_dead_hold_nothing(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    """A process of this machine that is gone, or whose number another one has by now."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
        host = lease.Holder.me().host
        for pid, started in ((gone.pid, 1.0), (psutil.Process().pid, 1.0)):
            elsewhere(tmp_path / "g.lease", host=host, pid=pid, started=started)
            mine = Waiting(Lease(tmp_path / "g.lease", "g"))
            assert mine.entered.wait(5)
            mine.leave.set()
            mine.join(5)


def test_a_lease_taken_meanwhile_is_left_alone(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    """Who found the one before it dead does not remove it; nor does a second while a first is at it."""
    path = tmp_path / "g.lease"
    elsewhere(path, attempt="new")
    taken = path.read_bytes()
    Lease(path, "g")._clear(b"what was found dead")
    assert path.read_bytes() == taken
    assert list(tmp_path.iterdir()) == [path]
    mark = path.with_name(f".g.lease.{hashlib.blake2b(taken, digest_size=8).hexdigest()}.stale")
    mark.touch()
    Lease(path, "g")._clear(taken)
    assert path.read_bytes() == taken
    os.utime(mark, (0, 0))  # its maker was killed
    for _ in range(2):
        Lease(path, "g")._clear(taken)
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_find_it_dead_one_gets_it(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    elsewhere(tmp_path / "g.lease", host=lease.Holder.me().host, pid=2**22 + 1)
    waiting = [Waiting(Lease(tmp_path / "g.lease", "g")) for _ in range(8)]
    for left in range(len(waiting), 0, -1):
        inside = wait_until(lambda: [one for one in waiting if one.entered.is_set() and one.is_alive()], 10, "one")
        assert len(inside) == 1, f"{len(inside)} at once, {left} left"
        inside[0].leave.set()
        inside[0].join(5)


@pytest.mark.parametrize("over", [False, True])
def test_a_heartbeat_that_stands_still(
    tmp_path: Path, as_job: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """On another machine only the heartbeat tells; sooner where Slurm says that the job is over."""
    monkeypatch.setattr(lease, "_STALE_S", 60.0 if over else 0.5)
    monkeypatch.setattr(lease, "_STALE_OVER_S", 0.5 if over else 60.0)
    monkeypatch.setattr(slurm, "job_state", lambda job_id: "NODE_FAIL" if over else "RUNNING")
    path = tmp_path / "g.lease"
    elsewhere(path, job_id="7")
    as_job("8")
    second = Waiting(Lease(path, "g"))
    for beat in range(20):  # it is alive: every write is another beat
        elsewhere(path, job_id="7", beat=beat)
        assert not second.entered.wait(0.05)
    assert second.entered.wait(5)
    second.leave.set()


def test_who_lost_it_stops_and_leaves_it_alone(tmp_path: Path, as_job: Callable[[str | None], None]) -> None:
    """A process that stood still while another took over."""
    path = tmp_path / "g.lease"
    with Lease(path, "g") as mine:
        elsewhere(path, job_id="99")
        wait_until(lambda: mine.wanted, 5, "the loss")
        assert mine.wanted == "Slurm job 99, process 1 on elsewhere works on it now"
    assert '"99"' in path.read_text()


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", '{"attempt": "a"}'])
def test_a_damaged_file(tmp_path: Path, as_job: Callable[[str | None], None], text: str) -> None:
    (tmp_path / "g.lease").write_text(text)
    with Lease(tmp_path / "g.lease", "g"):
        pass
    assert list(tmp_path.iterdir()) == []
