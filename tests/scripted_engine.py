#!/usr/bin/env python3
"""Stands in for the Python of a vLLM environment and runs the scripted server in the place of vLLM.

    scripted_engine.py -m vllm.entrypoints.openai.api_server --model PATH --served-model-name NAME [NAME ...]
        (--uds PATH | --host HOST --port PORT) [--max-model-len N] [any other flag, ignored]

The key stands in VLLM_API_KEY. A model path that does not exist is an error, except for `any`. The
environment variable SCRIPTED_ENGINE names a JSON file; every key is optional, an unknown one is an error:

    script      how the server behaves, see scripted_server.py
    log         file to which each request is appended, see scripted_server.py
    starts_log  file to which each start appends its process id, as a line
    workers     number of processes named `scripted-worker`, each in a session of its own, deaf to SIGTERM:
                like the workers of an engine that hold a GPU. They outlive the engine, however it ends, and
                go away by themselves after WORKER_S seconds
    boot_s      seconds before it listens
    hog_mb      memory that it takes, MB
    fail        "exit": a traceback with a ValueError and status 1, after boot_s and with workers left behind
                "port_in_use": "Address already in use" and status 1, at once
                "never_ready": listens, but answers every request, that for /health too, with 503
                null: none of these
    fail_times  fail only at so many starts, counted by the size of the file `<SCRIPTED_ENGINE>.failed`;
                null: at each
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripted_server import Script, ScriptedServer

MODULE = "vllm.entrypoints.openai.api_server"
WORKER_S = 600
WORKER = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({WORKER_S})"


@dataclass(frozen=True)
class Behaviour:
    """What the file named by SCRIPTED_ENGINE says."""

    script: dict[str, Any] = field(default_factory=dict)
    log: str | None = None
    boot_s: float = 0.0
    hog_mb: int = 0
    fail: str | None = None
    fail_times: int | None = None
    workers: int = 0
    starts_log: str | None = None

    def __post_init__(self) -> None:
        if self.fail not in (None, "exit", "port_in_use", "never_ready"):
            raise ValueError(f"fail: unknown value {self.fail!r}")


def append(path: Path, data: bytes) -> int:
    """Append to a file and return where it then ends, exact among processes that do the same."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, data)
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


def fail_now(behaviour: Behaviour, source: Path) -> str | None:
    """How this start fails, if it does."""
    if behaviour.fail is None or behaviour.fail_times is None:
        return behaviour.fail
    started = append(source.with_name(f"{source.name}.failed"), b".")
    return behaviour.fail if started <= behaviour.fail_times else None


def start_workers(number: int) -> None:
    """Start processes that SIGTERM does not end, in sessions of their own."""
    # With SIGTERM blocked from the start there is no moment in which a worker could be ended by it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        for _ in range(number):
            subprocess.Popen(
                ["scripted-worker", "-S", "-c", WORKER],
                executable=os.path.realpath(sys.executable),
                env={**os.environ, "PYTHONHOME": sys.base_prefix},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def crash(error: str) -> None:
    """Print what vLLM prints when it cannot start, and exit with status 1."""
    print(
        f"(APIServer pid={os.getpid()}) Traceback (most recent call last):\n"
        f'  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        f'  File "vllm/entrypoints/openai/api_server.py", line 1907, in <module>\n'
        f"    uvloop.run(run_server(args))\n"
        f"(APIServer pid={os.getpid()}) {error}",
        file=sys.stderr,
        flush=True,
    )
    raise SystemExit(1)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of vLLM that matter here; exits if it is not vLLM that is to be run."""
    if arguments[:2] != ["-m", MODULE]:
        print(f"scripted_engine.py: runs only -m {MODULE}, not {arguments[:2]}", file=sys.stderr)
        raise SystemExit(2)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--uds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=2048)
    options, _ = parser.parse_known_args(arguments[2:])
    return options


def main() -> None:
    """Do as the file named by SCRIPTED_ENGINE says."""
    options = parse(sys.argv[1:])
    source = Path(os.environ.get("SCRIPTED_ENGINE", os.devnull))
    behaviour = Behaviour(**json.loads(source.read_bytes() or b"{}"))
    script = Script.parse(behaviour.script)
    if behaviour.starts_log:
        append(Path(behaviour.starts_log), b"%d\n" % os.getpid())

    fail = fail_now(behaviour, source)
    if fail == "port_in_use":
        crash("OSError: [Errno 98] Address already in use")
    if options.model != "any" and not Path(options.model).exists():
        crash(f"OSError: {options.model} is not a valid model path: no such file or directory")
    start_workers(behaviour.workers)
    hog = bytearray(b"x") * (behaviour.hog_mb << 20)
    time.sleep(behaviour.boot_s)
    if fail == "exit":
        crash("ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization.")

    server = ScriptedServer(
        script,
        models=options.served_model_name or [options.model],
        key=os.environ.get("VLLM_API_KEY"),
        log=Path(behaviour.log) if behaviour.log else None,
        ready=fail != "never_ready",
        max_model_len=options.max_model_len,
    )

    def listening(address: str) -> None:
        print(f"INFO:     Started server process [{os.getpid()}]")
        print(f"INFO:     Application startup complete, {address}", flush=True)

    asyncio.run(server.serve(host=options.host, port=options.port, uds=options.uds, listening=listening))
    del hog


if __name__ == "__main__":
    main()
