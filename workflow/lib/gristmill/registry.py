"""The model registry: which engine serves a model, from where, and under which names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gristmill.errors import GristmillError
from gristmill.layout import expanded


class Model(BaseModel):
    """An entry of config/models.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["vllm", "llamacpp"] = Field(description="Which engine serves it.")
    path: str = Field(
        description="Model folder (vLLM) or GGUF file (llamacpp); `package:NAME/FILE` is a file of a Python package."
    )
    aliases: tuple[str, ...] = Field((), description="Other names that requests may call it by.")
    args: dict[str, str | int | float | bool] = Field({}, description="Flags of the engine, without the dashes.")
    env: dict[str, str] = Field({}, description="Environment of the engine.")
    python: str | None = Field(None, description="Its python: the path in a venv, or in the image.")
    image: str | None = Field(None, description="vLLM in an Apptainer/Singularity image: the path of the image.")
    binds: tuple[str, ...] = Field((), description="More folders that the image sees: PATH, or PATH:PLACE[:ro].")
    image_args: tuple[str, ...] = Field((), description="More words for `apptainer exec`.")
    module: tuple[str, ...] = Field((), description="vLLM from environment modules: their names, loaded in order.")

    @model_validator(mode="after")
    def _one_environment(self) -> Model:
        if self.image and self.module:
            raise ValueError("give image or module, not both")
        if not self.image and (self.binds or self.image_args):
            raise ValueError("binds and image_args belong to image")
        if self.engine != "vllm" and (self.image or self.module or self.python):
            raise ValueError(
                f"python, image and module are for vllm; {self.engine} runs in Gristmill's own environment"
            )
        return self


def load_model(name: str, registry: Path) -> Model:
    """The entry `name` of a registry file (YAML, `models: {name: entry}`). Raises GristmillError."""
    try:
        data = yaml.safe_load(registry.read_text(encoding="utf-8")) or {}
        models = data["models"]
        entry = models.get(name)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise GristmillError(
            f"the model registry cannot be read: {error!r}",
            where=str(registry),
            help="it is `models: {NAME: {...}}`",
        ) from error
    if entry is None:
        raise GristmillError(
            f"model {name!r} is not in the registry; it has: {', '.join(sorted(models))}",
            where=str(registry),
            help="add it there, or correct `model` in the campaign file",
        )
    try:
        return Model.model_validate(entry)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise GristmillError(f"model {name!r} is not valid: {problems}", where=str(registry)) from error


def model_path(model: Model, project: Path) -> Path:
    """Where the model's files are. Raises GristmillError when they are not there."""
    if model.path.startswith("package:"):
        package, _, file = model.path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)  # finds the package without importing it
        if spec is None or not spec.submodule_search_locations:
            raise GristmillError(
                f"the Python package {package!r} that carries the model is not installed",
                where=f"path: {model.path}",
                help="make demo installs it (requirements-model.lock)",
            )
        path = Path(next(iter(spec.submodule_search_locations))) / file
    else:
        path = expanded(model.path)
        if not path.exists() and (project / path).exists():
            path = project / path
    if not path.exists():
        raise GristmillError(
            f"the model does not exist: {path}",
            where=f"path: {model.path}",
            help="correct `path` in the model registry",
        )
    return _snapshot(path.absolute())


def _snapshot(path: Path) -> Path:
    """The snapshot in a model's folder of a Hugging Face cache (`models--ORG--NAME`); any other path as it is."""
    if not path.name.startswith("models--") or not (path / "snapshots").is_dir():
        return path
    snapshots = sorted((path / "snapshots").iterdir())
    main = path / "refs" / "main"
    named = path / "snapshots" / main.read_text(encoding="utf-8").strip() if main.exists() else None
    if named in snapshots:
        return named
    if len(snapshots) == 1:
        return snapshots[0]
    raise GristmillError(
        f"the cache of the model has {len(snapshots)} snapshots, and refs/main names none of them",
        where=str(path),
        help=f"name one: {', '.join(map(str, snapshots)) or 'download the model first'}",
    )
