"""A campaign file: what it may say, and what is said of one that is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from gristmill.campaign import PLANNED, Campaign, Documents, Sampling, json_schema, load_campaign, parse_campaign
from gristmill.errors import GristmillError

PROJECT = Path(__file__).parents[1]
LEAST: dict[str, Any] = {"campaign": "c", "input": ["x.jsonl"], "model": "m"}
DOCUMENTS: dict[str, Any] = {**LEAST, "documents": {"keep": ["label"]}, "prompt": "p.j2"}
WHOLE: dict[str, Any] = {
    **DOCUMENTS,
    "documents": {"id": "key", "text": "body", "keep": ["label"], "invalid_text": "replace"},
    "answer": {"labels": ["a", "b"]},
    "gold": {"column": "label"},
    "registry": "models.yaml",
    "sampling": {"temperature": 0, "stop": ["x"], "extra": {"top_logprobs": 5}},
    "endpoint": {"gpus": 2, "args": {"max-model-len": 4096, "enforce-eager": True}, "concurrency": 8},
    "shard_size": 10,
    "shards_per_group": 2,
    "limits": {"max_error_share": 0.5},
}


def refusal(data: Any) -> str:
    with pytest.raises(GristmillError) as caught:
        parse_campaign(data, "c.yaml")
    assert caught.value.where == "c.yaml"
    return caught.value.found


def test_defaults_are_those_of_the_readme() -> None:
    campaign = parse_campaign(LEAST, "c.yaml")
    assert campaign.documents is None
    assert (campaign.shard_size, campaign.shards_per_group, campaign.limits.max_error_share) == (2000, 25, 0.01)
    assert (campaign.registry, campaign.endpoint.restarts) == ("config/models.yaml", 3)
    assert campaign.sampling == Sampling()
    assert campaign.sampling.fields() == {}
    assert Documents() == Documents(id="id", text="text", keep=(), invalid_text="error")


def test_a_whole_campaign() -> None:
    campaign = parse_campaign(WHOLE, "c.yaml")
    assert campaign.sampling.fields() == {"temperature": 0.0, "stop": ["x"], "top_logprobs": 5}
    assert campaign.endpoint.args == {"max-model-len": 4096, "enforce-eager": True}
    assert campaign.documents == Documents(id="key", text="body", keep=("label",), invalid_text="replace")
    jsonschema.validate(WHOLE, json.loads(json_schema()))


def test_one_input_needs_no_list() -> None:
    assert parse_campaign({**LEAST, "input": "x"}, "c.yaml").input == ("x",)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "top": ({"shardsize": 5}, "unknown key shardsize; did you mean shard_size?"),
    "documents": (
        {"documents": {"invalid_txt": "error"}, "prompt": "p"},
        "unknown key documents.invalid_txt; did you mean invalid_text?",
    ),
    "answer": ({"answer": {"labels": ["a"], "shema": "x"}}, "unknown key answer.shema; did you mean schema?"),
    "gold": ({"gold": {"column": "x", "colum": "y"}}, "unknown key gold.colum; did you mean column?"),
    "sampling": ({"sampling": {"temprature": 0}}, "unknown key sampling.temprature; did you mean temperature?"),
    "endpoint": ({"endpoint": {"gpu": 1}}, "unknown key endpoint.gpu; did you mean gpus?"),
    "limits": (
        {"limits": {"max_errors_share": 0}},
        "unknown key limits.max_errors_share; did you mean max_error_share?",
    ),
    "elsewhere": ({"max_tokens": 5}, "unknown key max_tokens; did you mean sampling.max_tokens?"),
    "too deep": (
        {"sampling": {"concurrency": 5}},
        "unknown key sampling.concurrency; did you mean endpoint.concurrency?",
    ),
    "nothing near": ({"limits": {"zzz": 1}}, "unknown key limits.zzz; known here: max_error_share, gpu_hours"),
    "the name in the model": ({"answer": {"schema_": "x"}}, "unknown key answer.schema_; did you mean schema?"),
    "planned": ({"answer": {"labels": ["a"], "retries": 4}}, "answer.retries is not part of this version; remove it"),
    "a number": ({1: 2}, "1"),
}


@pytest.mark.parametrize(("keys", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_keys_are_named_with_the_nearest(keys: dict[str, Any], message: str) -> None:
    assert message in refusal({**LEAST, **keys})


def test_every_problem_is_named_at_once() -> None:
    found = refusal({"campaign": "c", "modle": "m", "shard_size": 0, "sampling": {"top_p": 2}})
    for part in ("input is missing", "did you mean model?", "shard_size: ", "(found 0)", "sampling.top_p: "):
        assert part in found


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (None, "a campaign is a mapping of keys, found NoneType"),
    "a list": ([LEAST], "found list"),
    "no name": ({**LEAST, "campaign": ""}, "campaign: "),
    "a name with a slash": ({**LEAST, "campaign": "a/b"}, "campaign: "),
    "a name that climbs": ({**LEAST, "campaign": ".."}, "campaign: "),
    "no input": ({**LEAST, "input": []}, "input: "),
    "no model": ({"campaign": "c", "input": ["x"]}, "model is missing"),
    "documents without prompt": ({**LEAST, "documents": {}}, "documents and prompt go together"),
    "prompt without documents": ({**LEAST, "prompt": "p"}, "documents and prompt go together"),
    "labels and schema": ({**LEAST, "answer": {"labels": ["a"], "schema": "s"}}, "give either labels or schema"),
    "neither labels nor schema": ({**LEAST, "answer": {}}, "give either labels or schema"),
    "no labels": ({**LEAST, "answer": {"labels": []}}, "labels must be a list of different, non-empty words"),
    "a label twice": ({**LEAST, "answer": {"labels": ["a", "a"]}}, "labels must be a list of different"),
    "a blank label": ({**LEAST, "answer": {"labels": ["a", " "]}}, "labels must be a list of different"),
    "labels that YAML reads as truth": ({**LEAST, "answer": {"labels": [True, False]}}, "answer.labels.0: "),
    "gold without labels": ({**DOCUMENTS, "gold": {"column": "label"}}, "gold needs answer.labels"),
    "gold that is not kept": ({**DOCUMENTS, "gold": {"column": "x"}}, "must be named in documents.keep"),
    "a key without url": ({**LEAST, "endpoint": {"api_key_env": "K"}}, "belong to url"),
    "two keys": (
        {**LEAST, "endpoint": {"url": "http://x/v1", "api_key_env": "K", "api_key_file": "f"}},
        "give api_key_env or api_key_file, not both",
    ),
    "a url without scheme": ({**LEAST, "endpoint": {"url": "x:8000"}}, "url must start with http:// or https://"),
    "a share above one": ({**LEAST, "limits": {"max_error_share": 1.1}}, "limits.max_error_share: "),
    "a text for a number": ({**LEAST, "shard_size": "many"}, "(found 'many')"),
    "a text for a mapping": ({**LEAST, "sampling": "greedy"}, "sampling: "),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_no_campaign(data: Any, message: str) -> None:
    assert message in refusal(data)


def test_an_attached_endpoint_needs_no_model_for_requests() -> None:
    attached = {"campaign": "c", "input": ["x"], "endpoint": {"url": "http://x/v1"}}
    assert parse_campaign(attached, "c.yaml").model is None
    assert "model is missing" in refusal({**attached, "documents": {}, "prompt": "p"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"campaign: [", "is not YAML"),
        (b"campaign: \xff", "is not YAML"),
        (b"", "found NoneType"),
        (b"a: 1\n", "unknown key a"),
    ],
)
def test_files_that_are_no_campaign(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text)
    with pytest.raises(GristmillError, match=message) as caught:
        load_campaign(path)
    assert caught.value.where == str(path)
    with pytest.raises(GristmillError, match="cannot read the campaign file"):
        load_campaign(tmp_path / "none.yaml")


# -- what is written about the keys -----------------------------------------------------------------------------------


def keys(model: type[BaseModel] = Campaign, prefix: str = "") -> set[str]:
    found = set()
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        found.add(path)
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= keys(kind, path + ".")
    return found


def test_every_key_is_in_the_readme() -> None:
    text = (PROJECT / "config" / "README.md").read_text(encoding="utf-8")
    table = text.split("\n## ")[0]
    documented = set(re.findall(r"^\| `([a-z_.]+)` \|", table, re.MULTILINE))
    leaves = {key for key in keys() if not any(other.startswith(f"{key}.") for other in keys())}
    assert documented - keys() == set()
    assert leaves - documented == set()


def test_every_key_is_described() -> None:
    schema = json.loads(json_schema())
    for part in (schema, *schema["$defs"].values()):
        for name, entry in part["properties"].items():
            shown = {**schema["$defs"].get(entry.get("$ref", "").split("/")[-1], {}), **entry}
            assert shown.get("description"), name


def test_planned_keys_are_not_here_yet() -> None:
    assert not PLANNED & keys()


def test_the_json_schema_is_that_of_the_model() -> None:
    path = PROJECT / "workflow" / "schemas" / "campaign.schema.json"
    assert path.read_text(encoding="utf-8") == json_schema(), (
        f"the model changed; run: gristmill schema > {path.relative_to(PROJECT)}"
    )


@pytest.mark.parametrize("name", ["config.yaml", *(f"campaigns/{p.name}" for p in PROJECT.glob("config/campaigns/*"))])
def test_campaigns_of_the_project_are_valid(name: str) -> None:
    assert load_campaign(PROJECT / "config" / name).input
