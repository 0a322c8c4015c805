"""Processes: whether one that was noted down is still there, and how this program is run as another."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

LIBRARY = str(Path(__file__).parents[1])  # for the PYTHONPATH of other processes
_APART_S = 2.0  # the clock's steps; process numbers are not used again so soon


def is_alive(pid: int, started: float) -> bool:
    """Whether this machine has the process with this number that was started then, seconds since the epoch."""
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < _APART_S and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


def gristmill_command(*words: str) -> list[str]:
    """The command that runs `gristmill WORDS` with this Python; -P, since the working directory is the user's."""
    return [sys.executable, "-P", "-m", "gristmill.cli", *words]
