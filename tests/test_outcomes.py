"""What a response means: for the request, for the endpoint, and as an answer."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import GristmillError
from gristmill.outcomes import Answer, AnswerCheck, Fatal, Final, Transient, classify, find_label, interpret, parse_json

ANY = AnswerCheck()


def error(message: str, code: int, kind: str = "BadRequestError", param: str | None = None) -> str:
    """An error as vLLM 0.32 words it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def chat(content: Any = "hello", finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23},
    }


TOO_LONG = (
    "This model's maximum context length is 8192 tokens. However, you requested 8 output tokens and your prompt "
    "contains at least 8185 input tokens, for a total of at least 8193 tokens. Please reduce the length of the input "
    "prompt or the number of requested output tokens."
)
LLAMA_TOO_LONG = json.dumps(
    {
        "error": {
            "code": 400,
            "message": "request (9001 tokens) exceeds the available context size (4096 tokens), try increasing it",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 9001,
            "n_ctx": 4096,
        }
    }
)
REFUSALS: dict[str, tuple[int, str, str, str]] = {
    "prompt too long": (400, error(TOO_LONG, 400, param="input_tokens"), "too_long", "maximum context length"),
    "prompt too long, llama.cpp": (400, LLAMA_TOO_LONG, "too_long", "exceeds the available context size"),
    "max_tokens over the context": (
        400,
        error("max_tokens=9000 cannot be greater than max_model_len=8192", 400, param="max_tokens"),
        "rejected",
        "max_tokens=9000",
    ),
    "max_tokens 0": (400, error("max_tokens must be at least 1, got 0.", 400), "rejected", "at least 1"),
    "temperature": (400, error("temperature must be non-negative, got -1.0.", 400), "rejected", "non-negative"),
    "no messages": (400, error("[{'type': 'missing', 'loc': ('body', 'messages')}]", 400), "rejected", "missing"),
    "broken JSON": (400, error("[{'type': 'json_invalid'}]", 400), "rejected", "json_invalid"),
    "a bad schema": (400, error("Grammar error: Unimplemented keys", 400), "rejected", "Grammar error"),
    "unknown model": (
        404,
        error("The model `x` does not exist.", 404, "NotFoundError", "model"),
        "model_not_found",
        "does not exist",
    ),
    "error null": (400, '{"error": null}', "rejected", "null"),
    "no body": (400, "", "rejected", ""),
    "HTML": (400, "<html>Bad Request</html>", "rejected", "Bad Request"),
    "a body too large": (413, "<html>Request Entity Too Large</html>", "too_long", "Too Large"),
    "unprocessable": (422, '{"detail": [{"loc": ["body"], "msg": "bad"}]}', "rejected", "bad"),
    "200 with a refusal": (200, error(TOO_LONG, 400), "too_long", "maximum context length"),
    "200 with another refusal": (200, error("bad", 422), "rejected", "bad"),
}


@pytest.mark.parametrize(("status", "body", "code", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_end_a_request(status: int, body: str, code: str, message: str) -> None:
    verdict = classify(status, body, {})
    assert isinstance(verdict, Final)
    assert (verdict.answered, verdict.code) == (False, code)
    assert message in (verdict.message or "")
    answer = interpret(status, body, "/chat/completions", ANY)
    assert (answer.status, answer.error_code, answer.error_message) == ("error", code, verdict.message)


BUSY = [429, 503]
TRANSIENT: dict[str, tuple[int, str, str]] = {
    **{str(status): (status, "{}", f"HTTP {status}") for status in (408, 409, 425, 429, 500, 502, 503, 504, 529, 599)},
    "draining": (500, error("cannot schedule new futures after shutdown", 500), "cannot schedule new futures"),
    "a dead core": (500, error("EngineCore encountered an issue.", 500, "InternalServerError"), "EngineCore"),
    "a loading model": (503, '{"error": {"message": "Loading model", "code": 503}}', "Loading model"),
    "a proxy": (502, "<html>Bad Gateway</html>", "Bad Gateway"),
    "200 with an error": (200, '{"error": {"message": "overloaded"}}', "an error in its body: overloaded"),
    "200 with an error of the server": (200, error("boom", 500), "an error in its body: boom"),
    "200 with a text for an error": (200, '{"error": "boom"}', "an error in its body: boom"),
    "200 with error and choices": (200, json.dumps({**chat(), "error": {"message": "late"}}), "late"),
    "200 with HTML": (200, "<html>Welcome</html>", "no JSON object"),
    "200 with nothing": (200, "", "no JSON object"),
    "200 with half a body": (200, json.dumps(chat())[:80], "no JSON object"),
    "200 with a list": (200, "[1]", "no JSON object"),
    "200 with null": (200, "null", "no JSON object"),
    "200 nested without end": (200, '{"choices":' + "[" * 100_000, "no JSON object"),
    "200 without choices": (200, '{"model": "m"}', "without an answer"),
    "200 with no choice": (200, '{"choices": []}', "without an answer"),
    "200 with a text for choices": (200, '{"choices": "x"}', "without an answer"),
}


@pytest.mark.parametrize(("status", "body", "reason"), TRANSIENT.values(), ids=TRANSIENT.keys())
def test_trouble_that_passes(status: int, body: str, reason: str) -> None:
    verdict = classify(status, body, {})
    assert isinstance(verdict, Transient)
    assert reason in verdict.reason
    assert len(verdict.reason) < 1200
    assert verdict.busy == (status in BUSY)


FATAL: dict[str, tuple[int, str, str]] = {
    "a wrong key": (401, '{"error": "Unauthorized"}', "refused the key (HTTP 401: Unauthorized)"),
    "a wrong key, llama.cpp": (401, error("Invalid API Key", 401, "authentication_error"), "Invalid API Key"),
    "forbidden": (403, "<html>Forbidden</html>", "refused the key"),
    "an unknown path": (404, '{"detail": "Not Found"}', "no such route (HTTP 404: Not Found)"),
    "another server": (404, "<html>404</html>", "no such route"),
    "a wrong method": (405, '{"detail": "Method Not Allowed"}', "no such route"),
    "a redirect": (302, "", "redirects"),
}


@pytest.mark.parametrize(("status", "body", "reason"), FATAL.values(), ids=FATAL.keys())
def test_trouble_that_every_request_has(status: int, body: str, reason: str) -> None:
    verdict = classify(status, body, {})
    assert isinstance(verdict, Fatal)
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("0", 0.0), ("-1", None), ("9999", None), ("nan", None), ("soon", None), ("", None)],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    verdict = classify(429, "{}", httpx2.Headers({"Retry-After": value}))
    assert isinstance(verdict, Transient)
    assert verdict.retry_after == seconds


def test_an_answer_is_final() -> None:
    for body in (chat(), {**chat(), "error": None}, {"data": [{"embedding": [1]}]}, {"output": [{}]}):
        assert classify(200, json.dumps(body), {}) == Final(True)


@given(st.integers(100, 599), st.text(max_size=30) | st.text(st.sampled_from('{}[]":,error1nul'), max_size=30))
def test_every_response_has_a_meaning(status: int, body: str) -> None:
    assert isinstance(classify(status, body, {}), Final | Transient | Fatal)
    assert interpret(status, body, "/chat/completions", ANY).status in ("ok", "invalid", "error")


KEYS = ["choices", "message", "content", "tool_calls", "usage", "prompt_tokens", "data", "embedding", "output", "text"]
KEYS += ["reasoning", "error", "code", "incomplete_details", "finish_reason", "type", "status"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(JSON, st.sampled_from(["/chat/completions", "/completions", "/embeddings", "/responses"]))
def test_no_body_breaks_a_run(body: Any, route: str) -> None:
    answer = interpret(200, json.dumps(body), route, AnswerCheck(labels=("a", "b")))
    assert answer.status in ("ok", "invalid", "error")
    assert (answer.error_code is None) == (answer.status == "ok")
    orjson.dumps(answer)


# -- answers ----------------------------------------------------------------------------------------------------------

SCHEMA = AnswerCheck(
    schema={
        "type": "object",
        "properties": {"label": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0}},
        "required": ["n"],
        "additionalProperties": False,
    }
)
LABELS = AnswerCheck(labels=("spam", "ham", "spam-hard", "Not spam"))


def read(body: dict[str, Any], check: AnswerCheck = ANY, route: str = "/chat/completions") -> Answer:
    return interpret(200, json.dumps(body), route, check)


def test_an_answer_is_read_whole() -> None:
    assert read(chat("hello")) == Answer(
        "ok", answer="hello", finish_reason="stop", prompt_tokens=20, completion_tokens=3, model="m"
    )


CHECKED: dict[str, tuple[dict[str, Any], AnswerCheck, str | None]] = {
    "text": (chat("hello"), ANY, None),
    "cut text": (chat("hello", "length"), ANY, "truncated"),
    "no text": (chat(""), ANY, "empty"),
    "null": (chat(None), ANY, "empty"),
    "blanks": (chat(" \n\t"), ANY, "empty"),
    "a flood of blanks": (chat("\n" * 5000, "length"), ANY, "empty"),
    "filtered": (chat("hel", "content_filter"), ANY, "content_filter"),
    "a choice that is none": ({"choices": ["x"]}, ANY, "empty"),
    "a message that is none": ({"choices": [{"message": "x"}]}, ANY, "empty"),
    "a number for a text": (chat(5), ANY, "empty"),
    "JSON": (chat('{"n": 1}'), SCHEMA, None),
    "JSON between blanks": (chat(' \n{"n": 1}\n\n'), SCHEMA, None),
    "whole JSON, cut in the blanks": (chat('{"n": 1}\n\n\n', "length"), SCHEMA, None),
    "half JSON, cut": (chat('{"n": ', "length"), SCHEMA, "truncated"),
    "half JSON that says stop": (chat('{"n": '), SCHEMA, "not_json"),
    "half JSON, then a flood": (chat('{"n": 1,' + " \n" * 999, "length"), SCHEMA, "truncated"),
    "JSON in a fence": (chat('```json\n{"n": 1}\n```'), SCHEMA, "not_json"),
    "JSON and a remark": (chat('{"n": 1} I hope this helps'), SCHEMA, "not_json"),
    "prose for JSON": (chat("It is one."), SCHEMA, "not_json"),
    "NaN": (chat('{"n": NaN}'), SCHEMA, "not_json"),
    "another type": (chat('{"n": "1"}'), SCHEMA, "schema_mismatch"),
    "out of bounds": (chat('{"n": -1}'), SCHEMA, "schema_mismatch"),
    "a property too many": (chat('{"n": 1, "m": 2}'), SCHEMA, "schema_mismatch"),
    "a property too few": (chat("{}"), SCHEMA, "schema_mismatch"),
    "a list": (chat("[1]"), SCHEMA, "schema_mismatch"),
    "nested 300 deep": (chat('{"n": %s}' % ("[" * 300 + "]" * 300)), SCHEMA, "schema_mismatch"),
    "nested 1000 deep": (chat("[" * 1000 + "]" * 1000), SCHEMA, "schema_mismatch"),
    "nested beyond parsing": (chat("[" * 9999 + "]" * 9999), SCHEMA, "not_json"),
    "a label": (chat("spam-hard"), LABELS, None),
    "another label": (chat("eggs"), LABELS, "not_in_labels"),
    "two labels": (chat("spam ham"), LABELS, "not_in_labels"),
    "a label and a remark": (chat("spam, because"), LABELS, "not_in_labels"),
    "a cut label that may go on": (chat("spam", "length"), LABELS, "truncated"),
    "a cut label that is closed": (chat('"spam"', "length"), LABELS, None),
    "a cut label that cannot go on": (chat("ham", "length"), LABELS, None),
    "a cut remark": (chat("The label is", "length"), LABELS, "truncated"),
    "a label after thoughts": (chat("<think>ham? no</think>\nspam"), LABELS, None),
    "thoughts alone": (chat("<think>ham? no", "length"), LABELS, "empty"),
}


@pytest.mark.parametrize(("body", "check", "code"), CHECKED.values(), ids=CHECKED.keys())
def test_answers_are_checked(body: dict[str, Any], check: AnswerCheck, code: str | None) -> None:
    answer = read(body, check)
    assert (answer.status, answer.error_code) == ("ok" if code is None else "invalid", code)
    assert (answer.error_message is None) == (code is None)
    assert len(answer.error_message or "") < 1100


def test_an_invalid_answer_keeps_its_text() -> None:
    answer = read(chat('{"n": -1}', reasoning="hm"), SCHEMA)
    assert (answer.answer, answer.values, answer.label, answer.reasoning) == ('{"n": -1}', None, None, "hm")
    assert "$.n: -1 is less than the minimum of 0" in (answer.error_message or "")
    cut = read(chat("spam", "length"), LABELS)
    assert (cut.answer, cut.label) == ("spam", None)


def test_properties_and_label_of_an_answer() -> None:
    answer = read(chat('{"n": 5, "label": "b"}'), SCHEMA)
    assert (answer.values, answer.label) == ({"n": 5, "label": "b"}, "b")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("spam", "spam"),
        ("SPAM", "spam"),
        (" Ham.\n", "ham"),
        ('"ham"', "ham"),
        ('" ham "', "ham"),
        ("'ham'", "ham"),
        ("**Ham**", "ham"),
        ("`ham`", "ham"),
        ("not spam", "Not spam"),
        ('"h\\u0061m"', "ham"),
        ("hamster", None),
        ("ha", None),
        ("ß", "ß"),
        ("", None),
        ('"', None),
    ],
)
def test_labels(text: str, label: str | None) -> None:
    assert find_label(text.strip(), ("spam", "ham", "Not spam", "ß")) == label


def test_labels_that_differ_by_case_alone_are_told_apart() -> None:
    labels = ("US", "us")
    assert [find_label(text, labels) for text in ("US", "us", "Us", '"us"', "us.")] == ["US", "us", None, "us", None]


THOUGHTS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "none": (chat("a"), "a", None),
    "reasoning_content": (chat("a", reasoning_content="t"), "a", "t"),
    "reasoning": (chat("a", reasoning="t"), "a", "t"),
    "an empty field": (chat("a", reasoning_content="", reasoning=None), "a", None),
    "in the content": (chat("<think>\nt\n</think>\n\na"), "a", "t"),
    "after blanks": (chat("\n\n<think>t</think>a"), "a", "t"),
    "empty thoughts": (chat("<think>\n\n</think>\n\na"), "a", ""),
    "without the opening": (chat("t\nt\n</think>\n\na"), "a", "t\nt"),
    "not closed": (chat("<think>t"), "", "t"),
    "quoted by the answer": (chat("Use </think> to close."), "Use </think> to close.", None),
    "quoted in JSON": (chat('{"a": "x</think>y"}'), '{"a": "x</think>y"}', None),
    "quoted after thoughts": (chat("<think>t</think>Use </think>"), "Use </think>", "t"),
    "a tag later": (chat("Use <think> first"), "Use <think> first", None),
}


@pytest.mark.parametrize(("body", "text", "thoughts"), THOUGHTS.values(), ids=THOUGHTS.keys())
def test_thoughts_are_no_part_of_an_answer(body: dict[str, Any], text: str, thoughts: str | None) -> None:
    answer = read(body)
    assert (answer.answer, answer.reasoning) == (text, thoughts)


def test_tool_calls_are_an_answer() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    assert json.loads(read(chat(None, "tool_calls", tool_calls=calls)).answer or "") == calls
    assert read(chat("said", "tool_calls", tool_calls=calls)).answer == "said"
    assert read(chat(None, tool_calls=[])).error_code == "empty"


def test_completions() -> None:
    body = {"choices": [{"text": " hello", "finish_reason": "length"}], "usage": {"prompt_tokens": 1}}
    answer = read(body, route="/completions")
    assert (answer.status, answer.answer, answer.error_code, answer.prompt_tokens) == (
        "invalid",
        " hello",
        "truncated",
        1,
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([{"embedding": [0.5, -1]}], "[0.5,-1]"),
        ([{"embedding": "AACAPw=="}], "AACAPw=="),
        ([{"embedding": []}], None),
        ([{}], None),
        (["x"], None),
    ],
)
def test_embeddings(data: list[Any], text: str | None) -> None:
    answer = read({"data": data, "model": "m", "usage": {"prompt_tokens": 4}}, SCHEMA, "/embeddings")
    assert (answer.answer, answer.status) == (text, "ok" if text else "invalid")
    assert answer.prompt_tokens == 4


def response(*texts: str, thoughts: str | None = None, **fields: Any) -> dict[str, Any]:
    output: list[Any] = []
    if thoughts:
        output.append({"type": "reasoning", "content": [{"type": "reasoning_text", "text": thoughts}]})
    output += [{"type": "message", "content": [{"type": "output_text", "text": text}]} for text in texts]
    usage = {"input_tokens": 5, "output_tokens": 6}
    return {"status": "completed", "output": output, "usage": usage, **fields}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (response("hel", "lo", thoughts="t"), ("ok", "hello", "t", "stop", 5, 6)),
        (
            response("hel", status="incomplete", incomplete_details={"reason": "max_output_tokens"}),
            ("invalid", "hel", None, "length", 5, 6),
        ),
        (
            response("hel", status="incomplete", incomplete_details={"reason": "content_filter"}),
            ("invalid", "hel", None, "content_filter", 5, 6),
        ),
        ({"output": ["x", {"content": None}, {"content": 5}]}, ("invalid", None, None, None, None, None)),
        ({"output": 5, "choices": [{}]}, ("invalid", None, None, None, None, None)),
    ],
)
def test_responses(body: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = read(body, route="/responses")
    fields = (found.status, found.answer, found.reasoning, found.finish_reason)
    assert (*fields, found.prompt_tokens, found.completion_tokens) == expected


@pytest.mark.parametrize("count", [-1, 1.5, "3", True, None, 2**63, 2**70])
def test_token_counts_that_are_none(count: Any) -> None:
    answer = read({**chat(), "usage": {"prompt_tokens": count, "completion_tokens": 2**63 - 1}})
    assert (answer.prompt_tokens, answer.completion_tokens) == (None, 2**63 - 1)


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        ("x\\ud83d", "x\ufffd"),
        ("\\ud83dx", "\ufffdx"),
        ("\\ude00\\ud83d\\ude00", "\ufffd😀"),
        ("\\ud83d\\ude00 \\u0000 \\u2028", "😀 \x00 \u2028"),
    ],
)
def test_lone_surrogates_in_answers(escaped: str, text: str) -> None:
    body = json.dumps(chat("TEXT")).replace("TEXT", escaped)
    answer = interpret(200, body, "/chat/completions", ANY)
    assert (answer.status, answer.answer) == ("ok", text)
    assert classify(200, body, {}) == Final(True)


def test_parse_json() -> None:
    assert parse_json('{"a": 18446744073709551615}') == {"a": 2**64 - 1}
    assert [parse_json(text) for text in ("", "{", "[" * 99_999, '"\ud800"')] == [None, None, None, "\ufffd"]


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"properties": []}, {"required": "n"}])
def test_a_schema_that_is_none_stops_the_run(schema: dict[str, Any]) -> None:
    with pytest.raises(GristmillError, match=r"answer\.schema is not a JSON Schema"):
        AnswerCheck(schema=schema)
