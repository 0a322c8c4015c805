"""Whether a process that was noted down is still there."""

from __future__ import annotations

import psutil

_APART_S = 2.0  # the clock's steps; process numbers are not used again so soon


def is_alive(pid: int, started: float) -> bool:
    """Whether this machine has the process with this number that was started then, seconds since the epoch."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < _APART_S and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
