"""What tests share: a scripted endpoint as a process, and campaigns run by a real Snakemake in a folder of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

PROJECT = Path(__file__).parents[1]
KEY = "test-key-of-the-scripted-endpoint"
KEY_ENV = "SCRIPTED_KEY"


def wait_until(condition: Callable[[], Any], timeout_s: float = 60, what: str = "the condition") -> Any:
    """Poll until `condition` gives something true, which is returned; fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"{what} did not come true within {timeout_s} s")


@dataclass
class Server:
    """A scripted endpoint: tests/scripted_server.py as a process, with the log of what it was asked."""

    folder: Path
    process: subprocess.Popen[bytes] | None = None
    url: str = ""

    @property
    def log(self) -> Path:
        return self.folder / "requests.log"

    def start(self, *, port: int = 0, **script: Any) -> Server:
        """Start it with a script (see tests/scripted_server.py). The log of an earlier start is continued."""
        self.folder.mkdir(parents=True, exist_ok=True)
        address = self.folder / "address"
        address.unlink(missing_ok=True)
        (self.folder / "script.json").write_text(json.dumps(script))
        command = [sys.executable, str(PROJECT / "tests" / "scripted_server.py"), "--port", str(port)]
        command += ["--key-env", KEY_ENV, "--log", str(self.log), "--script", str(self.folder / "script.json")]
        command += ["--address-file", str(address)]
        with (self.folder / "server.err").open("ab") as errors:
            self.process = subprocess.Popen(command, env={**os.environ, KEY_ENV: KEY}, stderr=errors)
        self.url = wait_until(lambda: address.exists() and address.read_text(), 20, "the scripted server")
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def requests(self) -> list[dict[str, Any]]:
        """What arrived, in order, without probes."""
        return read_log(self.log)

    def texts(self) -> Counter[str]:
        """How often each text was asked."""
        return Counter(entry["text"] for entry in self.requests())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The generation requests in a scripted server's log, probes left out."""
    if not path.exists():
        return []
    entries = (json.loads(line) for line in path.read_text().splitlines())
    return [entry for entry in entries if not entry.get("probe")]


@dataclass
class Project:
    """A working folder in which campaigns are run by a real Snakemake."""

    root: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def requests(self, ids: list[str] | range, name: str = "requests.jsonl", **fields: Any) -> Path:
        """A JSONL file of chat requests, one an id; the text is `ask <id>` unless `text` is given."""
        text = fields.pop("text", None)
        lines = []
        for id in ids:
            message = {"role": "user", "content": text or f"ask {id}"}
            lines.append(json.dumps({"id": str(id), "messages": [message], "max_tokens": 8, **fields}) + "\n")
        return self.write(name, "".join(lines))

    def campaign(self, name: str = "c", **keys: Any) -> Path:
        """A campaign file; `url` attaches to a scripted endpoint."""
        url = keys.pop("url", None)
        data: dict[str, Any] = {"campaign": name, "input": ["requests.jsonl"], "model": "m", **keys}
        if url is not None:
            data["endpoint"] = {"url": url, "api_key_env": KEY_ENV, **data.get("endpoint", {})}
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    def start(self, campaign: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start `snakemake --profile profiles/local --configfile …` and return its process (a group leader)."""
        command = [sys.executable, "-m", "snakemake", "-s", str(PROJECT / "Snakefile")]
        command += ["--profile", str(PROJECT / "profiles" / "local"), "--configfile", str(campaign), *arguments]
        env = {**os.environ, KEY_ENV: KEY, **environment}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=self.root, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.started.append(process)
        return process

    def run(self, campaign: Path, *arguments: str, timeout: float = 180, **environment: str) -> Finished:
        """Run a campaign to its end."""
        process = self.start(campaign, *arguments, **environment)
        output, _ = process.communicate(timeout=timeout)
        return Finished(process.returncode, output)

    def results(self, name: str = "c") -> Path:
        return self.root / "results" / name

    def table(self, name: str = "c") -> list[dict[str, Any]]:
        """The rows of answers.parquet."""
        return pq.read_table(self.results(name) / "answers.parquet").to_pylist()

    def journal(self, name: str = "c") -> list[dict[str, Any]]:
        """Every whole record of the campaign's journals."""
        records = []
        for path in sorted((self.results(name) / "journal").glob("*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                records.append(json.loads(line))
        return records

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True)
class Finished:
    """A finished Snakemake run."""

    status: int
    output: str


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A scripted endpoint that is not started yet: `server.start(...)`."""
    made = Server(tmp_path / "server")
    yield made
    made.stop()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A folder to run campaigns in."""
    made = Project(tmp_path / "project")
    made.root.mkdir()
    yield made
    made.end()
