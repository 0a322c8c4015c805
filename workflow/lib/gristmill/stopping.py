"""Why a job must stop, and how it does: signals, the end of Snakemake, its walltime, another attempt."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import psutil

from gristmill import slurm
from gristmill.layout import RUNNER_PID

DRAIN_S = 15.0  # with the engine's grace within Slurm's default KillWait of 30 s
FORCED_S = 2.0
_POLL_S = 0.5
_MARGIN_S = (15.0, 60.0)  # of the walltime, for what is in flight and for ending the engine
_SLACK_S = 10.0  # a job's process starts so long after its job, where Slurm does not say when it ends


class Stoppable(Protocol):
    """What is asked to stop: admits nothing more, and cuts what is in flight after `grace_s` seconds."""

    def stop(self, why: str, grace_s: float | None = None) -> None: ...


def deadline(runtime_min: float | None = None) -> float | None:
    """When this Slurm job must be at its end, monotonic seconds; None outside a job or when that is not known.

    runtime_min: the time it asked for, minutes; used where Slurm does not say when it ends.
    """
    job_id = slurm.this_job()
    if job_id is None:
        return None
    now = time.time()
    end = slurm.end_of_job(job_id)
    if end is None and runtime_min:
        end = psutil.Process().create_time() - _SLACK_S + 60 * runtime_min
    if end is None:
        return None
    least, most = _MARGIN_S
    return time.monotonic() + (end - now) - min(max((end - now) / 10, least), most)


class Stop:
    """Collects the reasons to stop; the first counts. Until something is attached, it cancels the task that made it."""

    def __init__(self) -> None:
        self._target: Stoppable | None = None
        self._main = asyncio.current_task()
        self.why: str | None = None

    def attach(self, target: Stoppable) -> None:
        self._target = target
        if self.why is not None:
            target.stop(self.why, FORCED_S)

    def request(self, why: str, grace_s: float | None = None) -> None:
        """Stop. grace_s: how long what is in flight may take; unless given, less when it is not the first time.

        The first SIGINT, a person's, lets all of it finish; the second does not.
        """
        again = self.why is not None
        if not again:
            more = " and what is in flight is finished (once more: it is cut off)" if why == "SIGINT" else ""
            print(f"{why}: stopping; what was answered is kept{more}", file=sys.stderr, flush=True)
        self.why = self.why or why
        if grace_s is None and (again or why != "SIGINT"):
            # Slurm sends SIGTERM twice by itself.
            grace_s = FORCED_S if again and why != "SIGTERM" else DRAIN_S
        if self._target is not None:
            self._target.stop(why, grace_s)
        elif self._main is not None:
            self._main.cancel()


@contextlib.contextmanager
def stopping(until: float | None, wanted: Callable[[], str | None]) -> Iterator[Stop]:
    """Inside, the reasons to stop are heard.

    until: deadline, monotonic seconds. wanted: asked again and again; gives another reason.
    """
    loop = asyncio.get_running_loop()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.request, signal.Signals(number).name)
    # A Snakemake that was killed must not leave an engine that holds a GPU for nobody.
    watches = [loop.create_task(_watch(stop, asked)) for asked in (runner_gone, wanted)]
    timer = None
    if until is not None:
        timer = loop.call_later(until - time.monotonic(), stop.request, "the walltime of the job ends", FORCED_S)
    try:
        yield stop
    finally:
        for watch in watches:
            watch.cancel()
        if timer is not None:
            timer.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _watch(stop: Stop, wanted: Callable[[], str | None]) -> None:
    while (why := wanted()) is None:
        await asyncio.sleep(_POLL_S)
    stop.request(why)


_runners: dict[int, psutil.Process] = {}


def runner_gone() -> str | None:
    """A reason to stop when the Snakemake process that started this one is gone."""
    pid = int(os.environ.get(RUNNER_PID) or 0)
    if not pid:
        return None
    try:
        runner = _runners.setdefault(pid, psutil.Process(pid))
        alive = runner.is_running() and runner.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        alive = False
    return None if alive else "Snakemake is gone"
