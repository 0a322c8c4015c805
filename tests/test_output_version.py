"""What a finished group's answers depend on: when it comes out differently, finished groups must be done again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from gristmill import run
from gristmill.campaign import Documents
from gristmill.merge import table_for
from gristmill.outcomes import AnswerCheck, interpret
from gristmill.requests import Recipe, request_maker
from gristmill.shards import encode
from gristmill.sources import Row, RowError

PINNED = {1: "ba8d556d8c0d4b58"}

ROWS: list[bytes] = [
    b'{"id": "a", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "seed": 9007199254740993}',
    b'{"id": 2, "prompt": "h\\u00e9\\u2028", "temperature": 0.1, "response_format": {"b": 1, "a": 2}}',
    b'{"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"input": ["x"], "model": "m"}}',
    b'{"custom_id": "d", "url": "/v1/responses", "body": {"input": "x", "tools": [{"z": 1, "a": 1}]}}',
    b'{"id": "e", "text": "{{ no }} <|im_end|>", "label": "spam", "n": 5}',
    b'{"id": "f", "text": "", "label": null}',
    b'{"id": "g", "prompt": "\\ud83d"}',
    b'{"id": "h", "prompt": "\xff"}',
    b"{oops",
]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "why": {"type": ["string", "null"]}}}
RECIPES = [
    Recipe(None, None, None, None, "m", ("m",), {"temperature": 0}),
    Recipe(None, None, ("spam", "ham"), None, "m", None),
    Recipe(Documents(keep=("label", "n")), "{{ id }}: {{ text }}\n", ("spam", "ham"), None, "m", ("m",)),
    Recipe(Documents(invalid_text="replace"), "{{ text }}", None, SCHEMA, "m", ("m",), {"max_tokens": 8}),
]
CHECKS = [AnswerCheck(), AnswerCheck(labels=("spam", "ham")), AnswerCheck(schema=SCHEMA)]


def chat(content: str | None, finish: str = "stop", **message: object) -> str:
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return json.dumps({"model": "m", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})


BODIES: list[tuple[int, str, str]] = [
    (200, "/chat/completions", chat("spam")),
    (200, "/chat/completions", chat("<think>hm</think>\n\nHam.")),
    (200, "/chat/completions", chat('{"n": 5, "why": null}', reasoning="hm")),
    (200, "/chat/completions", chat('{"n": ', "length")),
    (200, "/chat/completions", chat('{"n": ')),
    (200, "/chat/completions", chat(" \n ", "length")),
    (200, "/chat/completions", chat(None, tool_calls=[{"id": "1"}])),
    (200, "/chat/completions", chat("X").replace("X", "\\ud83d")),
    (200, "/completions", '{"choices": [{"text": "spam", "finish_reason": "stop"}]}'),
    (200, "/embeddings", '{"data": [{"embedding": [0.5]}]}'),
    (200, "/responses", '{"status": "completed", "output": [{"content": [{"text": "ham"}]}]}'),
    (400, "/chat/completions", '{"error": {"message": "maximum context length is 9", "code": 400}}'),
    (404, "/chat/completions", '{"error": {"message": "no such model", "code": 404}}'),
]


def state() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for recipe in RECIPES:
        make = request_maker(recipe, "f.jsonl")
        for number, text in enumerate(ROWS, start=1):
            request = make(Row(number, text, text))
            if request.error is not None:
                request = request._replace(error=RowError(request.error.code, ""))  # other packages word the message
            digest.update(encode(request))
    for check in CHECKS:
        digest.update(str(table_for(check, ["label"]).schema().remove_metadata()).encode())
        for status, route, body in BODIES:
            answer = replace(interpret(status, body, route, check), error_message=None)
            digest.update(repr(answer).encode())
    return digest.hexdigest()


def test_output_version() -> None:
    assert PINNED.get(run.OUTPUT_VERSION) == state(), (
        "requests or answers of the same campaign come out differently than with this OUTPUT_VERSION: if that is "
        "meant, raise OUTPUT_VERSION in workflow/lib/gristmill/run.py, so that finished groups are done again, and put "
        f"{{{run.OUTPUT_VERSION + 1}: {state()!r}}} in PINNED"
    )
