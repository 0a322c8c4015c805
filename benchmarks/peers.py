"""What the benchmarks share: a scripted endpoint on a core of its own, and virtual environments of the peers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[1]
KEY = "benchmark"
SATURATE = "saturate==0.2.0"


def saturate_python() -> str:
    """The python of an environment with saturate, made once below .cache/."""
    folder = PROJECT / ".cache" / "saturate"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", SATURATE], check=True)
        (folder / "made").touch()
    return str(python)


def cores() -> tuple[set[int], set[int]]:
    """Two sets of cores: for the endpoint, and for the client. The same one where there is but one."""
    all_cores = sorted(os.sched_getaffinity(0))
    return {all_cores[0]}, {all_cores[-1]}


def on_core(core: set[int], command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that stays on a core."""
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, core), **options)


@contextlib.contextmanager
def endpoint(command: list[str], core: set[int] | None = None, log: Path | None = None) -> Iterator[str]:
    """A server process that writes its base URL to the file given by --address-file; gives the URL."""
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        words = [sys.executable, *command, "--address-file", str(address)]
        words += ["--log", str(log)] if log is not None else []
        environment = {**os.environ, "BENCHMARK_KEY": KEY}
        cores = core or os.sched_getaffinity(0)
        server = on_core(cores, words, env=environment, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while not address.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    sys.exit("the endpoint does not start")
                time.sleep(0.05)
            yield address.read_text()
        finally:
            server.terminate()
            server.wait()


def scripted(folder: Path, **script: Any) -> list[str]:
    """The command of tests/scripted_server.py with a script."""
    file = folder / f"script-{time.monotonic_ns()}.json"
    file.write_text(json.dumps(script))
    server = str(PROJECT / "tests" / "scripted_server.py")
    return [server, "--key-env", "BENCHMARK_KEY", "--script", str(file)]


def ask(url: str, bodies: list[dict[str, Any]], pinned: int | None, start: int = 16, check: Any = None) -> float:
    """Ask by the job of a shard group in the current folder; gives the seconds that it took.

    pinned: endpoint.concurrency; None: as admission decides, beginning with `start`.
    """
    sys.path.insert(0, str(PROJECT / "workflow" / "lib"))
    import orjson

    from gristmill.admission import Limit
    from gristmill.engines import Attachment
    from gristmill.group import Job, run_group
    from gristmill.layout import Layout
    from gristmill.manifest import Shard
    from gristmill.outcomes import AnswerCheck
    from gristmill.requests import Request
    from gristmill.shards import encode
    from gristmill.sources import Source

    shard = Shard(Source("made.jsonl", "lines"), 0, 0, len(bodies), "")
    path = Layout("c").shards / "g0000" / shard.file
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for number, body in enumerate(bodies):
            text = orjson.dumps(body)
            digest = hashlib.blake2b(text, digest_size=16).hexdigest()
            file.write(encode(Request(str(number), number + 1, digest, "/chat/completions", text, "m", {})))
    job = Job(
        name="g0000",
        shards=[shard],
        layout=Layout("c"),
        target=lambda: Attachment(url, KEY, "m"),
        check=check or AnswerCheck(),
        limit=Limit(start if pinned is None else pinned, pinned=pinned is not None),
        start_timeout_s=20,
        restarts=0,
        rows=len(bodies),
    )
    began = time.perf_counter()
    run_group(job, Path("output"))
    return time.perf_counter() - began
