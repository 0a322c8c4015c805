"""A scripted OpenAI-compatible server: answers at once, fails as told, and logs every request it gets.

    python tests/scripted_server.py [--host 127.0.0.1] [--port 0] [--uds PATH] [--model NAME ...]
        [--key-env NAME] [--log FILE] [--script FILE.json] [--address-file FILE]

With `--port 0` it takes a free port. Once it listens it writes its base URL, such as
`http://127.0.0.1:34567/v1` (or `unix:PATH` with `--uds`), to `--address-file`, atomically.

The log. Each POST appends one JSON line as it arrives, before anything is answered: `t` (unix seconds),
`path`, `body_hash` (see `body_hash`), `text` (last user message, prompt or input, cut to 200 characters) and
`pid`; besides, where they apply, `probe` (true for a request with max_tokens 1 and the user text "ping"),
`do` (what was done instead of a plain answer: an action, or one of REFUSALS) and `rule` (`contains` of the
rule that said so).

The script. A JSON object; every key is optional, an unknown one is an error:

    latency_s    seconds before an answer, a number or [lo, hi]
    answer       the text of every answer; null: one of the labels of a schema with an `enum`, chosen by the
                 text; a minimal object for a schema with `properties`; otherwise "echo: " and the text
    seed         of the rates, and of a latency with bounds
    rates        {action: share of the requests}; see below
    slow_s       seconds that the action `slow` adds to the latency
    retry_after  seconds in the Retry-After header of every 429, or null for none
    rules        [{"contains": part of the text, "do": action, "times": N or null for always}]; the first
                 that fits is done
    die_after    SIGKILL the own process once so many requests were answered
    capacity     answer 429 when more requests than this are in flight

Actions of rates and rules:

    400 ... 599    an error with that status         too_long        vLLM's error for too long a prompt
    drop           close without an answer           truncated       close in the middle of the answer
    hang           never answer                      die             SIGKILL the own process
    wedge          never answer anything again, healthy as /health is
    html200        an HTML page with status 200      error200        an error object with status 200
    null_choices   "choices": null                   slow            a plain answer, later
    length         half an answer, cut short         half_json       half a JSON text that claims to be whole
    empty          an empty text                     lone_surrogate  half of a surrogate pair in the text
    think          <think> before the answer         reasoning       reasoning in a field of its own
    text:ANSWER    this answer

Rates are decided by the hash of (seed, body_hash, how often this body was seen), so they are reproducible
and a retry is drawn anew. What an existing log holds counts as seen, and as used `times` of the rules: a
process that is started again on the same log goes on where a killed one stopped. Probes are exempt from
rates, capacity and die_after, not from rules.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import gc
import hmac
import json
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

DRAIN_S = 5.0  # longest time that requests in flight may take after SIGTERM
TEXT_ACTIONS = {"length", "half_json", "empty", "lone_surrogate", "think", "reasoning"}
ACTIONS = TEXT_ACTIONS | {"too_long", "drop", "truncated", "hang", "die", "html200", "error200", "slow"}
ACTIONS |= {"null_choices", "wedge"}
# What the log has in `do` for requests for which no action was looked up.
REFUSALS = {"not_ready", "unauthorized", "not_found", "not_allowed"}
REFUSALS |= {"bad_body", "unknown_model", "stream", "capacity"}
KINDS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/embeddings": "embedding",
    "/v1/responses": "response",
}
ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
THOUGHT = "The text decides it."


# --- The script -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What happens to requests whose text contains something, and how often."""

    contains: str
    do: str
    times: int | None = None


@dataclass(frozen=True)
class Script:
    """How the server behaves; the keys are those of the module's docstring."""

    latency_s: float | tuple[float, float] = 0.0
    answer: str | None = None
    seed: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    slow_s: float = 2.0
    retry_after: float | None = None
    rules: tuple[Rule, ...] = ()
    die_after: int | None = None
    capacity: int | None = None

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Script:
        """A script from plain data. Raises ValueError for what it does not know."""
        data = dict(data)
        try:
            data["rules"] = tuple(Rule(**rule) for rule in data.get("rules", ()))
            if isinstance(data.get("latency_s"), list):
                low, high = data["latency_s"]
                data["latency_s"] = (float(low), float(high))
            script = cls(**data)
        except TypeError as error:
            raise ValueError(f"script: {error}") from error
        for action in [*script.rates, *(rule.do for rule in script.rules)]:
            status = action.isdigit() and 400 <= int(action) <= 599
            if not (status or action in ACTIONS or action.startswith("text:")):
                raise ValueError(f"script: unknown action {action!r}")
        if sum(script.rates.values()) > 1 + 1e-9:
            raise ValueError("script: the rates add up to more than 1")
        return script

    @property
    def remembers(self) -> bool:
        """Whether what was seen before changes what is done."""
        return bool(self.rates) or any(rule.times is not None for rule in self.rules)


def drawn_action(script: Script, digest: str, seen: int) -> str:
    """The action that the rates give a body seen `seen` times before, or "" for a plain answer."""
    key = f"{script.seed}:{digest}:{seen}".encode()
    left = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64
    for action, share in script.rates.items():
        if left < share:
            return action
        left -= share
    return ""


# --- Requests -------------------------------------------------------------------------------------


def dumps(value: object, *, canonical: bool = False) -> bytes:
    """JSON as bytes, also where orjson refuses: lone surrogates and very large integers."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if canonical else None)
    except TypeError:
        return json.dumps(value, sort_keys=canonical, separators=(",", ":")).encode()


def loads(raw: bytes) -> Any:
    """The value of a JSON text, lone surrogates included. Raises ValueError."""
    try:
        return orjson.loads(raw)
    except ValueError:
        return json.loads(raw)


def body_hash(body: object) -> str:
    """32 hex digits: BLAKE2b of the body as JSON with sorted keys and without blanks."""
    return blake2b(dumps(body, canonical=True), digest_size=16).hexdigest()


def pick(text: str, number: int) -> int:
    """An index below `number`, always the same one for the same text."""
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % number


def _content(content: object) -> str:
    """The text of a message's content: a string, or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def inputs_of(kind: str | None, body: object) -> list[str]:
    """The texts that a request asks about: one, except for a list of prompts or of inputs to embed."""
    if not isinstance(body, dict) or kind is None:
        return [""]
    if kind in ("completion", "embedding"):
        given = body.get("prompt" if kind == "completion" else "input", "")
        if isinstance(given, str):
            return [given]
        if isinstance(given, list) and given and not isinstance(given[0], int):
            return [item if isinstance(item, str) else str(item) for item in given]
        return [str(given)]
    given = body.get("messages" if kind == "chat" else "input", "")
    if isinstance(given, str):
        return [given]
    for message in reversed(given if isinstance(given, list) else []):
        if isinstance(message, dict) and message.get("role") == "user":
            return [_content(message.get("content"))]
    return [""]


def schema_of(kind: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON Schema that the answer is asked to satisfy, or None."""
    if kind == "response":
        holder = body.get("text")
        form = holder.get("format") if isinstance(holder, dict) else None
    else:
        form = body.get("response_format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return None
    named = form.get("json_schema", form)
    schema = named.get("schema") if isinstance(named, dict) else None
    return schema if isinstance(schema, dict) else None


def minimal(schema: Any, text: str, root: dict[str, Any], depth: int = 0) -> Any:
    """A small value that satisfies the common parts of JSON Schema; enums are chosen by `text`."""
    if not isinstance(schema, dict) or depth > 30:
        return None
    if "$ref" in schema:
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            target = target.get(part, {}) if isinstance(target, dict) and part else target
        return minimal(target, text, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][pick(text, len(schema["enum"]))]
    for several in ("anyOf", "oneOf", "allOf"):
        if schema.get(several):
            return minimal(schema[several][0], text, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else None)
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties", {})
        names = schema.get("required", list(properties))
        return {name: minimal(properties.get(name), text, root, depth + 1) for name in names}
    if kind == "array":
        return [minimal(schema.get("items"), text, root, depth + 1) for _ in range(schema.get("minItems", 0))]
    if kind == "string":
        return "x" * max(1, schema.get("minLength", 0))
    if kind in ("integer", "number"):
        least = schema.get("exclusiveMinimum")
        return least + 1 if least is not None else schema.get("minimum", min(0, schema.get("maximum", 0)))
    return False if kind == "boolean" else None


# --- Responses ------------------------------------------------------------------------------------


class Reply(web.StreamResponse):
    """Bytes that are written to the connection as they are, headers included; no bytes drop it."""

    def __init__(self, data: bytes, *, keep_alive: bool = True, then: Callable[[], None] | None = None) -> None:
        """`then` is called when the bytes were written."""
        super().__init__()
        self._data = data
        self._keep_open: bool = keep_alive
        self._then = then

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open for a next request."""
        return self._keep_open

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write the answer."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        self._keep_open = self._keep_open and bool(request.keep_alive)
        if self._data:
            transport.write(self._data)

    async def write_eof(self, data: bytes = b"") -> None:
        """Do what was to be done after the answer."""
        if self._then is not None:
            self._then()


def http(status: int, body: bytes, kind: str = "application/json", extra: str = "") -> bytes:
    """A whole HTTP response. `extra` holds further header lines, each with its line end."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Error"
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def error_body(message: str, code: int, param: str | None = None) -> bytes:
    """vLLM's error object."""
    name = ERROR_TYPES.get(code, "APIError")
    return dumps({"error": {"message": message, "type": name, "param": param, "code": code}})


def too_long(limit: int) -> str:
    """What vLLM says to a prompt that does not fit."""
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested 16 output tokens "
        f"and your prompt contains at least {limit - 15} input tokens, for a total of at least {limit + 1} "
        "tokens. Please reduce the length of the input prompt or the number of requested output tokens."
    )


OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
HEALTHY = http(200, b"")
UNREADY = http(503, b"")
NOT_FOUND = http(404, b'{"detail":"Not Found"}')
NOT_ALLOWED = http(405, b'{"detail":"Method Not Allowed"}')
UNAUTHORIZED = http(401, b'{"error":"Unauthorized"}')
BAD_BODY = http(400, error_body("The body is not a JSON object.", 400))
STREAM = http(400, error_body("The scripted server does not stream.", 400, "stream"))
HTML = http(
    200,
    b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in.</body></html>\n",
    "text/html; charset=utf-8",
)
ERROR_200 = http(200, error_body("Internal server error", 500))

USAGE = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
CHAT = b'{"id":"chatcmpl-%b","object":"chat.completion","created":%d,"model":%b,"choices":%b,' + USAGE
CHAT_CHOICE = b'{"index":%d,"message":{"role":"assistant","content":%b%b},"logprobs":null,"finish_reason":"%b"}'
COMPLETION = b'{"id":"cmpl-%b","object":"text_completion","created":%d,"model":%b,"choices":%b,' + USAGE
COMPLETION_CHOICE = b'{"index":%d,"text":%b%b,"logprobs":null,"finish_reason":"%b"}'
RESPONSE = (
    b'{"id":"resp_%b","object":"response","created_at":%d,"model":%b,"output":%b,"status":"%b",'
    b'"incomplete_details":%b,"error":null,"instructions":null,"metadata":{},"parallel_tool_calls":true,'
    b'"temperature":null,"top_p":null,"tool_choice":"auto","tools":[],"usage":{"input_tokens":%d,'
    b'"input_tokens_details":{"cached_tokens":0},"output_tokens":%d,"output_tokens_details":'
    b'{"reasoning_tokens":0},"total_tokens":%d}}'
)
RESPONSE_ITEM = (
    b'{"id":"msg_%b","type":"message","role":"assistant","status":"%b","content":'
    b'[{"type":"output_text","text":%b,"annotations":[]}]}'
)


def tokens(texts: list[str]) -> int:
    """A count of tokens, good enough for a usage: a quarter of the characters."""
    return sum(len(text) // 4 + 1 for text in texts)


def embedding_of(text: str, size: int) -> list[float]:
    """A vector of length 1 that depends on the text only, in steps of single precision."""
    source = random.Random(text.encode("utf-8", "replace"))
    values = [source.uniform(-1, 1) for _ in range(size)]
    norm = sum(value * value for value in values) ** 0.5 or 1.0
    return list(struct.unpack(f"<{size}f", struct.pack(f"<{size}f", *(value / norm for value in values))))


def half_json(answer: str) -> str:
    """The first half of the answer as JSON."""
    whole = answer if answer[:1] in ("{", "[", '"') else json.dumps({"answer": answer})
    return whole[: max(1, len(whole) // 2)]


# --- The server -----------------------------------------------------------------------------------


class ScriptedServer:
    """The routes of the server and what it remembers. `run` serves until SIGTERM."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        models: list[str] | None = None,
        key: str | None = None,
        log: Path | None = None,
        ready: bool = True,
        max_model_len: int = 2048,
    ) -> None:
        """`models` empty: any model is served. `ready` false: every request is answered with 503."""
        self.script = script or Script()
        self.models = models or []
        self.ready = ready
        self.max_model_len = max_model_len
        self._key = f"Bearer {key}".encode() if key else None
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._seen: Counter[str] = Counter()
        self._used: Counter[tuple[str, str]] = Counter()
        if log is not None and self.script.remembers:
            self._remember(log)
        self._pid = os.getpid()
        self._random = random.Random(self.script.seed)
        self._number = 0  # of ids given out
        self._active = 0  # HTTP requests being handled
        self._running = 0  # generation requests being handled
        self._wedged = False
        self._answered = 0
        self._model_json: dict[str, bytes] = {}
        self._errors: dict[int, bytes] = {}
        self._too_long = http(400, error_body(too_long(max_model_len), 400, "input_tokens"))

    def _remember(self, log: Path) -> None:
        """Take over what earlier processes wrote to the log."""
        with log.open("rb") as lines:
            for line in lines:
                try:
                    entry = orjson.loads(line)
                except ValueError:
                    continue
                if "rule" in entry:
                    self._used[entry["rule"], entry["do"]] += 1
                elif "probe" not in entry and entry.get("do") not in REFUSALS:
                    self._seen[entry["body_hash"]] += 1

    # The routes.

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one HTTP request."""
        self._active += 1
        try:
            if request.method == "POST":
                return await self._post(request)
            return Reply(self._get(request))
        finally:
            self._active -= 1

    def _get(self, request: web.BaseRequest) -> bytes:
        path = request.path
        if path == "/health":
            answer = HEALTHY if self.ready else UNREADY
        elif not self.ready:
            return UNREADY
        elif path == "/metrics":
            answer = http(200, self._metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path.startswith("/v1/") and not self._allowed(request):
            return UNAUTHORIZED
        elif path == "/v1/models":
            answer = http(200, self._model_list())
        else:
            return NOT_ALLOWED if path in KINDS else NOT_FOUND
        return answer if request.method == "GET" else NOT_ALLOWED

    def _metrics(self) -> bytes:
        name = self.models[0] if self.models else "scripted"
        lines = []
        for gauge, value, text in (
            ("running", self._running, "Number of requests in model execution batches."),
            ("waiting", 0, "Number of requests waiting to be processed."),
        ):
            metric = f"vllm:num_requests_{gauge}"
            lines += [f"# HELP {metric} {text}", f"# TYPE {metric} gauge"]
            lines.append(f'{metric}{{engine="0",model_name={json.dumps(name)}}} {float(value)}')
        return ("\n".join(lines) + "\n").encode()

    def _model_list(self) -> bytes:
        now = int(time.time())
        entries = [
            {
                "id": name,
                "object": "model",
                "created": now,
                "owned_by": "vllm",
                "root": name,
                "parent": None,
                "max_model_len": self.max_model_len,
            }
            for name in self.models or ["scripted"]
        ]
        return dumps({"object": "list", "data": entries})

    def _allowed(self, request: web.BaseRequest) -> bool:
        if self._key is None:
            return True
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._key)

    async def _post(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        path = request.path
        kind = KINDS.get(path)
        body: Any = None
        try:
            body = loads(raw)
            digest = body_hash(body)
        except ValueError:
            digest = blake2b(raw, digest_size=16).hexdigest()
        texts = inputs_of(kind, body)
        text = texts[0] if len(texts) == 1 else "\n".join(texts)
        probe = text == "ping" and body.get("max_tokens") == 1
        refusal = self._refusal(request, kind, body, probe)
        do, rule = (refusal[0], None) if refusal else self._decide(text, digest, probe)
        if self._log is not None:
            self._write_log(path, digest, text, probe, do, rule)
        if refusal is not None or kind is None:
            return Reply(NOT_FOUND if refusal is None else refusal[1])
        self._running += 1
        try:
            return await self._answer(kind, body, texts, do, probe)
        finally:
            self._running -= 1

    def _refusal(self, request: web.BaseRequest, kind: str | None, body: Any, probe: bool) -> tuple[str, bytes] | None:
        """Why a request is not looked at further, and the answer it gets; None if it is."""
        if not self.ready:
            return "not_ready", UNREADY
        if self._key is not None and request.path.startswith("/v1/") and not self._allowed(request):
            return "unauthorized", UNAUTHORIZED
        if kind is None:
            known = request.path in ("/health", "/metrics", "/v1/models")
            return ("not_allowed", NOT_ALLOWED) if known else ("not_found", NOT_FOUND)
        if not isinstance(body, dict):
            return "bad_body", BAD_BODY
        if self.models and body.get("model", self.models[0]) not in self.models:
            message = f"The model `{body['model']}` does not exist."
            return "unknown_model", http(404, error_body(message, 404, "model"))
        if body.get("stream"):
            return "stream", STREAM
        if self.script.capacity is not None and not probe and self._running >= self.script.capacity:
            return "capacity", self._error(429)
        return None

    def _decide(self, text: str, digest: str, probe: bool) -> tuple[str, str | None]:
        """What to do, "" for a plain answer, and `contains` of the rule that says so."""
        for rule in self.script.rules:
            if rule.contains in text:
                if rule.times is not None:
                    if self._used[rule.contains, rule.do] >= rule.times:
                        continue
                    self._used[rule.contains, rule.do] += 1
                return rule.do, rule.contains
        if not self.script.rates or probe:
            return "", None
        seen = self._seen[digest]
        self._seen[digest] = seen + 1
        return drawn_action(self.script, digest, seen), None

    def _write_log(self, path: str, digest: str, text: str, probe: bool, do: str, rule: str | None) -> None:
        entry: dict[str, Any] = {
            "t": time.time(),
            "path": path,
            "body_hash": digest,
            "text": text[:200].encode("utf-8", "replace").decode(),
            "pid": self._pid,
        }
        if probe:
            entry["probe"] = True
        if do:
            entry["do"] = do
        if rule is not None:
            entry["rule"] = rule
        assert self._log is not None
        os.write(self._log, dumps(entry) + b"\n")

    # The answers.

    def _error(self, status: int) -> bytes:
        if status not in self._errors:
            after = self.script.retry_after
            extra = f"Retry-After: {after:g}\r\n" if status == 429 and after is not None else ""
            self._errors[status] = http(status, error_body(f"Scripted error {status}", status), extra=extra)
        return self._errors[status]

    async def _answer(
        self, kind: str, body: dict[str, Any], texts: list[str], do: str, probe: bool
    ) -> web.StreamResponse:
        script = self.script
        wait = script.latency_s
        if isinstance(wait, tuple):
            wait = self._random.uniform(*wait)
        if do == "slow":
            wait += script.slow_s
        if wait:
            await asyncio.sleep(wait)
        if self._wedged:
            await asyncio.get_running_loop().create_future()
        if do and do != "slow" and do not in TEXT_ACTIONS and not do.startswith("text:"):
            if do == "wedge":
                self._wedged = True
            if do in ("hang", "wedge"):
                await asyncio.get_running_loop().create_future()
            if do == "die":
                kill_self()
            if do == "drop":
                return Reply(b"", keep_alive=False)
            if do == "truncated":
                whole = OK_HEAD % (0, self._body(kind, body, texts, ""))
                head, _, rest = whole.partition(b"\r\n\r\n")
                head = head.replace(b"Content-Length: 0", b"Content-Length: %d" % (len(rest) + 100))
                return Reply(head + b"\r\n\r\n" + rest[: len(rest) // 2], keep_alive=False)
            if do == "html200":
                return Reply(HTML)
            if do == "error200":
                return Reply(ERROR_200)
            if do == "too_long":
                return Reply(self._too_long)
            if do.isdigit():
                return Reply(self._error(int(do)))
        answer = self._body(kind, body, texts, do)
        then = None
        if not probe:
            self._answered += 1
            if self._answered == script.die_after:
                then = kill_self
        return Reply(OK_HEAD % (len(answer), answer), then=then)

    def _text(self, kind: str, body: dict[str, Any], text: str) -> str:
        """The plain answer to a text."""
        if self.script.answer is not None:
            return self.script.answer
        schema = schema_of(kind, body)
        if schema is not None and ("enum" in schema or "properties" in schema):
            return dumps(minimal(schema, text, schema)).decode()
        return f"echo: {text}"

    def _body(self, kind: str, body: dict[str, Any], texts: list[str], do: str) -> bytes:
        """The JSON of an answer with status 200."""
        self._number += 1
        name = b"%x-%x" % (self._pid, self._number)
        now = int(time.time())
        model = body.get("model", self.models[0] if self.models else "scripted")
        model_json = self._model_json.get(model) if isinstance(model, str) else None
        if model_json is None:
            model_json = dumps(model)
            if isinstance(model, str):
                self._model_json[model] = model_json
        if kind == "embedding":
            return self._embeddings(body, texts, do, model)

        choices: list[tuple[bytes, bytes]] = []  # the text as JSON, and further fields
        finish = b"length" if do == "length" else b"stop"
        given = 0
        for text in texts:
            answer = do[5:] if do.startswith("text:") else self._text(kind, body, text)
            extra = b""
            if do == "length":
                answer = answer[: len(answer) // 2]
            elif do == "half_json":
                answer = half_json(answer)
            elif do == "empty":
                answer = ""
            elif do == "think":
                answer = f"<think>\n{THOUGHT}\n</think>\n\n{answer}"
            elif do == "reasoning":
                thought = dumps(THOUGHT)
                extra = b',"reasoning":%b,"reasoning_content":%b' % (thought, thought)
            elif do == "lone_surrogate":
                answer = "before \ud83d after"
            choices.append((dumps(answer), extra))
            given += len(answer) // 4 + 1
        asked = tokens(texts)

        if kind == "response":
            status = b"incomplete" if do == "length" else b"completed"
            reason = b'{"reason":"max_output_tokens"}' if do == "length" else b"null"
            items = b",".join(RESPONSE_ITEM % (name, status, text) for text, _ in choices)
            output = b"null" if do == "null_choices" else b"[%b]" % items
            return RESPONSE % (name, now, model_json, output, status, reason, asked, given, asked + given)
        number = body.get("n")
        if isinstance(number, int) and number > 1:
            choices = [choice for choice in choices for _ in range(number)]
            given *= number
        whole, part = (CHAT, CHAT_CHOICE) if kind == "chat" else (COMPLETION, COMPLETION_CHOICE)
        if do == "null_choices":
            joined = b"null"
        else:
            parts = (part % (index, text, extra, finish) for index, (text, extra) in enumerate(choices))
            joined = b"[%b]" % b",".join(parts)
        return whole % (name, now, model_json, joined, asked, given, asked + given)

    def _embeddings(self, body: dict[str, Any], texts: list[str], do: str, model: Any) -> bytes:
        size = body.get("dimensions") or 8
        data = []
        for index, text in enumerate(texts):
            vector: list[float] | str = embedding_of(text, size)
            if body.get("encoding_format") == "base64":
                vector = base64.b64encode(struct.pack(f"<{size}f", *vector)).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        asked = tokens(texts)
        return dumps(
            {
                "object": "list",
                "data": None if do == "null_choices" else data,
                "model": model,
                "usage": {"prompt_tokens": asked, "total_tokens": asked},
            }
        )

    # Serving.

    async def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        uds: str | None = None,
        listening: Callable[[str], None] | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT. `listening` is called with the address once there is one."""
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        server = web.Server(self.handle, request_factory=_make_request, handler_cancellation=True, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await runner.setup()
        site: web.BaseSite
        if uds:
            site = web.UnixSite(runner, uds, backlog=4096)
        else:
            site = web.TCPSite(runner, host, port, backlog=4096)
        await site.start()
        if uds:
            address = f"unix:{uds}"
        else:
            reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            reached = f"[{reached}]" if ":" in reached else reached
            address = f"http://{reached}:{runner.addresses[0][1]}/v1"
        gc.collect()
        gc.freeze()
        if listening is not None:
            listening(address)
        await stop.wait()

        await site.stop()
        await asyncio.sleep(0)  # what has arrived begins
        server.pre_shutdown()
        end = loop.time() + DRAIN_S
        while self._active and loop.time() < end:
            await asyncio.sleep(0.01)
        await runner.cleanup()
        if uds:
            Path(uds).unlink(missing_ok=True)


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """As aiohttp makes it, without the limit on the size of a body."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)


def kill_self() -> None:
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A scripted OpenAI-compatible server for tests.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    parser.add_argument("--uds", help="path of a Unix socket to listen on instead")
    parser.add_argument("--model", nargs="+", action="extend", default=[], help="names served; none: any")
    parser.add_argument("--key-env", help="environment variable that holds the API key")
    parser.add_argument("--log", type=Path, help="file to which each request is appended")
    parser.add_argument("--script", type=Path, help="JSON file that says how to behave")
    parser.add_argument("--address-file", type=Path, help="file that receives the base URL")
    options = parser.parse_args()
    try:
        script = Script.parse(json.loads(options.script.read_bytes()) if options.script else {})
    except ValueError as error:
        parser.error(str(error))
    server = ScriptedServer(
        script,
        models=options.model,
        key=os.environ.get(options.key_env) if options.key_env else None,
        log=options.log,
    )

    def listening(address: str) -> None:
        if options.address_file:
            write_atomically(options.address_file, address)
        print(f"listening on {address}", flush=True)

    asyncio.run(server.serve(host=options.host, port=options.port, uds=options.uds, listening=listening))


if __name__ == "__main__":
    main()
