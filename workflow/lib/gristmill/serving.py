"""The process of a long-lived endpoint: an engine behind a front door, under a lease that ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from gristmill import slurm
from gristmill.endpoint import EndpointGone, EngineEndpoint
from gristmill.errors import GristmillError
from gristmill.frontdoor import FrontDoor
from gristmill.layout import RUNNER_PID
from gristmill.sidecar import LOCAL, Folder, Settings, Sidecar, read_sidecar
from gristmill.stopping import deadline, stopping

_POLL_S = 0.5
_DRAIN_S = 60.0  # when nobody is in a hurry
_STARTED_S = 30.0


def serve(path: Path) -> int:
    """Serve the endpoint of a folder until its lease ends; gives an exit status."""
    os.environ.pop(RUNNER_PID, None)  # it outlives whichever Snakemake started it
    folder = Folder(path.absolute())
    settings = Settings(**json.loads(folder.settings.read_text(encoding="utf-8")))
    os.umask(0o027 if settings.group else 0o077)
    sidecar = _own_sidecar(folder, settings)
    server = _Server(settings, folder, sidecar)
    try:
        asyncio.run(server.run())
    except GristmillError as error:
        server.end(error.found.splitlines()[0])
        raise
    server.end(server.why or "it was ended")
    return 0


def _own_sidecar(folder: Folder, settings: Settings) -> Sidecar:
    """The sidecar, once it names this process or job: whoever starts it writes that a moment later."""
    job_id = slurm.this_job() or f"{LOCAL}{os.getpid()}"
    until = time.monotonic() + _STARTED_S
    while time.monotonic() < until:
        with contextlib.suppress(GristmillError):
            sidecar = read_sidecar(folder.path)[1]
            if sidecar.pid == os.getpid() or sidecar.job_id == job_id:
                return sidecar
        time.sleep(_POLL_S / 5)
    # The script of a dry run, submitted by hand.
    folder.make_key(settings.group)
    return Sidecar(secrets.token_hex(8), job_id, settings.model, settings.share, str(folder.key), time.time())


class _Server:
    def __init__(self, settings: Settings, folder: Folder, sidecar: Sidecar) -> None:
        self.why: str | None = None
        self._settings, self._folder, self._sidecar = settings, folder, sidecar
        self._until: float | None = None
        self._asked: str | None = None
        self._drain_until: float | None = None
        self._door: FrontDoor
        self._ending: asyncio.Event

    async def run(self) -> None:
        """Raises GristmillError when the engine does not start, or died too often."""
        settings = self._settings
        self._ending = asyncio.Event()
        self._door = door = FrontDoor(self._folder.read_key(), self._status)
        self._until = deadline()
        engine = EngineEndpoint(
            settings.launch(), None, self._folder.engine_log, settings.start_timeout_s, settings.restarts
        )
        with stopping(self._until, self._over) as stop:
            try:
                port = await door.open("0.0.0.0" if settings.share else "127.0.0.1", settings.port)
                self._sidecar = self._sidecar.on_port(port)
                self._sidecar.write(self._folder)
                async with engine:
                    door.serve(engine.upstream)
                    self._sidecar = replace(self._sidecar, ready=time.time())
                    self._sidecar.write(self._folder)
                    print(f"ready: {self._sidecar.url}", file=sys.stderr, flush=True)
                    stop.attach(self)
                    await self._watch(engine)
                    await self._drain()
            except asyncio.CancelledError:
                self.why = f"{stop.why}, while the engine was starting"
            finally:
                await asyncio.shield(door.close())

    def stop(self, why: str, grace_s: float | None = None) -> None:
        """Admit nothing more; in flight may take `grace_s` seconds, more when it was asked for or is idle."""
        self.why = self.why or why
        grace = _DRAIN_S if why == self._asked or grace_s is None else grace_s
        self._drain_until = min(self._drain_until or float("inf"), time.monotonic() + grace)
        self._door.refuse(why)
        self._ending.set()

    def end(self, why: str) -> None:
        """Note that and why it ended."""
        print(f"the endpoint ends: {why}", file=sys.stderr, flush=True)
        replace(self._sidecar, ended=time.time(), why=why).write(self._folder)

    def _over(self) -> str | None:
        """Whether the lease ends."""
        if self._door.stop_requested.is_set():
            self._asked = "asked to stop"
        elif self._door.idle_s > self._settings.idle_s:
            self._asked = f"idle for {self._settings.idle_s / 60:g} minutes"
        return self._asked

    async def _watch(self, engine: EngineEndpoint) -> None:
        """Until the end: start an engine that died again."""
        while not self._ending.is_set():
            if engine.alive():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), _POLL_S)
                continue
            self._door.suspend("the engine died")
            reviving = asyncio.ensure_future(engine.revive())
            ending = asyncio.ensure_future(self._ending.wait())
            await asyncio.wait({reviving, ending}, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if self._ending.is_set():
                reviving.cancel()
                await asyncio.gather(reviving, return_exceptions=True)
                return
            if reviving.exception() is not None:
                await asyncio.sleep(_POLL_S)  # Slurm signals the engine, too, maybe a moment earlier
                if self._ending.is_set():
                    return
            try:
                reviving.result()
            except EndpointGone as error:
                raise GristmillError(
                    f"{engine.name} died once more than it may be restarted", where=str(engine.log)
                ) from error
            self._door.serve(engine.upstream)

    async def _drain(self) -> None:
        while self._door.in_flight and time.monotonic() < (self._drain_until or 0):
            await self._door.drained(_POLL_S)

    def _status(self) -> dict[str, Any]:
        sidecar, now = self._sidecar, time.monotonic()
        return {
            "id": sidecar.id,
            "job_id": sidecar.job_id,
            "model": sidecar.model,
            "why": self.why,
            "idle_limit_s": self._settings.idle_s,
            "ends_in_s": None if self._until is None else round(self._until - now, 1),
        }
