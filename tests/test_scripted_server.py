"""The scripted server and the scripted engine behave as their docstrings say."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from scripted_server import Script, body_hash, drawn_action, pick

HERE = Path(__file__).resolve().parent
DEADLINE_S = 20.0


def eventually(what: str, condition: Callable[[], Any]) -> Any:
    """The first truthy value of `condition`; fails after a deadline."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    raise AssertionError(f"not in time: {what}")


def user(text: str, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


def call(url: str, body: object = None, key: str | None = None) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of an answer, the body parsed where it is JSON; GET without a body."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            status, head, raw = response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        status, head, raw = error.code, error.headers, error.read()
    return status, dict(head), json.loads(raw) if "json" in head["Content-Type"] and raw else raw.decode()


@dataclass
class Server:
    """A running scripted server."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def chat(self, text: str, **fields: Any) -> tuple[int, Any]:
        """Status and body of the answer to a chat request."""
        status, _, body = call(f"{self.url}/chat/completions", user(text, **fields))
        return status, body

    def answer(self, text: str, **fields: Any) -> str:
        """The text of the answer to a chat request."""
        status, body = self.chat(text, **fields)
        assert status == 200
        content = body["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content

    def lines(self) -> list[dict[str, Any]]:
        """What the log holds."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended with the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> Start:
    """Starts a scripted server with a script and further arguments; all share one log."""

    def starter(script: dict[str, Any] | None = None, *arguments: str, **env: str) -> Server:
        number = len(processes)
        address, log = tmp_path / f"address{number}", tmp_path / "requests.jsonl"
        path = tmp_path / f"script{number}.json"
        path.write_text(json.dumps(script or {}))
        command = [sys.executable, str(HERE / "scripted_server.py"), "--address-file", str(address)]
        command += ["--log", str(log), "--script", str(path), *arguments]
        process = subprocess.Popen(command, env={**os.environ, **env})
        processes.append(process)
        eventually("the server listens", lambda: address.exists() or process.poll() is not None)
        assert process.poll() is None
        return Server(process, address.read_text(), log)

    return starter


def test_answers_and_log(start: Start) -> None:
    server = start()
    schema = {"name": "label", "schema": {"enum": ["good", "bad", "unclear"]}}
    labels = {"type": "json_schema", "json_schema": schema}
    expected = ["good", "bad", "unclear"][pick("some text", 3)]
    assert server.answer("some text", response_format=labels) == json.dumps(expected)
    assert server.answer("plain") == "echo: plain"
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": ["integer", "null"], "minimum": 18},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 2},
        },
        "required": ["name", "age", "tags"],
        "$defs": {"tag": {"enum": ["t"]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": person}}
    answered = json.loads(server.answer("x", response_format=form))
    assert answered == {"name": "x", "age": 18, "tags": ["t", "t"]}
    assert server.answer("ping", max_tokens=1) == "echo: ping"

    lines = server.lines()
    assert [line["text"] for line in lines] == ["some text", "plain", "x", "ping"]
    assert [line.get("probe", False) for line in lines] == [False, False, False, True]
    assert lines[1]["body_hash"] == body_hash(dict(reversed(user("plain").items())))
    assert {line["pid"] for line in lines} == {server.process.pid}
    assert {line["path"] for line in lines} == {"/v1/chat/completions"}
    assert abs(lines[0]["t"] - time.time()) < 600


def test_openai_client_reads_every_route(start: Start) -> None:
    server = start(None, "--model", "m", "other")
    with openai.OpenAI(base_url=server.url, api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["m", "other"]
        chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        assert chat.choices[0].message.content == "echo: a"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
        texts = client.completions.create(model="other", prompt=["a", "b"])
        assert [choice.text for choice in texts.choices] == ["echo: a", "echo: b"]
        assert client.responses.create(model="m", input="a").output_text == "echo: a"
        both = client.embeddings.create(model="m", input=["a", "b"])
        lone = client.embeddings.create(model="m", input="b", encoding_format="float")
        assert both.data[1].embedding == lone.data[0].embedding != both.data[0].embedding
        with pytest.raises(openai.NotFoundError, match="The model `x` does not exist"):
            client.completions.create(model="x", prompt="a")
    assert len(server.lines()) == 6


def test_key_and_unknown_paths(start: Start) -> None:
    server = start(None, "--key-env", "A_KEY", "--model", "m", A_KEY="secret")
    root = server.url.removesuffix("/v1")
    assert call(f"{root}/health")[0] == 200
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' in call(f"{root}/metrics")[2]
    for key in (None, "wrong"):
        assert call(f"{server.url}/models", key=key)[::2] == (401, {"error": "Unauthorized"})
        assert call(f"{server.url}/completions", {"prompt": "a"}, key)[::2] == (
            401,
            {"error": "Unauthorized"},
        )
    assert call(f"{server.url}/completions", {"prompt": "a"}, "secret")[0] == 200
    assert call(f"{server.url}/nothing", {}, "secret")[::2] == (404, {"detail": "Not Found"})
    error = {
        "message": "The model `x` does not exist.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert call(f"{server.url}/completions", {"model": "x"}, "secret")[::2] == (404, {"error": error})
    done = [line.get("do") for line in server.lines()]
    assert done == ["unauthorized", "unauthorized", None, "not_found", "unknown_model"]


def test_rules(start: Start) -> None:
    actions = ["400", "too_long", "500", "length", "half_json", "empty", "think", "reasoning", "text:given"]
    actions += ["lone_surrogate", "drop", "truncated", "html200", "error200", "null_choices"]
    rules: list[dict[str, Any]] = [{"contains": f"<{action}>", "do": action} for action in actions]
    server = start({"rules": [{"contains": "twice", "do": "503", "times": 2}, *rules], "answer": '{"a": 1}'})
    assert [server.chat("twice")[0] for _ in range(4)] == [503, 503, 200, 200]
    assert server.chat("<400>")[0] == 400
    status, body = server.chat("<too_long>")
    assert status == body["error"]["code"] == 400
    assert body["error"]["message"].startswith("This model's maximum context length is 2048 tokens. However, ")
    assert (body["error"]["type"], body["error"]["param"]) == ("BadRequestError", "input_tokens")
    assert server.chat("<500>")[0] == 500
    assert server.chat("<length>")[1]["choices"][0]["finish_reason"] == "length"
    assert server.answer("<half_json>") == '{"a"'
    assert server.answer("<empty>") == ""
    assert server.answer("<text:given>") == "given"
    assert server.answer("<lone_surrogate>") == "before \ud83d after"
    assert server.answer("<think>").startswith("<think>")
    assert server.answer("<think>").endswith('</think>\n\n{"a": 1}')
    message = server.chat("<reasoning>")[1]["choices"][0]["message"]
    assert message["reasoning"] and message["content"] == '{"a": 1}'
    assert "<html>" in server.chat("<html200>")[1]
    assert server.chat("<error200>")[1]["error"]["code"] == 500
    assert server.chat("<null_choices>")[1]["choices"] is None
    with pytest.raises(http.client.IncompleteRead):
        server.chat("<truncated>")
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        server.chat("<drop>")
    assert server.answer("still there") == '{"a": 1}'
    assert server.lines()[-2]["do"] == "drop"


def test_rates_are_reproducible_and_a_retry_is_drawn_anew(start: Start) -> None:
    script = {"rates": {"500": 0.3, "429": 0.3}, "seed": 7, "retry_after": 3}
    server = start(script)
    known = Script.parse(script)
    seen = set()
    for row in range(20):
        body = user(f"row {row}")
        for attempt in range(3):
            expected = drawn_action(known, body_hash(body), attempt)
            status, headers, _ = call(f"{server.url}/chat/completions", body)
            assert status == int(expected or 200)
            assert headers.get("Retry-After") == ("3" if status == 429 else None)
            seen.add((attempt, status))
    assert {status for _, status in seen} == {200, 429, 500}
    again = start(script)  # on the same log: it goes on with the fourth attempt
    assert again.chat("row 0")[0] == int(drawn_action(known, body_hash(user("row 0")), 3) or 200)
    assert all(again.answer("ping", max_tokens=1) for _ in range(20)), "a probe is exempt"


def test_crashes(start: Start) -> None:
    script = {"die_after": 2, "rules": [{"contains": "poison", "do": "die", "times": 1}]}
    server = start(script)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        server.chat("poison")
    assert server.process.wait(DEADLINE_S) == -signal.SIGKILL
    again = start(script)  # on the same log: the rule is used up
    assert [again.answer("poison"), again.answer("ping", max_tokens=1)] == ["echo: poison", "echo: ping"]
    assert again.answer("second") == "echo: second"
    assert again.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert [line["text"] for line in again.lines()] == ["poison", "poison", "ping", "second"]


def test_capacity_hang_and_sigterm(start: Start) -> None:
    rules = [{"contains": "hangs", "do": "hang"}, {"contains": "slow", "do": "slow"}]
    server = start({"capacity": 2, "slow_s": 3, "rules": rules})
    root = server.url.removesuffix("/v1")

    def running(number: int) -> bool:
        gauge = f'vllm:num_requests_running{{engine="0",model_name="scripted"}} {number}.0\n'
        return gauge in call(f"{root}/metrics")[2]

    host, port = root.removeprefix("http://").split(":")
    client = http.client.HTTPConnection(host, int(port))
    client.request("POST", "/v1/chat/completions", json.dumps(user("it hangs")))
    eventually("the hanging request arrives", lambda: running(1))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.answer, "slow")
        eventually("the slow request arrives", lambda: running(2))
        assert server.chat("one too many")[0] == 429
        assert server.lines()[-1]["do"] == "capacity"
        assert server.answer("ping", max_tokens=1) == "echo: ping"
        client.close()
        eventually("the request that was given up ends", lambda: running(1))
        server.process.send_signal(signal.SIGTERM)
        assert slow.result(DEADLINE_S) == "echo: slow", "what is in flight is finished"
    assert server.process.wait(DEADLINE_S) == 0


def test_a_script_with_a_mistake_is_refused() -> None:
    with pytest.raises(ValueError, match="latencys"):
        Script.parse({"latencys": 1})
    with pytest.raises(ValueError, match="explode"):
        Script.parse({"rules": [{"contains": "", "do": "explode"}]})
    with pytest.raises(ValueError, match="more than 1"):
        Script.parse({"rates": {"500": 0.6, "drop": 0.6}})


@dataclass
class Engine:
    """How a test starts the scripted engine."""

    root: Path
    processes: list[subprocess.Popen[bytes]]

    def start(self, *arguments: str, model: str = "any", **behaviour: Any) -> subprocess.Popen[bytes]:
        """Start it as a vLLM environment's Python is called; its output goes to the file `output`."""
        source = self.root / "engine.json"
        source.write_text(json.dumps({"starts_log": str(self.root / "starts"), **behaviour}))
        command = [
            sys.executable,
            str(HERE / "scripted_engine.py"),
            "-m",
            "vllm.entrypoints.openai.api_server",
        ]
        command += ["--model", model, "--served-model-name", "m", "n", "--tensor-parallel-size", "2"]
        command += ["--enable-prefix-caching", "--max-model-len", "4096", *arguments]
        env = {**os.environ, "SCRIPTED_ENGINE": str(source), "VLLM_API_KEY": "k"}
        with (self.root / "output").open("wb") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        self.processes.append(process)
        return process

    def failed(self, process: subprocess.Popen[bytes]) -> str:
        """What an engine that exits with status 1 printed."""
        assert process.wait(DEADLINE_S) == 1
        return (self.root / "output").read_text()


@pytest.fixture
def engine(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> Engine:
    """Starts scripted engines."""
    return Engine(tmp_path, processes)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def status_of(url: str) -> int | None:
    """The status of a GET, or None while nothing listens."""
    try:
        return call(url)[0]
    except OSError:
        return None


def is_worker(process: int) -> bool:
    """Whether a process is an engine's worker, and alive."""
    return Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"scripted-worker\0")


def over_socket(path: Path, method: str, target: str, body: object = None) -> tuple[int, Any] | None:
    """Status and body of an answer over a Unix socket, or None while nothing listens."""
    client = http.client.HTTPConnection("localhost", timeout=DEADLINE_S)
    client.sock = socket.socket(socket.AF_UNIX)
    try:
        client.sock.connect(str(path))
        client.request(method, target, json.dumps(body), {"Authorization": "Bearer k"})
        response = client.getresponse()
        raw = response.read()
        return response.status, json.loads(raw) if raw else None
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    finally:
        client.close()


def test_engine_serves_and_leaves_workers(engine: Engine) -> None:
    path = engine.root / "s"
    process = engine.start("--uds", str(path), workers=2, boot_s=0.1, log=str(engine.root / "log"))
    assert eventually("it is ready", lambda: over_socket(path, "GET", "/health")) == (200, None)
    models = over_socket(path, "GET", "/v1/models")
    assert models is not None
    assert [(entry["id"], entry["max_model_len"]) for entry in models[1]["data"]] == [
        ("m", 4096),
        ("n", 4096),
    ]
    answer = over_socket(path, "POST", "/v1/chat/completions", user("a"))
    assert answer is not None and answer[1]["choices"][0]["message"]["content"] == "echo: a"
    assert "\n" in (engine.root / "log").read_text()
    assert (engine.root / "starts").read_text() == f"{process.pid}\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [int(child) for child in children]
    try:
        assert len(workers) == 2
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        for worker in workers:
            assert os.getsid(worker) == worker
            eventually("it has its name", partial(is_worker, worker))
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def test_engine_fails(engine: Engine) -> None:
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", str(port))
    output = engine.failed(engine.start(*flags, model=str(engine.root / "nothing")))
    assert "Traceback" in output and "is not a valid model path" in output
    assert "ValueError: " in engine.failed(engine.start(*flags, fail="exit"))
    for _ in range(2):
        output = engine.failed(engine.start(*flags, fail="port_in_use", fail_times=2))
        assert "OSError: [Errno 98] Address already in use" in output
    engine.start(*flags, fail="port_in_use", fail_times=2)
    health = f"http://127.0.0.1:{port}/health"
    assert eventually("the third start listens", lambda: status_of(health)) == 200
    assert "address already in use" in engine.failed(engine.start(*flags)), "a port that is really in use"
    engine.processes[-2].kill()
    engine.processes[-2].wait()
    engine.start(*flags, fail="never_ready")
    assert eventually("it listens", lambda: status_of(health)) == 503
    assert len((engine.root / "starts").read_text().splitlines()) == 7
