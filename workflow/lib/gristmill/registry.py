"""The model registry: which engine serves a model, from where, and under which names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gristmill.errors import GristmillError


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
    python: str | None = Field(None, description="vLLM in a venv: the path of its python.")
    image: str | None = Field(None, description="vLLM in an Apptainer/Singularity image: the path of the image.")
    module: tuple[str, ...] = Field((), description="vLLM from environment modules: their names, loaded in order.")


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
        path = Path(os.path.expandvars(model.path)).expanduser()
        if not path.exists() and (project / path).exists():
            path = project / path
    if not path.exists():
        raise GristmillError(
            f"the model does not exist: {path}",
            where=f"path: {model.path}",
            help="correct `path` in the model registry",
        )
    return path.absolute()
