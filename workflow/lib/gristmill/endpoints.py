"""Long-lived endpoints from the outside: start, status, list, stop."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from gristmill import slurm
from gristmill.errors import GristmillError, say
from gristmill.layout import only_one, write_atomically
from gristmill.processes import LIBRARY, gristmill_command
from gristmill.sidecar import LOCAL, Folder, Settings, Sidecar, State, ask, call, read_sidecar, wait_ready

_STOP_S = 120.0  # draining, ending the engine, and a slow Slurm
_POLL_S = 0.5


def start(path: Path, settings: Settings, options: Mapping[str, str] | None, *, dry_run: bool, wait: bool) -> None:
    """Start an endpoint in a folder, as a Slurm job with these options of sbatch, or (None) on this machine.

    Prints one JSON object to standard output. Raises GristmillError; then nothing is left running.
    """
    settings.launch()  # what is wrong with the model is told now
    os.umask(0o027 if settings.group else 0o077)
    folder = Folder(path.absolute())
    with _alone_in(folder, settings.group):
        command = gristmill_command("endpoint", "serve", str(folder.path))
        settings.write(folder)
        if options is not None:
            write_script(folder.script, command, options, f"gristmill-{settings.model}", folder.log("%j"))
            if warning := slurm.check(options):
                say(warning)
        if dry_run:
            made = {"dry_run": True, "model": settings.model, "outdir": str(folder.path), **_script(folder)}
            print(json.dumps(made))
            return
        folder.make_key(settings.group)
        sidecar = Sidecar(secrets.token_hex(8), "", settings.model, settings.share, str(folder.key), time.time())
        sidecar = _start_here(folder, sidecar, command) if options is None else _submit(folder, sidecar)
        sidecar.write(folder)  # from now on the endpoint writes it
    _remember(folder, sidecar.job_id)
    if wait:
        try:
            folder, sidecar = wait_ready(folder.path, settings.start_timeout_s, say)
        except GristmillError:
            _end(folder, sidecar)
            raise
    print(json.dumps(shown(folder, sidecar)), flush=True)
    if settings.share and sidecar.url:
        say(how_to_call(folder, sidecar))


@contextlib.contextmanager
def _alone_in(folder: Folder, group: bool) -> Iterator[None]:
    """The folder, with nothing of an endpoint that runs in it, and no other start at the same time."""
    if folder.path.exists() and not folder.settings.exists() and any(folder.path.iterdir()):
        raise GristmillError(
            "the folder is not empty and no endpoint's", where=str(folder.path), help="name another --outdir"
        )
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.path.chmod(0o750 if group else 0o700)
    except OSError as error:
        raise GristmillError(
            f"the folder cannot be made: {error.strerror}", where=str(folder.path), help="name another --outdir"
        ) from error
    with only_one(folder.path, "another start is at work in this folder"):
        if folder.sidecar.exists():
            sidecar = read_sidecar(folder.path)[1]
            state = ask(folder, sidecar)
            if not state.over:
                raise GristmillError(
                    f"an endpoint is in this folder already: job {sidecar.job_id}, {state.name}",
                    where=str(folder.path),
                    help=f"use it, end it (gristmill endpoint stop --sidecar {folder.path}), or name another --outdir",
                )
            folder.sidecar.unlink()
        yield


def write_script(path: Path, command: list[str], options: Mapping[str, str], name: str, log: Path) -> None:
    """A batch script that runs a command; `%j` in the log's name is the job's id."""
    before, place, after = str(log).rpartition("%j")
    output = before.replace("%", "%%") + place + after
    ours = {"job-name": name, "output": output, "open-mode": "append", "no-requeue": ""}
    words = slurm.words_of({**ours, **options})
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(word)}" for word in words)]
    # `exec`, so that SIGTERM reaches the program and not a shell that ignores it.
    lines += [f"export PYTHONPATH={shlex.quote(LIBRARY)}", f"exec {shlex.join(command)}"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _submit(folder: Folder, sidecar: Sidecar) -> Sidecar:
    return replace(sidecar, job_id=slurm.submit(folder.script))


def _start_here(folder: Folder, sidecar: Sidecar, command: list[str]) -> Sidecar:
    log = folder.path / "endpoint.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "PYTHONPATH": LIBRARY},
            start_new_session=True,
        )
    job_id = f"{LOCAL}{process.pid}"
    log.rename(folder.log(job_id))
    started = psutil.Process(process.pid).create_time()
    return replace(sidecar, job_id=job_id, host=os.uname().nodename, pid=process.pid, pid_started=started)


def _script(folder: Folder) -> dict[str, str]:
    return {"script": str(folder.script)} if folder.script.exists() else {}


def shown(folder: Folder, sidecar: Sidecar) -> dict[str, Any]:
    """What `start` and `status` print of an endpoint; the key is only named."""
    return {
        "job_id": sidecar.job_id,
        "host": sidecar.host,
        "port": sidecar.port,
        "url": sidecar.url,
        "model": sidecar.model,
        "sidecar": str(folder.path),
        "key_file": sidecar.key_file,
    }


def how_to_call(folder: Folder, sidecar: Sidecar) -> str:
    """Lines to call an endpoint by curl and by the OpenAI SDK; the key stands in neither."""
    body = json.dumps({"model": sidecar.model, "messages": [{"role": "user", "content": "Hello"}]})
    header = shlex.quote(f"@{folder.header}")
    return f"""call it from any machine of the cluster that can read the key:

curl -s {sidecar.url}/chat/completions -H {header} -H 'Content-Type: application/json' -d {shlex.quote(body)}

from pathlib import Path
from openai import OpenAI

client = OpenAI(base_url={sidecar.url!r}, api_key=Path({str(folder.key)!r}).read_text().strip())
messages = [{{"role": "user", "content": "Hello"}}]
print(client.chat.completions.create(model={sidecar.model!r}, messages=messages).choices[0].message.content)
"""


def status(path: Path) -> dict[str, Any]:
    """An endpoint and how it is, asked of itself."""
    folder, sidecar = read_sidecar(path)
    state = ask(folder, sidecar)
    answer = {**shown(folder, sidecar), "state": state.name, "detail": state.detail}
    for name in ("in_flight", "idle_s", "idle_limit_s", "ends_in_s"):
        answer[name] = (state.status or {}).get(name)
    return answer


def stop(path: Path) -> dict[str, Any]:
    """Ask an endpoint to end, wait until nothing of it is left, and say so. Raises GristmillError if something is."""
    folder, sidecar = read_sidecar(path)
    state = ask(folder, sidecar)
    if not state.over:
        _end(folder, sidecar, state)
        state = ask(folder, read_sidecar(path)[1])
    return {**shown(folder, sidecar), "state": state.name, "detail": state.detail}


def _end(folder: Folder, sidecar: Sidecar, state: State | None = None) -> None:
    """End an endpoint in order where it listens, else by Slurm or a signal."""
    state = state or ask(folder, sidecar)
    asked = state.status is not None and call(folder, sidecar, "POST", "stop")[0] == 202
    if not asked:
        _kill(sidecar)
    until = time.monotonic() + _STOP_S
    while not (state := ask(folder, read_sidecar(folder.path)[1])).over:
        if time.monotonic() > until:
            raise GristmillError(
                f"the endpoint does not end: {state.name} {state.detail}".rstrip(),
                where=str(folder.sidecar),
                help=f"scancel {sidecar.job_id}, and tell your admin if that does not help",
            )
        if asked and time.monotonic() > until - _STOP_S / 4:
            _kill(sidecar)
        time.sleep(_POLL_S)


def _kill(sidecar: Sidecar) -> None:
    if not sidecar.job_id.startswith(LOCAL):
        slurm.ask("scancel", sidecar.job_id)
    elif sidecar.pid is not None and sidecar.has_process:
        with contextlib.suppress(ProcessLookupError):
            os.kill(sidecar.pid, signal.SIGTERM)


# -- those that were started from this account ------------------------------------------------------------------------


def _notes() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "gristmill" / "endpoints"


def _remember(folder: Folder, job_id: str) -> None:
    """For `list`: only where the folder is; how the endpoint is, it says itself."""
    name = hashlib.blake2b(os.fsencode(folder.path), digest_size=8).hexdigest()
    with contextlib.suppress(OSError):
        write_atomically(_notes() / f"{name}.json", json.dumps({"job_id": job_id, "path": str(folder.path)}) + "\n")


def known() -> dict[str, Path]:
    """Job id → folder of the endpoints that this account started; those whose folder is gone are forgotten."""
    found = {}
    for note in sorted(_notes().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(note.read_text(encoding="utf-8"))
            if Folder(Path(data["path"])).sidecar.exists():
                found[str(data["job_id"])] = Path(data["path"])
            else:
                note.unlink()
    return found


def folder_of(job_id: str) -> Path:
    """The folder of an endpoint by its job. Raises GristmillError when it is not known here."""
    found = known()
    if job_id not in found:
        raise GristmillError(
            f"no endpoint with job id {job_id} was started from this account; there are: {', '.join(found) or 'none'}",
            where=str(_notes()),
            help="name its folder instead: --sidecar DIR",
        )
    return found[job_id]
