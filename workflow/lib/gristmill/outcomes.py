"""What a response means: trouble that passes, trouble with the endpoint, or a row's outcome.

Pure functions over status, headers and body. Every input row ends as `ok`, `invalid` or `error`; transient trouble
is never an outcome.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jsonschema
import orjson

from gristmill.errors import GristmillError

Outcome = Literal["ok", "invalid", "error"]


@dataclass(frozen=True)
class Final:
    """The response ends the request: an answer, or a refusal of this very request."""

    answered: bool
    code: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Transient:
    """Trouble that passes.

    busy: the endpoint asks to wait. retry_after: seconds that it asked for. timed_out: there was no response in time.
    unsent: it did not reach the endpoint.
    """

    reason: str
    busy: bool = False
    retry_after: float | None = None
    timed_out: bool = False
    unsent: bool = False


@dataclass(frozen=True)
class Fatal:
    """Trouble that every request will have: a wrong key, a wrong path."""

    reason: str


Verdict = Final | Transient | Fatal

_TOO_LONG = re.compile(
    r"maximum context length|exceed_context_size|context size|context_length_exceeded|input_tokens|too long",
    re.I,
)


def classify(status: int, body: str, headers: Mapping[str, str]) -> Verdict:
    """What an HTTP response means. `headers` is case-insensitive."""
    return _judge(status, parse_json(body), body, headers)


def _judge(status: int, data: Any, body: str, headers: Mapping[str, str]) -> Verdict:
    if status == 200:
        return _judge_success(data, body)
    reason = f"HTTP {status}: {_message(data, body)}"
    if status in (401, 403):
        return Fatal(f"the endpoint refused the key ({reason})")
    if status == 501:
        return Final(False, "rejected", reason)
    if status in (408, 409, 425, 429) or status >= 500:
        return Transient(reason, busy=status in (429, 503), retry_after=_retry_after(headers))
    if status < 400:
        return Fatal(f"the endpoint redirects ({reason})")
    if status == 405 or (status == 404 and not (isinstance(data, dict) and "error" in data)):
        return Fatal(f"the endpoint has no such route ({reason})")
    return Final(False, *_refusal(status, data, body))


def _judge_success(data: Any, body: str) -> Verdict:
    if not isinstance(data, dict):
        return Transient(f"HTTP 200 with a body that is no JSON object: {body[:200]!r}")
    error = data.get("error")
    if error:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and 400 <= code < 500 and code not in (401, 403, 408, 409, 425, 429):
            return Final(False, *_refusal(code, data, body))
        return Transient(f"HTTP 200 with an error in its body: {_message(data, body)}")
    found = data.get("choices") or data.get("data") or data.get("output")
    if not found or not isinstance(found, list):
        return Transient(f"HTTP 200 without an answer: {body[:200]!r}")
    return Final(True)


def _refusal(status: int, data: Any, body: str) -> tuple[str, str]:
    error = data.get("error") if isinstance(data, dict) else None
    message = _message(data, body)
    signs = json.dumps(error) if error else body
    if status == 404:
        return "model_not_found", message
    return ("too_long" if status == 413 or _TOO_LONG.search(signs) else "rejected"), message


def _message(data: Any, body: str) -> str:
    if isinstance(data, dict):
        error = data.get("error", data.get("detail"))
        if isinstance(error, dict):
            return str(error.get("message", error))[:1000]
        if error is not None:
            return str(error)[:1000]
    return body[:200]


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < 3600 else None


def parse_json(text: str) -> Any:
    """The value of a JSON text with U+FFFD for lone surrogates, or None when it is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        value = json.loads(text)
        return json.loads(
            json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    except (ValueError, RecursionError):
        return None


def json_text(value: Any) -> str | None:
    """A parsed value as JSON text, None for one nested so deeply that it can be read but not written."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return None


# -- what an answer must be ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AnswerCheck:
    """What an answer must be: one of `labels`, or valid under `schema`, or any text (both None)."""

    labels: tuple[str, ...] | None = None
    schema: dict[str, Any] | None = None
    _validate: Callable[[Any], str | None] = field(init=False, repr=False, compare=False, default=lambda value: None)

    def __post_init__(self) -> None:
        if self.schema is not None:
            object.__setattr__(self, "_validate", _validator(self.schema))


def _validator(schema: dict[str, Any]) -> Callable[[Any], str | None]:
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise GristmillError(f"answer.schema is not a JSON Schema: {error.message}", help="correct the file") from error
    validator = kind(schema)

    def validate(value: Any) -> str | None:
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except RecursionError:
            return "$: nested too deeply"
        return None if error is None else f"{error.json_path}: {error.message}"

    return validate


@dataclass(slots=True)
class Answer:
    """A row's outcome and what was read from the response."""

    status: Outcome
    answer: str | None = None
    label: str | None = None
    values: dict[str, Any] | None = None
    reasoning: str | None = None
    finish_reason: str | None = None
    error_code: str | None = None
    error_message: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str | None = None


def interpret(status: int, body: str, route: str, check: AnswerCheck) -> Answer:
    """Read a response that `classify` called final: the answer, its parts, and whether it passes the check.

    Status 0 is none of an endpoint's: `body` has an error object by which the client itself ended the request.
    """
    data = parse_json(body)
    if status == 0 and isinstance(data, dict) and isinstance(error := data.get("error"), dict):
        return Answer("error", error_code=_text(error.get("code")), error_message=_text(error.get("message")))
    verdict = _judge(status, data, body, {})
    if not isinstance(verdict, Final) or not verdict.answered:
        code, message = (verdict.code, verdict.message) if isinstance(verdict, Final) else ("rejected", verdict.reason)
        return Answer("error", error_code=code, error_message=message)
    result = Answer("ok", model=_text(data.get("model")))
    _read_usage(data.get("usage"), result)
    if route == "/embeddings":
        first = data["data"][0] if isinstance(data.get("data"), list) and data["data"] else {}
        vector = first.get("embedding") if isinstance(first, dict) else None
        if not vector:
            return _failed(result, "empty", "the response has no embedding")
        result.answer = vector if isinstance(vector, str) else json_text(vector)
        return result
    _READERS.get(route, _read_chat)(data, result)
    return _checked(result, check)


def _read_chat(data: dict[str, Any], result: Answer) -> None:
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message")
    message = message if isinstance(message, dict) else {}
    result.finish_reason = _text(choice.get("finish_reason"))
    content = _text(message.get("content"))
    calls = message.get("tool_calls")
    if content is None and calls:
        content = json_text(calls)
    reasoning = _text(message.get("reasoning_content")) or _text(message.get("reasoning"))
    result.answer, result.reasoning = _without_thinking(content, reasoning)


def _read_completion(data: dict[str, Any], result: Answer) -> None:
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    result.finish_reason = _text(choice.get("finish_reason"))
    result.answer, result.reasoning = _without_thinking(_text(choice.get("text")), None)


def _read_response(data: dict[str, Any], result: Answer) -> None:
    texts: list[str] = []
    thoughts: list[str] = []
    output = data.get("output")
    for item in output if isinstance(output, list) else []:
        if not isinstance(item, dict):
            continue
        content = item.get("content")
        parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
        found = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        (thoughts if item.get("type") == "reasoning" else texts).extend(found)
    incomplete = data.get("incomplete_details")
    reason = incomplete.get("reason") if isinstance(incomplete, dict) else None
    cut = reason == "max_output_tokens"
    result.finish_reason = "length" if cut else _text(reason) or ("stop" if data.get("status") == "completed" else None)
    result.answer, result.reasoning = _without_thinking("".join(texts) or None, "".join(thoughts) or None)


_READERS: dict[str, Callable[[dict[str, Any], Answer], None]] = {
    "/chat/completions": _read_chat,
    "/completions": _read_completion,
    "/responses": _read_response,
}


def _without_thinking(content: str | None, reasoning: str | None) -> tuple[str | None, str | None]:
    """Split a leading <think> part from an answer.

    Some templates write the opening tag themselves, so that it is missing; then a closing tag counts only beside a
    line's end, for an answer may quote one.
    """
    if content is None or reasoning is not None:
        return content, reasoning
    opened = content.lstrip().startswith("<think>")
    before, tag, after = content.partition("</think>")
    if opened and not tag:
        return "", content.lstrip().removeprefix("<think>").strip()
    if tag and (opened or before.endswith("\n") or after.startswith("\n")):
        return after.lstrip(), before.lstrip().removeprefix("<think>").strip()
    return content, None


def _read_usage(usage: Any, result: Answer) -> None:
    if isinstance(usage, dict):
        result.prompt_tokens = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
        result.completion_tokens = _count(usage.get("completion_tokens", usage.get("output_tokens")))


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _failed(result: Answer, code: str, message: str) -> Answer:
    result.status, result.error_code, result.error_message = "invalid", code, message
    return result


def _checked(result: Answer, check: AnswerCheck) -> Answer:
    text = (result.answer or "").strip()
    if not text:
        return _failed(result, "empty", f"the answer is empty (finish_reason {result.finish_reason})")
    if result.finish_reason == "content_filter":
        return _failed(result, "content_filter", "the endpoint's content filter cut the answer")
    cut = result.finish_reason == "length"
    if check.labels is not None:
        result.label = find_label(text, check.labels)
        if result.label is not None and not (cut and _may_go_on(text, result.label, check.labels)):
            return result
        if cut:
            result.label = None
            return _failed(result, "truncated", "cut at max_tokens before it was a label")
        return _failed(result, "not_in_labels", f"{text[:200]!r} is not one of: {', '.join(check.labels)}")
    if check.schema is not None:
        return _against_schema(result, text, check, cut)
    return _failed(result, "truncated", "cut at max_tokens") if cut else result


def _may_go_on(text: str, label: str, labels: tuple[str, ...]) -> bool:
    """Whether an answer cut at max_tokens may be the beginning of a longer label."""
    return not text.endswith('"') and any(other != label and other.startswith(label) for other in labels)


def find_label(text: str, labels: tuple[str, ...]) -> str | None:
    """The label that an answer is: exactly, as a JSON string, or but for case, quotes and a final full stop."""
    if text in labels:
        return text
    if text.startswith('"'):
        value = parse_json(text)
        if isinstance(value, str):
            text = value.strip()
            if text in labels:
                return text
    plain = text.strip("\"'`*. \n").casefold()
    same = [label for label in labels if label.casefold() == plain]
    return same[0] if len(same) == 1 else None


def _against_schema(result: Answer, text: str, check: AnswerCheck, cut: bool) -> Answer:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if cut:
            return _failed(result, "truncated", "cut at max_tokens before the JSON was whole")
        return _failed(result, "not_json", f"the answer is not JSON: {error}")
    problem = check._validate(value)
    if problem is not None:
        return _failed(result, "schema_mismatch", problem[:1000])
    if isinstance(value, dict):
        result.values = value
        result.label = _text(value.get("label"))
    return result
