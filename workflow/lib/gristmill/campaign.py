"""The typed model of a campaign file: its keys, their defaults, and errors that name the nearest key."""

from __future__ import annotations

import datetime
import difflib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from gristmill.errors import GristmillError
from gristmill.slurm import RESOURCES

# Keys of the contract that this version does not have: named as such, never taken in silence.
PLANNED = {
    "answer.confidence",
    "answer.review_below",
    "answer.retries",
}


Resource = int | str


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=False)


class Documents(_Model):
    """How rows of a table, or text files, become requests."""

    id: str = Field("id", description="Column that holds the id; in a folder of text files the relative path.")
    text: str = Field("text", description="Column that holds the document.")
    keep: tuple[str, ...] = Field((), description="Columns carried into answers.parquet, as text.")
    invalid_text: Literal["error", "replace"] = Field(
        "error",
        description="What invalid UTF-8 and lone surrogates do: end the row as `error`, or become U+FFFD.",
    )


class Answer(_Model):
    """What an answer must be; without it any text that was not cut short is accepted."""

    labels: tuple[str, ...] | None = Field(None, description="The allowed labels, exactly one of which is the answer.")
    schema_: str | None = Field(None, alias="schema", description="Path of a JSON Schema that the answer must satisfy.")

    @model_validator(mode="after")
    def _one_kind(self) -> Answer:
        if (self.labels is None) == (self.schema_ is None):
            raise ValueError("give either labels or schema")
        if self.labels is not None and (
            not self.labels
            or len(set(self.labels)) < len(self.labels)
            or not all(label.strip() for label in self.labels)
        ):
            raise ValueError("labels must be a list of different, non-empty words")
        return self


class Gold(_Model):
    """Known right labels, for the accuracy in summary.json."""

    column: str = Field(description="Input column (named in documents.keep) that holds the right label.")


class Sampling(_Model):
    """Request fields filled in where a request does not have them; documents get all of them."""

    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(None, description="Tokens considered at each step.")
    min_p: float | None = Field(None, ge=0, le=1, description="Least share of the best token's probability.")
    max_tokens: int | None = Field(None, gt=0, description="Longest answer, tokens.")
    seed: int | None = Field(None, description="Seed of the sampler.")
    stop: str | tuple[str, ...] | None = Field(None, description="Texts that end the answer.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="As in the OpenAI API.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="As in the OpenAI API.")
    repetition_penalty: float | None = Field(None, gt=0, description="As in vLLM.")
    extra: dict[str, Any] = Field(
        {}, description="Any other request field, passed to the engine as it is, e.g. chat_template_kwargs."
    )

    def fields(self) -> dict[str, Any]:
        """The request fields that are set."""
        named = self.model_dump(exclude={"extra"}, exclude_none=True, mode="json")
        return {**self.extra, **named}


class EndpointSettings(_Model):
    """The engine of each shard group, or a running endpoint to attach to."""

    gpus: int | None = Field(
        None, ge=0, description="GPUs of an engine, which its Slurm job asks for; default: the job's."
    )
    args: dict[str, str | int | float | bool] = Field(
        {}, description="Flags of the engine, without the dashes; they win over those in the model registry."
    )
    concurrency: int | None = Field(
        None,
        gt=0,
        description="Requests in flight, pinned. Default: as many as the engine works on, found while it runs.",
    )
    url: str | None = Field(None, description="Base URL of a running endpoint, ending in /v1; no engine is started.")
    sidecar: str | None = Field(None, description="Folder of an endpoint that `gristmill endpoint start` started.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the key of `url`.")
    api_key_file: str | None = Field(None, description="File that holds the key of `url`.")
    start_timeout: float = Field(900, gt=0, description="Longest time an engine may take to become ready, seconds.")
    restarts: int = Field(3, ge=0, description="How often an engine that died is started again within one job.")

    @property
    def attached(self) -> bool:
        """Whether an endpoint that runs already is asked."""
        return self.url is not None or self.sidecar is not None

    @model_validator(mode="after")
    def _key_needs_url(self) -> EndpointSettings:
        if self.url is not None and self.sidecar is not None:
            raise ValueError("give url or sidecar, not both")
        if self.url is None and (self.api_key_env or self.api_key_file):
            raise ValueError("api_key_env and api_key_file belong to url; an engine of our own gets a random key")
        if self.api_key_env and self.api_key_file:
            raise ValueError("give api_key_env or api_key_file, not both")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, found {self.url!r}")
        return self


class Limits(_Model):
    """Where a run stops or fails."""

    max_error_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="The run fails at its end, with everything written, if more rows are not `ok`.",
    )
    gpu_hours: float | None = Field(None, gt=0, description="GPU-hours that all jobs of the campaign may take.")
    requests: int | None = Field(None, gt=0, description="Requests that may be sent, retries included.")
    tokens: int | None = Field(None, gt=0, description="Prompt and answer tokens that may be paid for.")
    deadline: datetime.datetime | None = Field(
        None, description="When asking must be over, such as 2027-01-31 18:00 (local time unless it has an offset)."
    )

    @field_validator("deadline")
    @classmethod
    def _with_zone(cls, given: datetime.datetime | None) -> datetime.datetime | None:
        return given.astimezone() if given is not None else None


class Campaign(_Model):
    """A campaign file. Every key stands in config/README.md with its default and unit."""

    campaign: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$", description="Name; results/<name>/ is written.")
    input: tuple[str, ...] = Field(min_length=1, description="Files, glob patterns or folders.")
    documents: Documents | None = Field(None, description="Set when the inputs are documents; else they are requests.")
    prompt: str | None = Field(None, description="Path of the Jinja2 template of the user message, for documents.")
    answer: Answer | None = Field(None, description="What an answer must be.")
    gold: Gold | None = Field(None, description="Known right labels.")
    model: str | None = Field(
        None, description="A name in the model registry; with endpoint.url the name the endpoint serves."
    )
    registry: str = Field("config/models.yaml", description="Path of the model registry.")
    sampling: Sampling = Field(Sampling(), description="Request fields filled in where a request lacks them.")
    endpoint: EndpointSettings = Field(EndpointSettings(), description="The engine, or where to attach.")
    resources: dict[str, Resource | tuple[Resource, ...]] = Field(
        {},
        description="Slurm resources of the jobs that ask, over those of the profile: slurm_account, qos, "
        "slurm_partition, runtime (minutes), mem_mb, gres, cpus_per_task, constraint, … A list has a value for each "
        "attempt of a job, the last one for all further.",
    )
    shard_size: int = Field(2000, gt=0, description="Requests in a shard.")
    shards_per_group: int = Field(25, gt=0, description="Shards that share one endpoint job.")
    dedup: bool = Field(
        True,
        description="Whether requests that are the same, and greedy or seeded, are sent once and answer every id.",
    )
    limits: Limits = Field(Limits(), description="Where a run stops or fails.")

    @field_validator("resources")
    @classmethod
    def _known_resources(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if name not in RESOURCES:
                near = difflib.get_close_matches(name, RESOURCES, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(RESOURCES))}"
                raise ValueError(f"unknown resource {name}; {hint}")
            if value == ():
                raise ValueError(f"{name} is an empty list")
        return given

    @model_validator(mode="after")
    def _belongs_together(self) -> Campaign:
        if (self.documents is None) != (self.prompt is None):
            raise ValueError("documents and prompt go together: a prompt template turns documents into requests")
        if self.model is None and (not self.endpoint.attached or self.documents is not None):
            raise ValueError("model is missing: name an entry of the model registry (config/models.yaml)")
        if self.gold is not None:
            if self.documents is None or self.gold.column not in self.documents.keep:
                raise ValueError(f"gold.column {self.gold.column!r} must be named in documents.keep")
            if self.answer is None or self.answer.labels is None:
                raise ValueError("gold needs answer.labels to compare with")
        return self


def load_campaign(path: Path) -> Campaign:
    """Read and validate a campaign file (YAML). Raises GristmillError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GristmillError(f"cannot read the campaign file: {error.strerror}", where=str(path)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GristmillError(f"the campaign file is not YAML: {error}", where=str(path)) from error
    return parse_campaign(data, where=str(path))


def parse_campaign(data: object, where: str) -> Campaign:
    """Validate a campaign as plain data, naming every wrong key. Raises GristmillError."""
    if not isinstance(data, dict):
        raise GristmillError(f"a campaign is a mapping of keys, found {type(data).__name__}", where=where)
    empty = [f"{key} is empty; give it a value or remove it" for key, value in data.items() if value is None]
    if empty:
        raise _invalid(empty, where)
    if isinstance(data.get("input"), str):
        data = {**data, "input": [data["input"]]}
    try:
        return Campaign.model_validate(data)
    except ValidationError as error:
        raise _invalid([_explain(dict(item)) for item in error.errors()], where) from error


def _invalid(problems: list[str], where: str) -> GristmillError:
    return GristmillError(
        "the campaign is not valid:\n" + "\n".join(f"  - {problem}" for problem in problems),
        where=where,
        help="config/README.md lists every key with its default",
    )


def _explain(item: dict[str, Any]) -> str:
    loc = [str(part) for part in item["loc"]]
    path = ".".join(loc)
    if item["type"] == "extra_forbidden":
        if path in PLANNED:
            return f"{path} is not part of this version; remove it"
        siblings = _keys_of(loc[:-1])
        near = difflib.get_close_matches(loc[-1], siblings, n=1, cutoff=0.5)
        elsewhere = [known for known in _all_keys() if known.split(".")[-1] == loc[-1]]
        if not near and elsewhere:
            near = elsewhere[:1]
        hint = f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(siblings)}"
        return f"unknown key {path}{hint}"
    if item["type"] == "missing":
        return f"{path} is missing"
    message = item["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list, such as [one, two]")
    if item["type"] == "string_type" and isinstance(item["input"], bool | int | float):
        message += "; put it in quotes, YAML reads this word as something else"
    found = "" if not path or isinstance(item["input"], dict) else f" (found {item['input']!r})"
    return f"{path}: {message}{found}" if path else message


def _keys_of(loc: list[str]) -> list[str]:
    model: type[BaseModel] = Campaign
    for part in loc:
        nested = _nested(model).get(part)
        if nested is None:
            return []
        model = nested
    return [field.alias or name for name, field in model.model_fields.items()]


def _nested(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    kinds: dict[str, type[BaseModel]] = {
        c.__name__: c for c in (Documents, Answer, Gold, Sampling, EndpointSettings, Limits)
    }
    found: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        for kind, cls in kinds.items():
            if kind in str(field.annotation):
                found[name] = cls
    return found


def _all_keys() -> list[str]:
    keys = _keys_of([])
    return keys + [f"{name}.{key}" for name in _nested(Campaign) for key in _keys_of([name])]


def json_schema() -> str:
    """The JSON Schema of a campaign file, as the text of workflow/schemas/campaign.schema.json."""
    schema = Campaign.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"
