"""Requests: made from rows, checked, and given the fingerprint under which their answers are kept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gristmill.campaign import Campaign, Documents
from gristmill.errors import GristmillError
from gristmill.sources import Row, RowError, Source, read_text

ROUTES = {
    "/v1/chat/completions": "/chat/completions",
    "/v1/completions": "/completions",
    "/v1/embeddings": "/embeddings",
    "/v1/responses": "/responses",
}
_NEEDED = {
    "/chat/completions": "messages",
    "/completions": "prompt",
    "/embeddings": "input",
    "/responses": "input",
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# An engine makes a model write properties in the order of their schema, so there the order of keys is of the request.
_ORDERED = ("response_format", "structured_outputs", "tools", "functions", "text")
_LONG_INTEGER = re.compile(rb"[:\[,]\s*-?\d{19,}\s*[,\]}]")


class Request(NamedTuple):
    """One row of a shard: a request that can be sent, or why it cannot be (then route and body are empty)."""

    id: str
    row: int
    fingerprint: str | None
    route: str
    body: bytes
    model: str | None
    keep: dict[str, str | None]
    error: RowError | None = None


@dataclass(frozen=True)
class Recipe:
    """Everything besides a row that decides what its request is.

    names: model names that the endpoint answers to, None when any may be meant (an attached endpoint).
    """

    documents: Documents | None
    template: str | None
    labels: tuple[str, ...] | None
    schema: dict[str, Any] | None
    model: str | None
    names: tuple[str, ...] | None
    defaults: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """A digest that changes when requests may become other ones."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).hexdigest()


def recipe(campaign: Campaign, names: tuple[str, ...] | None, template: str | None, schema: Any) -> Recipe:
    """The recipe of a campaign; `template` and `schema` are the contents of the files it names."""
    return Recipe(
        documents=campaign.documents,
        template=template,
        labels=campaign.answer.labels if campaign.answer else None,
        schema=schema,
        model=campaign.model,
        names=names,
        defaults=campaign.sampling.fields(),
    )


def is_repeatable(request: Request) -> bool:
    """Whether sending it again would give the same answer: greedy or seeded sampling, or an embedding."""
    if request.route == "/embeddings":
        return True
    body: dict[str, Any] = orjson.loads(request.body)
    return body.get("temperature") == 0 or isinstance(body.get("seed"), int)


def fingerprint(route: str, canonical: bytes) -> str:
    """128-bit hash (32 hex digits) of a request: its route and its canonical JSON, never an address or an id."""
    return hashlib.blake2b(route.encode() + b"\n" + canonical, digest_size=16).hexdigest()


def request_maker(recipe: Recipe, source_path: str) -> Callable[[Row], Request]:
    """A function that turns rows of one source into requests. Raises GristmillError for a broken template."""
    make = _document_maker(recipe) if recipe.documents is not None else _request_parser(recipe)

    def maker(row: Row) -> Request:
        fallback = f"{source_path}:{row.number}"
        if row.error is not None:
            return _bad(fallback, row.number, row.error)
        try:
            return make(row)
        except _BadRow as bad:
            return _bad(bad.id or fallback, row.number, bad.error, bad.keep)

    return maker


def row_id(documents: Documents | None, source: Source) -> Callable[[Row], str]:
    """A function that gives the id that `request_maker` gives a row, without making the request."""
    replace = documents is not None and documents.invalid_text == "replace"

    def parsed(row: Row) -> str:
        assert row.payload is not None
        if documents is None:
            assert isinstance(row.payload, bytes)
            data = _parse_object(row.payload)
            return _checked_id(data["custom_id"] if "custom_id" in data else data.get("id"))
        return _document_id(_columns(row, documents, replace, read=False), documents)

    def id_of(row: Row) -> str:
        fallback = f"{source.path}:{row.number}"
        try:
            return fallback if row.error is not None else parsed(row)
        except _BadRow as bad:
            return _shown(bad.id or fallback)

    return id_of


class _BadRow(Exception):
    def __init__(
        self, code: str, message: str, id: str | None = None, keep: dict[str, str | None] | None = None
    ) -> None:
        self.error, self.id, self.keep = RowError(code, message), id, keep or {}


def _bad(id: str, row: int, error: RowError, keep: dict[str, str | None] | None = None) -> Request:
    # Id and message may hold text that is not valid Unicode: it is shown, never lost.
    shown = RowError(error.code, _shown(error.message))
    return Request(_shown(id), row, None, "", b"", None, keep or {}, shown)


def _shown(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# -- requests from request files ------------------------------------------------------------------------------------


def _request_parser(recipe: Recipe) -> Callable[[Row], Request]:
    def parse(row: Row) -> Request:
        assert isinstance(row.payload, bytes)
        data = _parse_object(row.payload)
        if "custom_id" in data:
            id, route, body = _batch_request(data)
        else:
            id = _checked_id(data.pop("id", None))
            route, body = _plain_route(data, id), data
        body = _completed(recipe, route, body, id)
        _check_body(route, body, id)
        return _finished(id, row.number, route, body, {}, row.payload)

    return parse


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise _explained(text, error) from error
    if not isinstance(data, dict):
        raise _BadRow("malformed_json", f"a JSON object was expected, found {type(data).__name__}")
    return data


def _explained(text: bytes, error: orjson.JSONDecodeError) -> _BadRow:
    """Why a line is no JSON, and its id where one can still be made out."""
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as wrong:
        return _BadRow("invalid_utf8", f"byte {wrong.start} of the line is not UTF-8: 0x{text[wrong.start]:02x}")
    id = None
    try:
        data = json.loads(decoded)
    except ValueError:
        if "\0" in decoded:
            return _BadRow("nul_byte", "the line has a NUL byte; write it as \\u0000 inside a string")
        return _BadRow("malformed_json", f"not JSON: {error}")
    except RecursionError:
        return _BadRow("malformed_json", "the JSON is nested too deeply")
    if isinstance(data, dict) and isinstance(given := data.get("custom_id", data.get("id")), str):
        id = _shown(given) or None
    if "surrogate" in str(error):  # orjson's words; tests/test_requests.py holds it to them
        return _BadRow("lone_surrogate", f"a \\uD800–\\uDFFF escape stands alone: {error}", id)
    if "infinity" in str(error) or "NaN" in decoded or "Infinity" in decoded:
        return _BadRow("number_out_of_range", f"a number that JSON does not have: {error}", id)
    return _BadRow("malformed_json", f"not JSON: {error}", id)


def _checked_id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        what = "is missing" if value is None else f"must be a text or an integer, found {repr(value)[:100]}"
        raise _BadRow("missing_id" if value is None else "bad_id", f"id {what}")
    return str(value)


def _batch_request(data: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    id = _checked_id(data["custom_id"])
    if data.get("method", "POST") != "POST":
        raise _BadRow("malformed_request", f"method must be POST, found {data['method']!r}", id)
    route = ROUTES.get(str(data.get("url", "/v1/chat/completions")))
    if route is None:
        raise _BadRow("unsupported_url", f"url must be one of {', '.join(ROUTES)}, found {data['url']!r}", id)
    if not isinstance(data.get("body"), dict):
        raise _BadRow("malformed_request", "body must be an object", id)
    return id, route, data["body"]


def _plain_route(data: dict[str, Any], id: str) -> str:
    if "messages" in data:
        return "/chat/completions"
    if "prompt" in data:
        return "/completions"
    raise _BadRow("malformed_request", "the request has neither messages nor prompt", id)


def _completed(recipe: Recipe, route: str, body: dict[str, Any], id: str) -> dict[str, Any]:
    """The body with the campaign's model and sampling where it has none of its own."""
    model = body.get("model")
    if model is None:
        if recipe.model is None:
            raise _BadRow("missing_model", "neither the request nor the campaign names a model", id)
        body["model"] = recipe.model
    elif recipe.names is not None and model not in recipe.names:
        known = ", ".join(recipe.names)
        raise _BadRow("wrong_model", f"the request names {model!r}; this campaign serves {known}", id)
    if route != "/embeddings":
        for key, value in recipe.defaults.items():
            body.setdefault(key, value)
        if route == "/chat/completions" and "response_format" not in body:
            body.update(_answer_format(recipe))
    return body


def _check_body(route: str, body: dict[str, Any], id: str) -> None:
    """The mistakes that an engine would answer with 200, or that would break the stream of requests."""
    needed = _NEEDED[route]
    if needed not in body:
        raise _BadRow("malformed_request", f"{needed} is missing", id)
    if body.get("stream"):
        raise _BadRow("unsupported_parameter", "stream must be left out: answers are read whole", id)
    if route != "/chat/completions":
        return
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise _BadRow("malformed_request", "messages must be a list with at least one message", id)
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise _BadRow("malformed_request", f"messages[{place}] must be an object", id)
        if message.get("role") not in _ROLES:
            raise _BadRow("bad_role", f"messages[{place}] has role {message.get('role')!r}", id)
        if message.get("content") is None and not message.get("tool_calls"):
            raise _BadRow("malformed_request", f"messages[{place}] has no content", id)


def _finished(id: str, row: int, route: str, body: dict[str, Any], keep: dict[str, str | None], text: bytes) -> Request:
    try:
        text_sent = orjson.dumps(body)
        canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise _BadRow("malformed_request", f"the request cannot be sent: {error}", id, keep) from error
    if _has_huge_float(body) and _has_long_integer(text):
        raise _BadRow("number_out_of_range", "an integer is beyond 64 bits and would not arrive exactly", id, keep)
    if ordered := [body[key] for key in _ORDERED if key in body]:
        canonical += orjson.dumps(ordered)
    return Request(id, row, fingerprint(route, canonical), route, text_sent, str(body["model"]), keep)


def _has_huge_float(value: object) -> bool:
    """Whether a number is so large that it may be an integer that orjson rounded to a float."""
    kind = type(value)
    if kind is float:
        return abs(value) >= 2**63  # type: ignore[arg-type]
    if kind is dict:
        value = value.values()  # type: ignore[attr-defined]
    elif kind is not list:
        return False
    for item in value:  # type: ignore[attr-defined]  # noqa: SIM110  # any() takes twice as long
        if type(item) is not str and _has_huge_float(item):
            return True
    return False


def _has_long_integer(text: bytes) -> bool:
    """Whether a JSON text has an integer beyond 64 bits."""
    if not _LONG_INTEGER.search(text):
        return False
    digits: list[str] = []
    json.loads(text.decode("utf-8", "replace"), parse_int=digits.append)
    return not all(-(2**63) <= int(number) < 2**64 for number in digits)


# -- requests from documents ----------------------------------------------------------------------------------------


def _document_maker(recipe: Recipe) -> Callable[[Row], Request]:
    documents = recipe.documents
    assert documents is not None and recipe.template is not None
    render = _template(recipe.template).render
    replace = documents.invalid_text == "replace"
    answer_format = _answer_format(recipe)
    labels = list(recipe.labels or ())

    def make(row: Row) -> Request:
        columns = _columns(row, documents, replace)
        id = _document_id(columns, documents)
        keep = {name: _as_text(columns.get(name), id) for name in documents.keep}
        text = columns.get(documents.text)
        if documents.text not in columns:
            raise _BadRow("missing_text", f"there is no column {documents.text!r}", id, keep)
        if text is None or (isinstance(text, str) and not text.strip()):
            raise _BadRow("empty_document", f"column {documents.text!r} is empty", id, keep)
        if not isinstance(text, str):
            raise _BadRow("not_text", f"column {documents.text!r} holds {type(text).__name__}, not text", id, keep)
        if isinstance(row.payload, bytes) and _has_huge_float(columns) and _has_long_integer(row.payload):
            raise _BadRow("number_out_of_range", "an integer is beyond 64 bits and would not arrive exactly", id, keep)
        names = {**columns, "id": id, "text": text, "labels": labels}
        try:
            prompt = render(names)
        except Exception as error:  # a template can raise anything; it is this row's trouble
            raise _BadRow("template_error", f"the prompt template: {error}", id, keep) from error
        body = {
            **recipe.defaults,
            **answer_format,
            "model": recipe.model,
            "messages": [{"role": "user", "content": prompt}],
        }
        return _finished(id, row.number, "/chat/completions", body, keep, b"")

    return make


def _template(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=False, autoescape=False
    )
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise GristmillError(f"the prompt template: {error.message}", where=f"prompt, line {error.lineno}") from error


def _document_id(columns: dict[str, Any], documents: Documents) -> str:
    if documents.id not in columns:
        raise _BadRow("missing_id", f"there is no column {documents.id!r}")
    return _checked_id(_scalar_id(columns[documents.id]))


def _columns(row: Row, documents: Documents, replace: bool, read: bool = True) -> dict[str, Any]:
    """The columns of a row as valid Unicode, or _BadRow. read: whether a text file of a folder is read."""
    if isinstance(row.payload, bytes):
        return _parse_document(row.payload, replace)
    assert row.payload is not None
    columns = dict(row.payload)
    path = columns.pop("path", None) if isinstance(columns.get("path"), Path) else None
    if path is not None:
        columns["path"] = path.as_posix()
        content = read_text(path) if read else b""
        if isinstance(content, RowError):
            raise _BadRow(content.code, content.message, columns["id"])
        columns = {
            documents.id: columns["id"],
            **columns,
            documents.text: content.decode("utf-8", "surrogateescape"),
        }
    for name, value in columns.items():
        if isinstance(value, bytes):
            columns[name] = value = value.decode("utf-8", "surrogateescape")
        if isinstance(value, str) and not _is_unicode(value):
            if not replace:
                message = f"column {name!r} is not UTF-8; documents.invalid_text: replace reads it all the same"
                given = columns.get(documents.id)
                raise _BadRow("invalid_utf8", message, _shown(given) if isinstance(given, str) and given else None)
            columns[name] = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return columns


def _parse_document(text: bytes, replace: bool) -> dict[str, Any]:
    try:
        return _parse_object(text)
    except _BadRow as bad:
        if not replace or bad.error.code not in ("invalid_utf8", "lone_surrogate"):
            raise
        try:
            repaired = _repaired(json.loads(text.decode("utf-8", "replace")))
        except (ValueError, RecursionError) as error:
            raise _BadRow("malformed_json", f"not JSON: {error}") from error
        return _parse_object(json.dumps(repaired, ensure_ascii=False).encode())


def _repaired(value: Any) -> Any:
    """The value with U+FFFD for every lone surrogate."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_repaired(item) for item in value]
    if isinstance(value, dict):
        return {_repaired(key): _repaired(item) for key, item in value.items()}
    return value


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _scalar_id(value: object) -> object:
    if value is None or isinstance(value, str | int):
        return value
    return value if isinstance(value, bool | float | list | dict) else str(value)


def _as_text(value: object, id: str) -> str | None:
    """A kept column as text: strings as they are, anything else as JSON, what JSON does not have by str()."""
    if value is None or isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONEncodeError as error:
        raise _BadRow("malformed_json", f"a column of documents.keep: {error}", id) from error


def _answer_format(recipe: Recipe) -> dict[str, Any]:
    """The response_format that holds an answer to the labels or the schema: the form that vLLM and llama.cpp share."""
    if recipe.labels is not None:
        schema: dict[str, Any] = {"type": "string", "enum": list(recipe.labels)}
        name = "label"
    elif recipe.schema is not None:
        schema, name = recipe.schema, "answer"
    else:
        return {}
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": name, "schema": schema, "strict": True},
        }
    }
