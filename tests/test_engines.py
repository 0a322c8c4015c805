"""Where an engine runs: containers, environment modules, offline models, caches of its own, and its GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from conftest import PROJECT, ScriptedEngine
from gristmill.endpoint import EngineEndpoint
from gristmill.engines import parallel_flags
from gristmill.errors import GristmillError
from gristmill.registry import Model, load_model, model_path

# Stands in for apptainer, which Debian does not have: in a mount namespace of its own, $HIDDEN is empty but for what is
# bound, read-only where it should be, and the environment is what APPTAINERENV_ says.
APPTAINER = """#!/bin/bash
echo "$@" > "$SEEN"
[ "$1" = exec ] || exit 64
shift
[ -n "$INSIDE" ] || INSIDE=1 exec unshare --mount --propagation private "$0" exec "$@"
stash=$(mktemp -d /run/stand-in.XXXXXX)
mount -t tmpfs stash "$stash"
places=()
while [ "$1" != image.sif ]; do
    case $1 in
    --bind) IFS=: read -r from to mode <<< "$2"
        mkdir "$stash/${#places[@]}"
        mount --bind "$from" "$stash/${#places[@]}"
        places+=("${to:-$from}:$mode")
        shift 2 ;;
    --nv | --cleanenv) shift ;;
    *) echo "unknown word $1" >&2; exit 64 ;;
    esac
done
shift
mount -t tmpfs hidden "$HIDDEN"
for number in "${!places[@]}"; do
    IFS=: read -r to mode <<< "${places[$number]}"
    mkdir -p "$to"
    mount --bind "$stash/$number" "$to"
    [ "$mode" != ro ] || mount -o remount,bind,ro "$to"
done
variables=("PATH=$PATH")
while IFS='=' read -r name value; do
    case $name in APPTAINERENV_*) variables+=("${name#APPTAINERENV_}=$value") ;; esac
done < <(env)
exec env -i "${variables[@]}" "$@"
"""


def serve(engine: ScriptedEngine, **changes: Any) -> EngineEndpoint:
    """Start an engine and end it again."""
    launch = replace(engine.launch(), **changes)
    launch = replace(launch, path=model_path(launch.model, PROJECT))
    endpoint = EngineEndpoint(launch, "/chat/completions", engine.root / "engine.log", 20, 0)

    async def once() -> None:
        async with endpoint:
            assert endpoint.alive()

    asyncio.run(once())
    assert not engine.processes()
    return endpoint


def entry(engine: ScriptedEngine, **keys: Any) -> None:
    """Change the registry's entry; None takes a key out."""
    file = engine.root / "models.yaml"
    data = yaml.safe_load(file.read_text())
    data["models"]["m"].update(keys)
    data["models"]["m"] = {name: value for name, value in data["models"]["m"].items() if value is not None}
    file.write_text(yaml.safe_dump(data))


def python(engine: ScriptedEngine) -> Path:
    """A python that reports; `report` beside it is what it saw."""
    path = engine.root / "bin" / "python3"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = """#!/bin/bash
words=("$@")
while [ "$1" != --model ]; do shift; done
{ cat "$2/config.json"; env; } > "$REPORT"
touch "$2/written" 2>/dev/null && echo WRITABLE >> "$REPORT"
"""
    shown = sys.executable
    path.write_text(f'{text}exec {shown} {PROJECT}/tests/scripted_engine.py "${{words[@]}}"\n')
    path.chmod(0o755)
    return path


def snapshot(folder: Path) -> Path:
    """A model in a Hugging Face cache, whose files are links to blobs."""
    repository = folder / "models--org--name"
    place = repository / "snapshots" / "abc"
    place.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "123").write_text('{"blob": 1}\n')
    (place / "config.json").symlink_to("../../blobs/123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc\n")
    return repository


def test_container(engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image sees the model with what its links lead to, the private folder and the binds, and nothing else."""
    if os.geteuid() != 0:
        pytest.skip("a mount namespace needs root")
    engine.write()
    report = engine.root / "report"
    python(engine)
    monkeypatch.setenv("HIDDEN", str(tmp_path))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "apptainer").write_text(APPTAINER)
    (tmp_path / "bin" / "apptainer").chmod(0o755)
    entry(
        engine,
        path=str(snapshot(tmp_path / "hub")),
        python=str(engine.root / "bin" / "python3"),
        image="image.sif",
        image_args=["--cleanenv"],
        binds=[str(engine.root)],
        env={"SCRIPTED_ENGINE": str(engine.file), "REPORT": str(report), "MY_OWN": "a b"},
    )
    serve(engine, model=load_model("m", engine.root / "models.yaml"))
    seen = report.read_text().splitlines()
    assert '{"blob": 1}' in seen
    assert "WRITABLE" not in seen
    assert {"MY_OWN=a b", "HF_HUB_OFFLINE=1", "PYTHONNOUSERSITE=1"} <= set(seen)
    key = next(line for line in seen if line.startswith("VLLM_API_KEY=")).partition("=")[2]
    words = (tmp_path / "seen").read_text()
    assert "--nv" in words.split() and key not in words
    serve(engine, model=load_model("m", engine.root / "models.yaml"), gpus=0)
    assert "--nv" not in (tmp_path / "seen").read_text().split()


def test_no_container_program(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.write()
    entry(engine, image="image.sif", python=None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(GristmillError, match="neither apptainer nor singularity"):
        serve(engine, model=load_model("m", engine.root / "models.yaml"))


def test_environment_modules(engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Environment Modules: loaded in order; a module that is not there is named, and nothing is started."""
    if not Path("/usr/share/modules/init/bash").exists():
        assert os.environ.get("CI") != "true", "environment-modules is not installed"
        pytest.skip("environment-modules is not installed")
    engine.write()
    report = engine.root / "report"
    files = tmp_path / "modulefiles"
    (files / "vllm").mkdir(parents=True)
    (files / "cuda").write_text("#%Module\nsetenv CUDA_MODULE yes\n")
    (files / "vllm" / "0.32").write_text(
        f"#%Module\nprereq cuda\nprepend-path PATH {python(engine).parent}\nsetenv VLLM_MODULE yes\n"
    )
    for name in ("MODULESHOME", "LOADEDMODULES", "_LMFILES_", "BASH_ENV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODULEPATH", str(files))
    env = {"SCRIPTED_ENGINE": str(engine.file), "REPORT": str(report)}
    entry(engine, module=["cuda", "vllm/0.32"], python=None, env=env)
    (engine.root / "model" / "config.json").write_text("{}\n")
    serve(engine, model=load_model("m", engine.root / "models.yaml"))
    assert {"CUDA_MODULE=yes", "VLLM_MODULE=yes"} <= set(report.read_text().splitlines())
    started = len(engine.starts())
    entry(engine, module=["cuda", "vllm/0.99"])
    with pytest.raises(GristmillError, match=r"the module vllm/0\.99 cannot be loaded"):
        serve(engine, model=load_model("m", engine.root / "models.yaml"))
    assert len(engine.starts()) == started


def test_offline_and_caches_of_its_own(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is downloaded unless somebody says so; no two starts share a compile cache or temporary files."""
    engine.write()
    report = engine.root / "report"
    (engine.root / "model" / "config.json").write_text("{}\n")
    env = {"SCRIPTED_ENGINE": str(engine.file), "REPORT": str(report)}
    seen = []
    for own in ({}, {}, {"HF_HUB_OFFLINE": "0", "VLLM_CACHE_ROOT": "/somewhere"}):
        entry(engine, python=str(python(engine)), env=env | own)
        serve(engine, model=load_model("m", engine.root / "models.yaml"))
        seen.append(dict(line.partition("=")[::2] for line in report.read_text().splitlines()))
    assert [one["HF_HUB_OFFLINE"] for one in seen] == ["1", "1", "0"]
    assert seen[2]["VLLM_CACHE_ROOT"] == "/somewhere"
    for name in ("TMPDIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert len({one[name] for one in seen}) == 3
        assert not Path(seen[0][name]).exists(), "gone with the engine"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    entry(engine, env=env)
    serve(engine, model=load_model("m", engine.root / "models.yaml"))
    assert "HF_HUB_OFFLINE=0" in report.read_text()


def test_snapshot_of_a_hugging_face_cache(tmp_path: Path) -> None:
    repository = snapshot(tmp_path)
    model = Model(engine="vllm", path=str(repository))
    (repository / "refs" / "main").unlink()
    assert model_path(model, PROJECT) == repository / "snapshots" / "abc"
    (repository / "snapshots" / "def").mkdir()
    (repository / "refs" / "main").write_text("def\n")
    assert model_path(model, PROJECT) == repository / "snapshots" / "def"
    (repository / "refs" / "main").unlink()
    with pytest.raises(GristmillError, match="2 snapshots") as error:
        model_path(model, PROJECT)
    assert str(repository / "snapshots" / "def") in str(error.value)


@pytest.mark.parametrize(
    ("flags", "gpus", "sizes"),
    [
        ({}, 4, (4, None, None)),
        ({}, 1, (None, None, None)),
        ({}, 0, (None, None, None)),
        ({}, None, (None, None, None)),
        ({"tensor-parallel-size": 2}, 8, (2, None, 4)),
        ({"tensor_parallel_size": 2}, 2, (2, None, None)),
        ({"tp": 2, "pp": 2}, 8, (2, 2, 2)),
        ({"data-parallel-size": 4}, 8, (2, None, 4)),
        ({"tensor-parallel-size": 1}, 4, (1, None, 4)),
        ({"tensor-parallel-size": 8}, None, (8, None, None)),
    ],
)
def test_gpus_are_split(flags: dict[str, int], gpus: int | None, sizes: tuple[int | None, ...]) -> None:
    made = parallel_flags(flags, gpus)
    names = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
    assert tuple(made.get(name) for name in names) == sizes


@given(st.integers(1, 64), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
def test_every_gpu_is_used(gpus: int, tp: int | None, pp: int | None, dp: int | None) -> None:
    """Either the sizes multiply to the GPUs, or it is refused."""
    given = {"tensor-parallel-size": tp, "pipeline-parallel-size": pp, "data-parallel-size": dp}
    try:
        made = parallel_flags({name: size for name, size in given.items() if size is not None}, gpus)
    except GristmillError:
        return
    product = 1
    for name in given:
        product *= int(made.get(name, 1))
    assert product == gpus


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"engine": "vllm", "image": "i", "module": ["m"]}, "image or module, not both"),
        ({"engine": "vllm", "binds": ["/a"]}, "belong to image"),
        ({"engine": "llamacpp", "image": "i"}, "are for vllm"),
    ],
)
def test_entries_that_contradict_themselves(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(json.dumps({"models": {"m": {"path": "p", **keys}}}))
    with pytest.raises(GristmillError, match=said):
        load_model("m", tmp_path / "models.yaml")
