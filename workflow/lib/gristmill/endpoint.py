"""One module owns an engine's life: address, key, start, readiness, restart, end; and attaching to one that runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
import openai
import psutil
from openai import AsyncOpenAI

from gristmill.engines import ENGINES, Address, Attachment, Engine, Launch, engine_environment
from gristmill.errors import GristmillError, indented
from gristmill.frontdoor import Upstream
from gristmill.processes import is_alive
from gristmill.transport import EngineClient

_PROBE_S = 120.0
_METRICS_S = 5.0
_KEEPER = str(Path(__file__).with_name("keeper.py"))
_PORT_TRIES = 5
_LONGEST = 40
_OWNER = "owner"  # machine, process, and when it was started
_HICCUPS_S = (0.3, 1.0, 3.0)  # waits between the first tries at an attached endpoint
_POLL_S = 0.2
_RENEW_S = 20.0
_PORT_TAKEN = re.compile(r"address already in use|errno 98|couldn't bind|failed to bind", re.I)
_PROBES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 1},
    "/completions": {"prompt": "ping", "max_tokens": 1},
    "/embeddings": {"input": "ping"},
    "/responses": {"input": "ping", "max_output_tokens": 16},
}


class EndpointGone(Exception):
    """The engine's process ended."""


class AttachedEndpoint:
    """An endpoint that somebody else runs. It is never started or ended from here."""

    name = "the endpoint"

    def __init__(self, attachment: Attachment, route: str) -> None:
        self._attachment, self._route = attachment, route
        self.client = _client(attachment.url, attachment.key, None)
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._first_answer()
            if self._attachment.lease:
                self._renewing = asyncio.create_task(self._renew())
        except openai.APIStatusError as error:
            await self.client.close()
            raise _refused(error, self._attachment.url) from error
        except openai.APIConnectionError as error:
            await self.client.close()
            raise GristmillError(
                f"nothing answers at the endpoint: {_reason(error)}",
                where=self._attachment.url,
                help="start it, or correct endpoint.url; curl URL/models shows whether it answers",
            ) from error
        except BaseException:
            await self.client.close()
            raise
        return self

    async def _first_answer(self) -> None:
        """One tiny generation; an endpoint that is busy, or has a hiccup, is asked a few times more."""
        for pause in _HICCUPS_S:
            try:
                return await self._ask()
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code != 429:
                    raise
            except openai.APIConnectionError:
                pass
            await asyncio.sleep(pause)
        await self._ask()

    async def _ask(self, timeout_s: float = _PROBE_S) -> None:
        model = self._attachment.model
        if model is None:
            await self.client.models.list(timeout=timeout_s)
        else:
            await _probe(self.client, model, self._route, timeout_s)

    async def _renew(self) -> None:
        """Keep the endpoint's lease while there is work, also when no request is in flight for long."""
        url = f"{self._attachment.url.removesuffix('/v1')}/gristmill/renew"
        while True:
            await asyncio.sleep(_RENEW_S)
            with contextlib.suppress(openai.OpenAIError):
                await self.client.post(url, cast_to=httpx2.Response, options={"timeout": _RENEW_S})

    async def trouble(self, timeout_s: float = _PROBE_S) -> str | None:
        """What a tiny generation meets, None when it succeeds."""
        return await _trouble(self._ask(timeout_s))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        await self.client.close()

    def alive(self) -> bool:
        return True

    async def revive(self, *, counted: bool = True) -> None:
        raise EndpointGone

    async def end_stuck(self) -> bool:
        """It is not ours to end."""
        return False

    async def metrics(self) -> str:
        """What it exports about itself. Raises openai.OpenAIError."""
        return await _metrics(self.client, self._attachment.url.removesuffix("/v1"))


class EngineEndpoint:
    """An engine of our own as an async context manager: ready inside, gone with all its processes after.

    route: what its readiness is proved by; None: the first that it has.
    """

    def __init__(self, launch: Launch, route: str | None, log: Path, start_timeout_s: float, restarts: int) -> None:
        self.name = f"the {launch.model.engine} engine"
        self.log = log
        self.restarts_left = restarts
        self._launch, self._route = launch, route
        self._engine: Engine = ENGINES[launch.model.engine]
        self._start_timeout_s = start_timeout_s
        self._folder: Path | None = None  # private to one start: its socket and its key
        self._key = ""
        self._address = Address()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._lock = asyncio.Lock()
        self.client: AsyncOpenAI

    async def __aenter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            await self._start()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: a second SIGTERM must not leave an engine behind.
        await asyncio.shield(self._end())

    @property
    def upstream(self) -> Upstream:
        """Where it is reached now; another start has another address and key."""
        return Upstream(self._address.url, self._address.socket, self._key)

    def alive(self) -> bool:
        """Whether the engine is there and was ready; not while it is being started again."""
        return self._ready and self._running()

    def _running(self) -> bool:
        return self._keeper is not None and self._keeper.poll() is None

    async def trouble(self, timeout_s: float = _PROBE_S) -> str | None:
        """What a tiny generation meets, None when it succeeds."""
        return await _trouble(_probe(self.client, self._launch.names[0], self._route, timeout_s))

    async def metrics(self) -> str:
        """What the engine exports about itself. Raises openai.OpenAIError."""
        return await _metrics(self.client, self._address.url)

    async def end_stuck(self) -> bool:
        """End an engine that is there and does not work any more; it is then as dead as one that died."""
        async with self._lock:
            if self.alive():
                await self._stop()
        return True

    async def revive(self, *, counted: bool = True) -> None:
        """Start the engine again if it died, or wait while that is done.

        counted: whether it is one of the restarts that it may have.
        Raises EndpointGone when it may not be started once more, GristmillError when it does not start.
        """
        async with self._lock:
            if self.alive():
                return
            if counted:
                if self.restarts_left <= 0:
                    raise EndpointGone
                self.restarts_left -= 1
            status = self._status()
            what = "was ended" if status is None else f"died (status {status})"
            print(f"{self.name} {what}; starting it again", file=sys.stderr, flush=True)
            await self.client.close()
            await self._stop()
            try:
                await self._start()
            except GristmillError:
                self.restarts_left = 0  # those who wait for the lock need not see it fail again
                raise

    async def _start(self) -> None:
        for attempt in range(1, _PORT_TRIES + 1):
            mark = self.log.stat().st_size if self.log.exists() else 0
            folder = self._make_private_folder()
            self._address = self._choose_address(folder)
            launch = replace(self._launch, address=self._address, private=folder)
            self._spawn(launch, folder)
            self.client = _client(f"{launch.address.url}/v1", self._key, launch.address.socket)
            try:
                await self._wait_ready(launch)
                self._ready = True
                return
            except GristmillError:
                await self.client.close()
                await self._stop()
                if attempt == _PORT_TRIES or not _PORT_TAKEN.search(_tail(self.log, mark, 1 << 20)):
                    raise
            except BaseException:
                await self.client.close()
                raise

    def _make_private_folder(self) -> Path:
        # Mode 0700; the keeper removes it. The path of a socket in it, or below its tmp/, must fit into 107 bytes.
        place = tempfile.gettempdir()
        place = place if len(place) < _LONGEST else "/tmp"
        _sweep(Path(place))
        self._folder = folder = Path(tempfile.mkdtemp(prefix="gristmill-", dir=place))
        self._key = secrets.token_urlsafe(32)
        (folder / _OWNER).write_text(f"{os.uname().nodename} {os.getpid()} {psutil.Process().create_time()}")
        (folder / "key").touch(mode=0o600)
        (folder / "key").write_text(self._key)
        return folder

    def _choose_address(self, folder: Path) -> Address:
        if self._engine.unix_socket:
            path = folder / "engine.sock"
            if len(os.fsencode(path)) < 100:  # the kernel's limit is 108 bytes
                return Address(socket=path)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return Address(port=probe.getsockname()[1])

    def _spawn(self, launch: Launch, folder: Path) -> None:
        command = self._engine.command(launch)
        # By path, since the environment is the engine's; -P, so that our modules do not stand before Python's own.
        keeper = [sys.executable, "-P", _KEEPER, str(self._engine.grace_s), str(folder)]
        environment = engine_environment(self._engine, launch.model, self._key, os.environ, folder)
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [*keeper, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    async def _wait_ready(self, launch: Launch) -> None:
        """Ready is: /health says 200, and one tiny generation succeeds."""
        deadline = time.monotonic() + self._start_timeout_s
        health = f"{launch.address.url}/health"
        seen = "no answer"
        async with httpx2.AsyncClient(transport=_transport(launch.address.socket), timeout=10) as http:
            while True:
                if not self._running():
                    raise self._failed(f"it ended with status {self._status()} before it was ready")
                if time.monotonic() > deadline:
                    raise self._failed(f"it was not ready after {self._start_timeout_s:g} s ({health}: {seen})")
                try:
                    response = await http.get(health)
                    seen = f"HTTP {response.status_code}"
                    if response.status_code == 200:
                        break
                except httpx2.HTTPError as error:
                    seen = str(error) or type(error).__name__
                await asyncio.sleep(_POLL_S)
        while True:
            try:
                left = max(1.0, deadline - time.monotonic())
                await _probe(self.client, launch.names[0], self._route, min(left, _PROBE_S))
                return
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code != 429:
                    raise self._failed(f"its first answer was {error.status_code}: {error.message}") from error
                seen = f"HTTP {error.status_code}"
            except openai.APIConnectionError as error:
                seen = _reason(error)
            if not self._running():
                raise self._failed(f"it ended with status {self._status()} at its first request")
            if time.monotonic() > deadline:
                raise self._failed(f"it gave no answer within {self._start_timeout_s:g} s ({seen})")
            await asyncio.sleep(_POLL_S)

    def _status(self) -> int | None:
        return self._keeper.poll() if self._keeper else None

    def _failed(self, what: str) -> GristmillError:
        return GristmillError(
            f"{self.name} did not start: {what}\n  last lines of its log:\n{indented(_tail(self.log, 0, 3000))}",
            where=str(self.log),
            help=f"correct the model's entry in the registry or endpoint.args (model path: {self._launch.path}); "
            "then run the same command again",
        )

    async def _end(self) -> None:
        if hasattr(self, "client"):
            with contextlib.suppress(Exception):
                await self.client.close()
        await self._stop()

    async def _stop(self) -> None:
        """End the engine and verify that no process of it is left."""
        keeper, self._keeper = self._keeper, None
        self._ready = False
        if keeper is None:
            return
        family = _family(keeper.pid)
        assert keeper.stdin is not None
        keeper.stdin.close()  # the leash
        deadline = time.monotonic() + self._engine.grace_s + 10
        while keeper.poll() is None and time.monotonic() < deadline:
            family |= _family(keeper.pid)
            await asyncio.sleep(0.05)
        if keeper.poll() is None:
            keeper.kill()
            keeper.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        left = psutil.wait_procs(family, timeout=10)[1]
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if left:
            pids = ", ".join(str(process.pid) for process in left)
            raise GristmillError(
                f"{self.name} left processes that SIGKILL does not end: {pids}", help="tell your admin"
            )


def _sweep(place: Path) -> None:
    """Remove private folders of starts that were killed with their keeper, as Slurm does to a job that will not end."""
    for owner in place.glob(f"gristmill-*/{_OWNER}"):
        with contextlib.suppress(OSError, ValueError):
            host, pid, started = owner.read_text().split()
            ours = owner.stat().st_uid == os.getuid() and host == os.uname().nodename
            if ours and not is_alive(int(pid), float(started)):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _family(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _transport(path: Path | None) -> httpx2.AsyncHTTPTransport:
    return httpx2.AsyncHTTPTransport(uds=str(path) if path else None, retries=0)


def _client(url: str, key: str, socket_path: Path | None) -> AsyncOpenAI:
    """An OpenAI client that never retries by itself and never takes a proxy for an engine of ours."""
    loopback = socket_path is not None or url.startswith("http://127.0.0.1:")
    http = EngineClient(socket_path, trust_env=not loopback)
    return AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


async def _metrics(client: AsyncOpenAI, root: str) -> str:
    response = await client.get(f"{root}/metrics", cast_to=httpx2.Response, options={"timeout": _METRICS_S})
    return response.content.decode("utf-8", "replace")


async def _probe(client: AsyncOpenAI, model: str, route: str | None, timeout_s: float = _PROBE_S) -> None:
    """One tiny generation; without a route, the first kind that the model can do."""
    routes = list(_PROBES) if route is None else [route]
    for tried in routes:
        body = {"model": model, **_PROBES[tried]}
        try:
            await client.post(tried, cast_to=httpx2.Response, body=body, options={"timeout": timeout_s})
            return
        except openai.APIStatusError as error:
            if tried == routes[-1] or error.status_code not in (400, 404, 405, 501):
                raise


async def _trouble(asked: Awaitable[None]) -> str | None:
    try:
        await asked
    except openai.OpenAIError as error:
        return _reason(error)
    return None


def _reason(error: openai.OpenAIError) -> str:
    cause = error.__cause__ if isinstance(error, openai.APIConnectionError) else None
    return str(cause or error) or type(cause or error).__name__


def _refused(error: openai.APIStatusError, url: str) -> GristmillError:
    if error.status_code in (401, 403):
        help = "give the key by endpoint.api_key_env or endpoint.api_key_file"
    elif error.status_code == 404:
        help = "correct `model` (curl URL/models lists the names) or endpoint.url (it ends in /v1)"
    else:
        help = "look at the endpoint's log"
    return GristmillError(f"the endpoint refuses: HTTP {error.status_code}: {error.message}", where=url, help=help)


def _tail(log: Path, start: int, size: int) -> str:
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(start, end - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
