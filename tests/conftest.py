"""What tests share: a scripted endpoint as a process, and campaigns run by a real Snakemake in their own folder."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

import slurm_cluster
from gristmill import group, retry
from gristmill.admission import Limit
from gristmill.client import Window
from gristmill.engines import Address, Attachment, Launch
from gristmill.group import Job, run_group
from gristmill.layout import RUNNER_PID, Layout
from gristmill.manifest import Shard
from gristmill.outcomes import AnswerCheck
from gristmill.registry import load_model
from gristmill.requests import Request
from gristmill.shards import encode
from gristmill.sources import Source
from slurm_cluster import Cluster

PROJECT = Path(__file__).parents[1]
KEY = "test-key-of-the-scripted-endpoint"
KEY_ENV = "SCRIPTED_KEY"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test fails the run: what is skipped there is never tried anywhere."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter is not None and reporter.stats.get("skipped"):
        reporter.write_line(f"CI=true: {len(reporter.stats['skipped'])} skipped tests fail the run", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs the real Slurm can be chosen by -m slurm."""
    for item in items:
        if "the_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("slurm")


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
    profile: Path = PROJECT / "profiles" / "local"
    environment: dict[str, str] = field(default_factory=dict)

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
        """Start `snakemake --profile … --configfile …` and return its process (a group leader)."""
        command = [sys.executable, "-m", "snakemake", "-s", str(PROJECT / "Snakefile")]
        command += ["--profile", str(self.profile), "--configfile", str(campaign), *arguments]
        env = {**os.environ, KEY_ENV: KEY, **self.environment, **environment}
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

    def client(self, process: subprocess.Popen[str], timeout_s: float = 30) -> psutil.Process:
        """The process of a run's infer job."""

        def find() -> psutil.Process | None:
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    if any(word.endswith(".infer.py") for word in child.cmdline()):
                        return child
                except psutil.NoSuchProcess:
                    continue
            return None

        found: psutil.Process = wait_until(find, timeout_s, "an infer process")
        return found

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


@dataclass
class ScriptedEngine:
    """tests/scripted_engine.py as the vLLM that a campaign starts: a registry entry `m`, and what became of it."""

    root: Path

    @property
    def file(self) -> Path:
        return self.root / "engine.json"

    @property
    def log(self) -> Path:
        return self.root / "engine-requests.log"

    def write(self, *, path: str | None = None, python: str | None = None, **behaviour: Any) -> str:
        """Write behaviour (see tests/scripted_engine.py) and registry; gives the campaign's `registry`."""
        self.root.mkdir(parents=True, exist_ok=True)
        model = self.root / "model"
        model.mkdir(exist_ok=True)
        wrapper = self.root / "engine-python"
        wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {PROJECT}/tests/scripted_engine.py "$@"\n')
        wrapper.chmod(0o755)
        starts = str(self.root / "starts")
        self.file.write_text(json.dumps({"log": str(self.log), "starts_log": starts, **behaviour}))
        entry = {"engine": "vllm", "path": path or str(model), "python": python or str(wrapper)}
        entry["env"] = {"SCRIPTED_ENGINE": str(self.file)}
        registry = self.root / "models.yaml"
        registry.write_text(yaml.safe_dump({"models": {"m": entry}}))
        return str(registry)

    def launch(self, **changes: Any) -> Launch:
        """What `write` wrote, as a group job gets it."""
        model = load_model("m", self.root / "models.yaml")
        made = Launch(model, Path(model.path), ("m",), Address(), {}, gpus=None, concurrency=8)
        return replace(made, **changes)

    def starts(self) -> list[int]:
        """Process ids of the engines that were started, in order."""
        file = self.root / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def requests(self) -> list[dict[str, Any]]:
        return read_log(self.log)

    def texts(self) -> Counter[str]:
        return Counter(entry["text"] for entry in self.requests())

    def probes(self) -> list[dict[str, Any]]:
        entries = (json.loads(line) for line in self.log.read_text().splitlines()) if self.log.exists() else ()
        return [entry for entry in entries if entry.get("probe")]

    def processes(self) -> list[psutil.Process]:
        """What is alive of it: keeper, engine and workers, known by their environment."""
        return alive("SCRIPTED_ENGINE", str(self.file))

    def end(self) -> None:
        for process in self.processes():
            process.kill()


def alive(variable: str, value: str) -> list[psutil.Process]:
    """The processes that have a variable of this value in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def no_space_left(path: Path, kib: int) -> None:
    """Mount a tmpfs of so many KiB on `path`; skip without root, but never in CI."""
    if os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("mounting a tmpfs needs root, which CI must have")
        pytest.skip("mounting a tmpfs needs root")
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "gristmill-test", str(path)], check=True)


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


@pytest.fixture(scope="session")
def the_cluster() -> Iterator[Cluster]:
    """A real Slurm, started once; skipped where it is not installed, but never in CI."""
    lacking = slurm_cluster.missing()
    if lacking is not None:
        pytest.skip(lacking)
    root = Path(tempfile.mkdtemp(prefix="gristmill-slurm-", dir="/tmp"))
    made = Cluster(root)
    try:
        yield made.start()
    finally:
        made.stop()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def cluster(the_cluster: Cluster) -> Iterator[Cluster]:
    """The real Slurm, with an empty queue before and after."""
    yield the_cluster
    the_cluster.clear()


@pytest.fixture
def on_slurm(cluster: Cluster, project: Project) -> Project:
    """`project` with the profile for Slurm: a site's three values filled in, and states asked for every second."""
    text = (PROJECT / "profiles" / "slurm" / "config.yaml").read_text()
    for given, here in {
        "slurm_account: my_account": "slurm_account: proj",
        "before-status-checks: 15": "before-status-checks: 1",
        "latency-wait: 60": "latency-wait: 20",
        "mem_mb: 32000 * attempt": "mem_mb: 1000 * attempt",
        "cpus_per_task: 8": "cpus_per_task: 1",
    }.items():
        assert given in text
        text = text.replace(given, here)
    project.profile = project.write("profile/config.yaml", text).parent
    project.environment.update(cluster.environment)
    return project


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """A scripted engine that campaigns start by themselves: `engine.write(...)` gives their registry."""
    made = ScriptedEngine(tmp_path / "engine")
    yield made
    made.end()


@pytest.fixture
def small_disk() -> Iterator[Callable[[Path, int], None]]:
    """`small_disk(path, kib)` mounts a tmpfs, taken away after the test."""
    mounted: list[Path] = []

    def mount(path: Path, kib: int) -> None:
        no_space_left(path, kib)
        mounted.append(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@dataclass
class Asking:
    """The job of one group without Snakemake, in this process and the current folder. windows: what it used."""

    windows: list[Window] = field(default_factory=list)
    output: Path = Path("output")

    def job(self, target: Attachment | Launch, ids: Sequence[object], **settings: Any) -> Job:
        """A job that asks `ask <id>` for every id; writes its shard file."""
        shard = Shard(Source("made.jsonl", "lines"), 0, 0, len(ids), "")
        path = Layout("c").shards / "g0000" / shard.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(encode(self.request(str(id), row)) for row, id in enumerate(ids, 1)))
        limit = Limit(settings.pop("concurrency", 8), pinned=True)
        defaults = {"limit": limit, "start_timeout_s": 20.0, "restarts": 3, "check": AnswerCheck(), "rows": len(ids)}
        return Job(name="g0000", shards=[shard], layout=Layout("c"), target=lambda: target, **{**defaults, **settings})

    def request(self, id: str, row: int) -> Request:
        message = {"role": "user", "content": f"ask {id}"}
        body = json.dumps({"model": "m", "messages": [message], "max_tokens": 8}).encode()
        fingerprint = hashlib.blake2b(body, digest_size=16).hexdigest()
        return Request(id, row, fingerprint, "/chat/completions", body, "m", {})

    def run(self, target: Attachment | Launch, ids: Sequence[object], **settings: Any) -> list[dict[str, Any]]:
        """Run the job; gives the records of its answers in order. Raises what the job raises."""
        run_group(self.job(target, ids, **settings), self.output)
        lines = next(self.output.glob("*.jsonl")).read_bytes().splitlines()
        return [json.loads(line)["record"] for line in lines]

    @property
    def sent(self) -> int:
        return sum(window.tally.sent for window in self.windows)

    def journal(self) -> list[str]:
        """Ids in the journal."""
        files = sorted(Layout("c").journal.glob("*.jsonl"))
        return [json.loads(line)["id"] for file in files for line in file.read_bytes().splitlines()]


ASK = """
import sys
from pathlib import Path
from conftest import Asking, ScriptedEngine
from gristmill.engines import Attachment
from gristmill.errors import reported
url, key, engine, count, concurrency = sys.argv[1:]
target = Attachment(url, key, "m") if url else ScriptedEngine(Path(engine)).launch()
with reported():
    Asking().run(target, range(int(count)), concurrency=int(concurrency))
"""


class Apart:
    """Starts `Asking.run` as processes of their own; what is left of them after a test is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, count: int, *, url: str = "", engine: ScriptedEngine | None = None, concurrency: int = 8
    ) -> subprocess.Popen[str]:
        """Ask `count` requests of the endpoint at `url`, or through an engine."""
        arguments = [url, KEY, str(engine.root) if engine else "", str(count), str(concurrency)]
        paths = f"{PROJECT / 'tests'}{os.pathsep}{PROJECT / 'workflow' / 'lib'}"
        process = subprocess.Popen(
            [sys.executable, "-c", ASK, *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    """Group jobs as processes of their own: `apart.start(...)`."""
    made = Apart(tmp_path)
    yield made
    made.end()


@pytest.fixture
def asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asking:
    """Group jobs in this process, with waits between tries fifty times shorter."""
    made = Asking()

    class Kept(Window):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.windows.append(self)

    monkeypatch.setattr(group, "Window", Kept)
    quick = SimpleNamespace(uniform=lambda low, high: low + random.uniform(0, high - low) / 50)
    monkeypatch.setattr(retry, "random", quick)
    monkeypatch.setattr(retry, "RETRIES_PER_S", 50.0)
    monkeypatch.setattr(retry, "PROBE_S", 0.02)
    monkeypatch.setattr(retry, "PATIENCE_S", 2.0)
    monkeypatch.delenv(RUNNER_PID, raising=False)
    monkeypatch.chdir(tmp_path)
    return made
