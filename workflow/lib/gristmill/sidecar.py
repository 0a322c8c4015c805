"""The folder of a long-lived endpoint: what is written there, and whether it is alive, which only itself can say."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from gristmill import slurm
from gristmill.engines import ENGINES, Address, Launch, parallel_flags
from gristmill.errors import GristmillError, indented
from gristmill.layout import write_atomically
from gristmill.processes import LIBRARY, gristmill_command, is_alive
from gristmill.registry import load_model, model_path

_ANSWER_S = 5.0
_POLL_S = 1.0
LOCAL = "local-"  # job ids of endpoints that are no Slurm jobs


@dataclass(frozen=True)
class Folder:
    """Paths in an endpoint's folder."""

    path: Path

    @property
    def sidecar(self) -> Path:
        return self.path / "sidecar.json"

    @property
    def settings(self) -> Path:
        """What the endpoint is to serve, and how."""
        return self.path / "settings.json"

    @property
    def key(self) -> Path:
        return self.path / "key"

    @property
    def header(self) -> Path:
        """The key as a header, for `curl -H @FILE`, so that it stands on no command line."""
        return self.path / "authorization"

    @property
    def script(self) -> Path:
        return self.path / "endpoint.sbatch"

    @property
    def engine_log(self) -> Path:
        return self.path / "engine.log"

    def log(self, job_id: str) -> Path:
        """What the endpoint's process prints."""
        return self.path / (f"{job_id}.log" if job_id.startswith(LOCAL) else f"slurm-{job_id}.log")

    def make_key(self, group: bool) -> None:
        """A new random key in files that nobody else can read, or only the group."""
        key = secrets.token_urlsafe(32)
        for path, text in ((self.key, key), (self.header, f"Authorization: Bearer {key}")):
            path.unlink(missing_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as out:
                os.fchmod(file, 0o640 if group else 0o600)
                out.write(f"{text}\n")

    def read_key(self) -> str:
        """Raises GristmillError."""
        try:
            return self.key.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise GristmillError(
                f"the key of the endpoint cannot be read: {error.strerror}",
                where=str(self.key),
                help="only who started it can, unless it was started with --group-readable",
            ) from error


@dataclass(frozen=True)
class Settings:
    """What an endpoint serves. idle_s: it ends after so many seconds without use. registry, project: paths."""

    model: str
    registry: str
    project: str
    gpus: int | None
    args: Mapping[str, str | int | float | bool]
    idle_s: float
    share: bool
    port: int
    start_timeout_s: float
    restarts: int
    group: bool

    def write(self, folder: Folder) -> None:
        folder.settings.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def launch(self) -> Launch:
        """Raises GristmillError when the model is not there, or its flags do not fit the number of GPUs."""
        model = load_model(self.model, Path(self.registry))
        flags = {**model.args, **self.args}
        return Launch(
            model=model,
            path=model_path(model, Path(self.project)),
            names=(self.model, *model.aliases),
            address=Address(),
            flags=parallel_flags(flags, self.gpus) if model.engine == "vllm" else flags,
            gpus=self.gpus,
            concurrency=ENGINES[model.engine].concurrency,
        )


@dataclass(frozen=True)
class Sidecar:
    """What is written of an endpoint. id: random, the endpoint tells it again.

    started, ready, ended: seconds since the epoch; ready is when its engine was up first.
    host, port, url: None until its job runs. pid, pid_started: the endpoint's process on `host`.
    """

    id: str
    job_id: str
    model: str
    share: bool
    key_file: str
    started: float
    host: str | None = None
    port: int | None = None
    url: str | None = None
    pid: int | None = None
    pid_started: float | None = None
    ready: float | None = None
    ended: float | None = None
    why: str | None = None

    def write(self, folder: Folder) -> None:
        write_atomically(folder.sidecar, json.dumps(asdict(self), indent=1) + "\n")

    def on_port(self, port: int) -> Sidecar:
        """The same, listening on a port of this machine."""
        node = os.uname().nodename
        process = psutil.Process()
        url = f"http://{node if self.share else '127.0.0.1'}:{port}/v1"
        return replace(
            self, host=node, port=port, url=url, pid=process.pid, pid_started=process.create_time(), why=None
        )

    @property
    def has_process(self) -> bool:
        """Whether its process runs on this machine."""
        here = self.host == os.uname().nodename
        return here and self.pid is not None and is_alive(self.pid, self.pid_started or 0)

    @property
    def reachable(self) -> bool:
        """Whether this machine can reach its port."""
        return self.share or self.host in (None, os.uname().nodename)


def read_sidecar(path: Path) -> tuple[Folder, Sidecar]:
    """The sidecar of an endpoint's folder. Raises GristmillError when there is none or it cannot be read."""
    folder = Folder(path.absolute())
    try:
        return folder, Sidecar(**json.loads(folder.sidecar.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise GristmillError(
            "there is no endpoint in this folder",
            where=str(folder.sidecar),
            help="name the --outdir of `gristmill endpoint start`; `gristmill endpoint list` shows them",
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise GristmillError(f"the sidecar cannot be read: {error}", where=str(folder.sidecar)) from error


@dataclass(frozen=True)
class State:
    """How an endpoint is.

    name: ready, starting, restarting or draining, as it says itself; pending or starting, as Slurm says; unreachable
    (it runs on another machine, outside Slurm), silent (its job runs and it does not answer), ended, or stale (it was
    killed: its sidecar says otherwise). detail: why. status: what it says of itself.
    """

    name: str
    detail: str = ""
    status: dict[str, Any] | None = None

    @property
    def over(self) -> bool:
        return self.name in ("ended", "stale")


def ask(folder: Folder, sidecar: Sidecar) -> State:
    """Ask an endpoint how it is; where it does not answer, ask Slurm or the operating system why."""
    # From another machine it is asked by a step of its job, which is not done again and again while it starts.
    if sidecar.port is not None and (sidecar.reachable or sidecar.ready is not None):
        status, data = call(folder, sidecar, "GET", "status")
        if status == 200 and data.get("id") == sidecar.id:
            return State(str(data.get("state")), str(data.get("why") or ""), data)
    return _from_outside(sidecar)


def _from_outside(sidecar: Sidecar) -> State:
    ended = f"it ended itself: {sidecar.why}"
    if sidecar.job_id.startswith(LOCAL):
        if sidecar.host not in (None, os.uname().nodename):
            return State("unreachable", f"it was started on {sidecar.host}")
        if sidecar.has_process:
            return State("starting" if sidecar.port is None else "silent")
        return State("ended", ended) if sidecar.ended else State("stale", "its process is gone")
    state = slurm.job_state(sidecar.job_id)
    if slurm.is_over(state):
        how = f"Slurm job {sidecar.job_id} is over" + ("" if state == "GONE" else f" ({state})")
        return State("ended", ended) if sidecar.ended else State("stale", how)
    if state in ("PENDING", "CONFIGURING"):
        return State("pending", f"Slurm job {sidecar.job_id} waits{slurm.reason(sidecar.job_id, ' ({})')}")
    if sidecar.port is None or (sidecar.ready is None and not sidecar.reachable):
        return State("starting", f"Slurm job {sidecar.job_id} is {(state or 'not shown').lower()}")
    return State("silent", f"Slurm job {sidecar.job_id} is {(state or 'not shown').lower()} and does not answer")


def call(folder: Folder, sidecar: Sidecar, method: str, what: str) -> tuple[int, dict[str, Any]]:
    """Call /gristmill/<what> of an endpoint: HTTP status and answer; status 0 when there is none."""
    if not sidecar.reachable:
        return _call_there(folder, sidecar, method, what)
    host = (sidecar.host or "") if sidecar.share else "127.0.0.1"
    connection = http.client.HTTPConnection(host, sidecar.port, timeout=_ANSWER_S)
    try:
        headers = {"Authorization": f"Bearer {folder.read_key()}"}
        connection.request(method, f"/gristmill/{what}", headers=headers)
        response = connection.getresponse()
        data = json.loads(response.read() or b"{}")
        return response.status, data if isinstance(data, dict) else {}
    except (OSError, http.client.HTTPException, ValueError):
        return 0, {}
    finally:
        connection.close()


def on_its_node(sidecar: Sidecar, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that runs `gristmill WORDS` where an endpoint's job runs, and its environment."""
    here = ["srun", f"--jobid={sidecar.job_id}", "--overlap", "--ntasks=1", "--nodes=1", "--quiet"]
    return [*here, *gristmill_command(*words)], {**os.environ, "PYTHONPATH": LIBRARY}


def _call_there(folder: Folder, sidecar: Sidecar, method: str, what: str) -> tuple[int, dict[str, Any]]:
    if sidecar.job_id.startswith(LOCAL):
        return 0, {}
    command, environment = on_its_node(sidecar, ["endpoint", "call", str(folder.path), method, what])
    said = slurm.ask(*command, environment=environment)
    try:
        status, data = json.loads(said.out)
        return int(status), dict(data)
    except (ValueError, TypeError):
        return 0, {}


def wait_ready(
    path: Path,
    timeout_s: float,
    tell: Callable[[str], None],
    *,
    from_here: bool = False,
    gone: Callable[[], str | None] = lambda: None,
) -> tuple[Folder, Sidecar]:
    """Wait until an endpoint is ready, told about by `tell`, and give its sidecar.

    from_here: whether requests must reach it from this machine. gone: gives a reason to wait no longer.

    Raises GristmillError when it is over, cannot be reached, or is not ready after `timeout_s` seconds of its running.
    """
    until, told = time.monotonic() + timeout_s, ""
    while True:
        folder, sidecar = read_sidecar(path)
        state = ask(folder, sidecar)
        if from_here and not sidecar.reachable and not state.over:
            state = State("unreachable", f"it listens on the loopback interface of {sidecar.host}")
        if state.name == "ready":
            return folder, sidecar
        if state.over or state.name in ("unreachable", "draining"):
            raise not_usable(folder, sidecar, state)
        if state.name == "pending":
            until = time.monotonic() + timeout_s
            slurm.cancel_hopeless(sidecar.job_id)
        if time.monotonic() > until:
            raise not_usable(folder, sidecar, state)
        if (text := f"{state.name}: {state.detail}".removesuffix(": ")) != told:
            told = text
            tell(text)
        if (why := gone()) is not None:
            raise GristmillError(f"stopped ({why}) while waiting for the endpoint", where=str(folder.sidecar))
        time.sleep(_POLL_S)


def not_usable(folder: Folder, sidecar: Sidecar, state: State) -> GristmillError:
    """Why an endpoint cannot be used."""
    what = {
        "stale": f"the sidecar is stale, its endpoint is gone: {state.detail}",
        "ended": f"the endpoint has ended: {state.detail}",
        "draining": f"the endpoint is ending: {state.detail}",
        "unreachable": f"the endpoint cannot be reached from {os.uname().nodename}: {state.detail}",
    }.get(state.name, f"the endpoint is not ready: {state.name} {state.detail}".rstrip())
    help = {
        "unreachable": "start it with --share, or work on that machine",
        "silent": f"look at {folder.log(sidecar.job_id)}; `gristmill endpoint stop --sidecar {folder.path}` ends it",
    }.get(state.name, f"start another: gristmill endpoint start --outdir {folder.path} …")
    if state.over and sidecar.ready is None and folder.log(sidecar.job_id).exists():
        text = folder.log(sidecar.job_id).read_text(encoding="utf-8", errors="replace")
        what += f"\n  last lines of its log:\n{indented(text, 30)}"
    logs = "".join(f"\n  log:   {log}" for log in (folder.log(sidecar.job_id), folder.engine_log) if log.exists())
    return GristmillError(what, where=f"{folder.sidecar}{logs}", help=help)
