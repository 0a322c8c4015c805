"""Keeps an engine on a leash: `python keeper.py GRACE FOLDER COMMAND...`.

The engine lives exactly as long as somebody holds the other end of this process's standard input. When that end
closes, by intent or because its holder was killed, the engine's process group gets SIGTERM, after GRACE seconds
SIGKILL, and this process does not exit before every descendant of the engine is gone, workers with sessions of
their own included: as a child subreaper it inherits them. FOLDER, private to the engine, is removed then. Exit status:
the engine's (128 + signal when killed).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.1
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _before_the_engine() -> None:
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_DFL)  # what is ignored here would be ignored by the engine, too
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(argv: list[str]) -> int:
    """Run a command until standard input closes or it ends by itself; see the module's docstring."""
    grace, folder, command = float(argv[0]), argv[1], argv[2:]
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)  # only the leash ends the engine, so that nothing is left behind
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_before_the_engine,
            restore_signals=True,
        )
    except OSError as error:
        print(f"cannot start the engine: {error.strerror}: {command[0]}", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        return 127
    while engine.poll() is None:
        readable, _, _ = select.select([0], [], [], _POLL_S)
        if readable and not os.read(0, 4096):
            _end(engine, grace)
    sweep()
    shutil.rmtree(folder, ignore_errors=True)
    return engine.returncode if engine.returncode >= 0 else 128 - engine.returncode


def _end(engine: subprocess.Popen[bytes], grace: float) -> None:
    # The whole group at once: nothing is in flight any more, or nobody is left to wait for it, and a leader that
    # drains by itself takes seconds longer.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while engine.poll() is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()


def sweep() -> None:
    """SIGKILL and reap every descendant until there is none."""
    me = psutil.Process()
    while children := me.children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
