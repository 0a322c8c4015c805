"""What a row becomes: a request that is sent as it was meant, or a reason why it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.campaign import Documents, parse_campaign
from gristmill.errors import GristmillError
from gristmill.requests import Recipe, Request, fingerprint, recipe, request_maker, row_id
from gristmill.sources import Row, RowError, Source

REQUESTS = Recipe(None, None, None, None, "m", ("m", "alias"))
MESSAGES = [{"role": "user", "content": "hello"}]
BIG = 2**53 + 1


def make(payload: Any, made_by: Recipe = REQUESTS) -> Request:
    """The request of one row; `row_id` must give it the same id."""
    text = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    row = Row(7, text, text)
    made = request_maker(made_by, "f.jsonl")(row)
    assert row_id(made_by.documents, Source("f.jsonl", "lines"))(row) == made.id
    return made


def sent(payload: Any, made_by: Recipe = REQUESTS) -> dict[str, Any]:
    made = make(payload, made_by)
    assert made.error is None
    body: dict[str, Any] = json.loads(made.body)
    return body


def chat(**fields: Any) -> dict[str, Any]:
    return {"id": "a", "messages": MESSAGES, **fields}


def batch(url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body or {"messages": MESSAGES}}


# -- what is sent -----------------------------------------------------------------------------------------------------

ROUTES = {
    "chat": (chat(), "/chat/completions"),
    "prompt": ({"id": "a", "prompt": "hello"}, "/completions"),
    "batch chat": (batch(), "/chat/completions"),
    "batch completions": (batch("/v1/completions", prompt=["hello"]), "/completions"),
    "batch embeddings": (batch("/v1/embeddings", input=["hello"]), "/embeddings"),
    "batch responses": (batch("/v1/responses", input="hello"), "/responses"),
    "batch without url": ({"custom_id": "a", "body": {"messages": MESSAGES}}, "/chat/completions"),
}


@pytest.mark.parametrize(("payload", "route"), ROUTES.values(), ids=ROUTES.keys())
def test_routes(payload: dict[str, Any], route: str) -> None:
    made = make(payload)
    assert (made.id, made.row, made.route, made.error) == ("a", 7, route, None)
    body = payload.get("body", {key: value for key, value in payload.items() if key != "id"})
    assert json.loads(made.body) == {**body, "model": "m"}


def test_every_field_is_passed_on() -> None:
    fields = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "n": 2,
        "unknown": {"nested": [None, True, "\u0000", "\u2028", "<|im_end|></think>", "😀"]},
        "logit_bias": {"5": -100},
        "temperature": 0.1,
        "model": "alias",
        "": "",
    }
    assert sent(chat(**fields)) == {"messages": MESSAGES, **fields}


@pytest.mark.parametrize("number", [BIG, -BIG, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0, 0.1, 1e308, 5e-324])
def test_numbers_are_exact(number: float) -> None:
    found = sent(chat(seed=number))["seed"]
    assert found == number
    assert type(found) is type(number)


OUT_OF_RANGE = [
    str(2**64),
    str(-(2**63) - 1),
    str(10**30),
    f"[1, {2**64}]",
    f'{{"deep": [{{"n": {2**70} }}]}}',
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    "9" * 400,
]


@pytest.mark.parametrize("number", OUT_OF_RANGE)
@pytest.mark.parametrize("documents", [False, True])
def test_numbers_that_would_not_arrive(number: str, documents: bool) -> None:
    text = b'{"id": "a", "text": "t", "messages": %s, "seed": %s}' % (json.dumps(MESSAGES).encode(), number.encode())
    error = make(text, DOCUMENTS if documents else REQUESTS).error
    assert error is not None
    assert error.code == "number_out_of_range"


def test_long_digits_in_texts_are_no_numbers() -> None:
    given = {"note": f"[{10**30}, {10**30}]", "seed": 1e300, "n": 2**63}
    assert sent(chat(**given)) == {"messages": MESSAGES, "model": "m", **given}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(fields=st.dictionaries(st.text(), JSON, max_size=4), ascii=st.booleans())
def test_what_is_sent_is_what_was_given(fields: dict[str, Any], ascii: bool) -> None:
    fields = {key: value for key, value in fields.items() if key not in ("model", "response_format", "stream")}
    given = {**fields, **chat()}
    body = sent(json.dumps(given, ensure_ascii=ascii).encode())
    del given["id"]
    assert body == {**given, "model": "m"}
    assert list(body) == [*given, "model"]


def test_the_last_of_double_keys_counts() -> None:
    text = b'{"id": "a", "id": "b", "messages": [{"role": "user", "content": "x", "content": "y"}]}'
    assert make(text).id == "b"
    assert sent(text)["messages"] == [{"role": "user", "content": "y"}]


def test_a_campaign_fills_in_what_is_missing() -> None:
    made_by = replace(REQUESTS, labels=("a", "b"), defaults={"temperature": 0, "max_tokens": 8})
    body = sent(chat(max_tokens=5), made_by)
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 5, "m")
    assert body["response_format"]["json_schema"]["schema"] == {"type": "string", "enum": ["a", "b"]}
    assert sent(chat(response_format={"type": "text"}), made_by)["response_format"] == {"type": "text"}
    assert sent(batch("/v1/embeddings", input="x"), made_by) == {"input": "x", "model": "m"}
    assert "response_format" not in sent({"id": "a", "prompt": "x"}, made_by)


# -- what cannot be sent ----------------------------------------------------------------------------------------------

DEEP = "[" * 300 + "]" * 300
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no JSON": (b"{oops", "f.jsonl:7", "malformed_json"),
    "half a line": (b'{"id": "a", "mess', "f.jsonl:7", "malformed_json"),
    "two objects": (b'{"id": "a"}{"id": "b"}', "f.jsonl:7", "malformed_json"),
    "old Mac line ends": (b'{"id": "a"}\r{"id": "b"}', "f.jsonl:7", "malformed_json"),
    "a list": (b"[1]", "f.jsonl:7", "malformed_json"),
    "a text": (b'"a"', "f.jsonl:7", "malformed_json"),
    "null": (b"null", "f.jsonl:7", "malformed_json"),
    "single quotes": (b"{'id': 'a'}", "f.jsonl:7", "malformed_json"),
    "a newline in a text": (b'{"id": "a\nb"}', "f.jsonl:7", "malformed_json"),
    "nested beyond reading": (b'{"id": "a", "x": ' + b"[" * 100_000, "f.jsonl:7", "malformed_json"),
    "nested beyond parsing": (b'{"id": "a", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}", "f.jsonl:7", "malformed_json"),
    "nested beyond writing": (
        b'{"id": "a", "prompt": %s}' % DEEP.encode(),
        "a",
        "malformed_request",
    ),
    "five thousand digits": (b'{"id": "a", "n": %s}' % (b"9" * 5000), "f.jsonl:7", "malformed_json"),
    "a raw NUL": (b'{"id": "a", "prompt": "x\0y"}', "f.jsonl:7", "nul_byte"),
    "NULs alone": (b"\0" * 100, "f.jsonl:7", "nul_byte"),
    "latin-1": ('{"id": "a", "prompt": "café"}'.encode("latin-1"), "f.jsonl:7", "invalid_utf8"),
    "a cut character": ('{"id": "a", "prompt": "é"}'.encode()[:-3] + b'"}', "f.jsonl:7", "invalid_utf8"),
    "an overlong character": (b'{"id": "a", "prompt": "\xc0\x80"}', "f.jsonl:7", "invalid_utf8"),
    "a surrogate as bytes": (b'{"id": "a", "prompt": "\xed\xa0\x80"}', "f.jsonl:7", "invalid_utf8"),
    "a pair as bytes": (b'{"id": "a", "prompt": "\xed\xa0\xbd\xed\xb8\x80"}', "f.jsonl:7", "invalid_utf8"),
    "a high surrogate": (b'{"id": "a", "prompt": "x\\ud83d"}', "a", "lone_surrogate"),
    "a high surrogate before text": (b'{"id": "a", "prompt": "\\ud83dx"}', "a", "lone_surrogate"),
    "a low surrogate": (b'{"id": "a", "prompt": "x\\ude00y"}', "a", "lone_surrogate"),
    "a reversed pair": (b'{"id": "a", "prompt": "\\ude00\\ud83d"}', "a", "lone_surrogate"),
    "a surrogate in the id": (b'{"id": "\\ud83d", "prompt": "x"}', "\\ud83d", "lone_surrogate"),
    "a surrogate in a custom_id": (b'{"custom_id": "\\ud83d", "body": {"x": 1}}', "\\ud83d", "lone_surrogate"),
    "no id": ({"messages": MESSAGES}, "f.jsonl:7", "missing_id"),
    "a null id": (chat(id=None), "f.jsonl:7", "missing_id"),
    "an empty id": (chat(id=""), "f.jsonl:7", "bad_id"),
    "a float id": (chat(id=1.0), "f.jsonl:7", "bad_id"),
    "a boolean id": (chat(id=True), "f.jsonl:7", "bad_id"),
    "a list for an id": (chat(id=["a"] * 9999), "f.jsonl:7", "bad_id"),
    "a huge id": (chat(id=2**70), "f.jsonl:7", "bad_id"),
    "neither messages nor prompt": ({"id": "a", "text": "x"}, "a", "malformed_request"),
    "no messages": (chat(messages=[]), "a", "malformed_request"),
    "messages is a text": (chat(messages="hello"), "a", "malformed_request"),
    "a message is a text": (chat(messages=["hello"]), "a", "malformed_request"),
    "no content": (chat(messages=[{"role": "user"}]), "a", "malformed_request"),
    "null content": (chat(messages=[{"role": "assistant", "content": None}]), "a", "malformed_request"),
    "no role": (chat(messages=[{"content": "x"}]), "a", "bad_role"),
    "an unknown role": (chat(messages=[{"role": "robot", "content": "x"}]), "a", "bad_role"),
    "a list for a role": (chat(messages=[{"role": ["user"], "content": "x"}]), "a", "bad_role"),
    "stream": (chat(stream=True), "a", "unsupported_parameter"),
    "another model": (chat(model="other"), "a", "wrong_model"),
    "an unknown url": (batch("/v1/images"), "a", "unsupported_url"),
    "a url with a host": (batch("http://h/v1/completions"), "a", "unsupported_url"),
    "another method": ({**batch(), "method": "GET"}, "a", "malformed_request"),
    "a body that is none": ({**batch(), "body": "x"}, "a", "malformed_request"),
    "a body of another route": (batch("/v1/embeddings", prompt="x"), "a", "malformed_request"),
    "a custom_id without body": ({"custom_id": "a"}, "a", "malformed_request"),
    "a null custom_id": ({**batch(), "custom_id": None}, "f.jsonl:7", "missing_id"),
}


@pytest.mark.parametrize(("payload", "id", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_sent(payload: Any, id: str, code: str) -> None:
    made = make(payload)
    assert made.error is not None
    assert (made.id, made.row, made.error.code) == (id, 7, code)
    assert (made.fingerprint, made.route, made.body) == (None, "", b"")
    assert 0 < len(made.error.message) < 400


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | st.text(st.sampled_from('{}[]":,\\ude00\ud83d idpromt1e9.\0'), max_size=40))
def test_no_line_breaks_a_campaign(line: bytes | str) -> None:
    text = line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line
    for made_by in (REQUESTS, DOCUMENTS, replace(DOCUMENTS, documents=Documents(invalid_text="replace"))):
        made = make(text, made_by)
        assert made.id.encode()
        assert (made.error is None) == bool(made.body)


def test_ids_are_texts() -> None:
    assert [make(chat(id=given)).id for given in (5, "5", "é\u0000\n", 2**64 - 1)] == [
        "5",
        "5",
        "é\u0000\n",
        "18446744073709551615",
    ]


def test_a_row_that_was_refused_stays_so() -> None:
    row = Row(3, None, b"", RowError("line_too_long", "the line is over 64 MiB"))
    assert request_maker(REQUESTS, "f")(row) == Request("f:3", 3, None, "", b"", None, {}, row.error)


def test_an_attached_endpoint_takes_any_model() -> None:
    anything = replace(REQUESTS, model=None, names=None)
    assert sent(chat(model="other"), anything)["model"] == "other"
    made = make(chat(), anything)
    assert made.error is not None
    assert made.error.code == "missing_model"


# -- fingerprints -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_request_alone() -> None:
    base = make(chat(temperature=0))
    canonical = b'{"messages":[{"content":"hello","role":"user"}],"model":"m","temperature":0}'
    assert base.fingerprint == fingerprint("/chat/completions", canonical)
    assert len(base.fingerprint or "") == 32
    same = [
        make(chat(temperature=0, id="b")),
        make(chat(temperature=0, model="m")),
        make(b'{ "temperature":0,"messages":[{"content":"h\\u0065llo","role":"user"}], "id": "a"}'),
        make({"custom_id": "x", "body": {"messages": MESSAGES, "temperature": 0}}),
        make(chat(), replace(REQUESTS, defaults={"temperature": 0})),
    ]
    assert {made.fingerprint for made in same} == {base.fingerprint}
    others = [
        make(chat()),
        make(chat(temperature=0.0)),
        make(chat(temperature=1)),
        make(chat(temperature=0, model="alias")),
        make(chat(temperature=0, messages=[{"role": "user", "content": "hello "}])),
        make(chat(temperature=0, messages=[{"role": "system", "content": "hello"}])),
        make(chat(temperature=0), replace(REQUESTS, labels=("x", "y"))),
        make(batch("/v1/completions", messages=MESSAGES, prompt="", temperature=0)),
    ]
    assert len({made.fingerprint for made in [base, *others]}) == len(others) + 1


@pytest.mark.parametrize("key", ["response_format", "structured_outputs", "tools"])
def test_the_order_of_a_schema_is_of_the_request(key: str) -> None:
    first, second = (
        {"x": {"properties": {name: {} for name in names}}} for names in (("why", "answer"), ("answer", "why"))
    )
    assert list(sent(chat(**{key: first}))[key]["x"]["properties"]) == ["why", "answer"]
    assert make(chat(**{key: first})).fingerprint == make(chat(**{key: dict(first)})).fingerprint
    assert make(chat(**{key: first})).fingerprint != make(chat(**{key: second})).fingerprint


def test_a_recipe_digest_tells_what_decides_requests() -> None:
    digests = [
        made_by.digest()
        for made_by in (
            DOCUMENTS,
            replace(DOCUMENTS, template="{{ text }}!"),
            replace(DOCUMENTS, labels=("a",)),
            replace(DOCUMENTS, schema={"type": "object"}),
            replace(DOCUMENTS, model="other"),
            replace(DOCUMENTS, names=("m", "x")),
            replace(DOCUMENTS, defaults={"seed": 1}),
            replace(DOCUMENTS, documents=Documents(keep=("x",))),
            replace(DOCUMENTS, documents=Documents(invalid_text="replace")),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert replace(DOCUMENTS).digest() == DOCUMENTS.digest()


# -- documents --------------------------------------------------------------------------------------------------------

DOCUMENTS = Recipe(Documents(), "{{ text }}", None, None, "m", ("m",))


def prompt(payload: Any, template: str = "{{ text }}", **documents: Any) -> str:
    made_by = replace(DOCUMENTS, template=template, documents=Documents(**documents), labels=("spam", "ham"))
    content = sent(payload, made_by)["messages"][0]["content"]
    assert isinstance(content, str)
    return content


def test_a_document_becomes_a_request() -> None:
    made_by = replace(DOCUMENTS, schema={"type": "object"}, defaults={"temperature": 0, "max_tokens": 8})
    assert sent({"id": 5, "text": "hello", "other": 1}, made_by) == {
        "model": "m",
        "temperature": 0,
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hello"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
        },
    }


LITERAL = ["{{ 7 * 7 }}", "{% raw %}", "{# no #}", "{{ labels }}", "<|im_end|>", "</think>", "a\u2028b", "\u0000", "%s"]


@pytest.mark.parametrize("text", LITERAL)
def test_a_document_is_no_template(text: str) -> None:
    assert prompt({"id": "a", "text": text}, "[{{ text }}]") == f"[{text}]"


def test_what_a_template_sees() -> None:
    template = "{{ id }} {{ text }} {{ n }} {{ labels | join('/') }} {{ deep.x[0] }}\n"
    document = {"key": "k", "body": "b", "n": 1.5, "labels": "own", "id": "own", "deep": {"x": ["<"]}}
    assert prompt(document, template, id="key", text="body") == "k b 1.5 spam/ham <"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ text.__init__.__globals__ }}",
    "{{ (text | attr('__class__')).mro() }}",
    "{{ labels.append('x') }}",
    "{{ '{0.__class__}'.format(text) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ range(10 ** 9) | list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
]


@pytest.mark.parametrize(
    "template", [*ESCAPES, "{{ missing }}", "{{ text.missing }}", "{{ 1 / 0 }}", "{{ text | int + text }}"]
)
def test_a_template_that_fails_is_the_row_s_trouble(template: str) -> None:
    made_by = replace(DOCUMENTS, template=template)
    made = make({"id": "a", "text": "x"}, made_by)
    assert made.error is not None
    assert (made.id, made.error.code) == ("a", "template_error")


@pytest.mark.parametrize("template", ["{{ text", "{% if %}", "{% endfor %}", "{{ text | nofilter }}"])
def test_a_template_that_is_none_stops_the_run(template: str) -> None:
    with pytest.raises(GristmillError, match="the prompt template") as caught:
        request_maker(replace(DOCUMENTS, template=template), "f")
    assert caught.value.where == "prompt, line 1"


BAD_DOCUMENTS: dict[str, tuple[Any, str, str]] = {
    "no id": ({"text": "x"}, "f.jsonl:7", "missing_id"),
    "no text": ({"id": "a"}, "a", "missing_text"),
    "a null text": ({"id": "a", "text": None}, "a", "empty_document"),
    "blanks": ({"id": "a", "text": " \n\u2028"}, "a", "empty_document"),
    "a number": ({"id": "a", "text": 5}, "a", "not_text"),
    "a list": ({"id": "a", "text": ["x"]}, "a", "not_text"),
    "invalid UTF-8": (b'{"id": "a", "text": "\xff"}', "f.jsonl:7", "invalid_utf8"),
    "a surrogate": (b'{"id": "a", "text": "\\ud83d"}', "a", "lone_surrogate"),
    "a raw NUL": (b'{"id": "a", "text": "\0"}', "f.jsonl:7", "nul_byte"),
    "a kept column nested too deeply": (b'{"id": "a", "text": "x", "k": %s}' % DEEP.encode(), "a", "malformed_json"),
}


@pytest.mark.parametrize(("payload", "id", "code"), BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS.keys())
def test_documents_that_cannot_be_sent(payload: Any, id: str, code: str) -> None:
    made = make(payload, replace(DOCUMENTS, documents=Documents(keep=("k",))))
    assert made.error is not None
    assert (made.id, made.error.code) == (id, code)


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"id": "a", "text": "x\xffy"}', "x\ufffdy"),
        (b'{"id": "a", "text": "x\\ud83dy"}', "x\ufffdy"),
        (b'{"id": "a", "text": "\\ude00\\ud83d\\ude00"}', "\ufffd😀"),
        (b'{"id": "a", "text": "\xed\xa0\x80 \\ud83d"}', "\ufffd\ufffd\ufffd \ufffd"),
        (b'{"id": "a", "\\ud83d": ["\\ud83d"], "text": "x"}', "x"),
    ],
)
def test_invalid_text_is_replaced_when_asked(payload: bytes, expected: str) -> None:
    assert prompt(payload, invalid_text="replace") == expected


def test_replacing_mends_text_alone() -> None:
    made_by = replace(DOCUMENTS, documents=Documents(invalid_text="replace"))
    codes = [make(text, made_by).error for text in (b'{"id": "a", "text": "\xff', b'["\xff"]', b'"\\ud83d"')]
    assert [error.code if error else None for error in codes] == ["malformed_json"] * 3


def test_kept_columns_are_texts() -> None:
    made_by = replace(DOCUMENTS, documents=Documents(keep=("label", "n", "nested", "none", "missing")))
    made = make({"id": "a", "text": "", "label": "ä", "n": BIG, "nested": {"b": [1], "a": "ä"}, "none": None}, made_by)
    assert made.error is not None
    assert made.keep == {
        "label": "ä",
        "n": str(BIG),
        "nested": '{"a":"ä","b":[1]}',
        "none": None,
        "missing": None,
    }


def test_the_recipe_of_a_campaign() -> None:
    campaign = parse_campaign(
        {
            "campaign": "c",
            "input": "x",
            "model": "m",
            "documents": {},
            "prompt": "p",
            "answer": {"labels": ["a", "b"]},
            "sampling": {"temperature": 0, "stop": ["x"], "extra": {"temperature": 1, "chat_template_kwargs": {}}},
        },
        "c.yaml",
    )
    assert recipe(campaign, ("m",), "{{ text }}", None) == Recipe(
        Documents(),
        "{{ text }}",
        ("a", "b"),
        None,
        "m",
        ("m",),
        {"temperature": 0, "stop": ["x"], "chat_template_kwargs": {}},
    )
