"""The front door of an endpoint, on real sockets: what passes, what is refused, and what breaks with what."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

import conftest
from gristmill import frontdoor
from gristmill.errors import GristmillError
from gristmill.frontdoor import FrontDoor, Upstream

KEY = "sk-the-key-of-the-door"
ENGINE_KEY = "the-engines-own-key"
DEADLINE_S = 20.0
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Arrived:
    """A request as an engine got it. lines: request line and fields. gone: set when the peer has hung up."""

    lines: list[str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def values(self, name: str) -> list[str]:
        fields = (line.partition(": ") for line in self.lines[1:])
        return [value for key, _, value in fields if key.lower() == name.lower()]

    def names(self) -> set[str]:
        return {line.partition(":")[0].lower() for line in self.lines[1:]}

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; b"" at its end."""
        size = int(await self.reader.readline(), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def read_body(self) -> None:
        if self.values("Content-Length"):
            self.body = await self.reader.readexactly(int(self.values("Content-Length")[0]))
        elif self.values("Transfer-Encoding"):
            while part := await self.chunk():
                self.body += part

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def watch(self) -> None:
        """Wait for the peer to hang up."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()
        self.gone.set()


Act = Callable[[Arrived], Awaitable[None]]


async def say_ok(got: Arrived) -> None:
    await got.read_body()
    await got.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


class Engine:
    """An engine made of plain sockets: one Unix socket; `act` reads the body, if it likes, and answers."""

    def __init__(self, folder: Path, act: Act = say_ok, name: str = "s") -> None:
        self.path = folder / name
        self.act = act
        self.arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        self.seen: list[Arrived] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def upstream(self) -> Upstream:
        return Upstream("http://localhost", self.path, ENGINE_KEY)

    async def start(self, **settings: Any) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self.path, limit=1 << 20, **settings)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                got = Arrived(head[:-4].split("\r\n"), reader, writer)
                self.seen.append(got)
                self.arrived.put_nowait(got)
                await self.act(got)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.sleep(0)


class Client:
    """A plain socket to the door."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and fields (names in lower case) of an answer."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")[:-4].split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, _, value in pairs}

    async def answer(self, *, bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
        """Status, fields and body of a whole answer. Raises IncompleteReadError for half a one."""
        status, fields = await self.head()
        body = b""
        if bodiless:
            pass
        elif "content-length" in fields:
            body = await self.reader.readexactly(int(fields["content-length"]))
        elif fields.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        else:
            body = await self.reader.read()
        return status, fields, body

    def hang_up(self) -> None:
        self.writer.transport.abort()


class House:
    """A door, an engine behind it, and clients before it."""

    def __init__(self, engine: Engine, door: FrontDoor, port: int) -> None:
        self.engine, self.door, self.port = engine, door, port
        self.clients: list[Client] = []

    async def client(self) -> Client:
        made = Client(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20))
        self.clients.append(made)
        return made

    async def ask(
        self, head: str, fields: dict[str, str] | None = None, body: bytes = b""
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own, with the key unless `fields` has a key or an empty one."""
        client = await self.client()
        await client.send(request(head, fields, body))
        return await client.answer(bodiless=head.startswith("HEAD"))

    async def settled(self) -> None:
        """Wait until nothing is in flight."""
        assert await self.door.drained(DEADLINE_S)


def request(head: str, fields: dict[str, str] | None = None, body: bytes = b"") -> bytes:
    given = {"Host": "door", "Authorization": f"Bearer {KEY}", **(fields or {})}
    if body:
        given["Content-Length"] = str(len(body))
    lines = [f"{head} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


@contextlib.asynccontextmanager
async def house(act: Act = say_ok, *, serve: bool = True) -> AsyncIterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="door-"))
    engine, door = Engine(folder, act), FrontDoor(KEY, lambda: {"model": "m"})
    await engine.start()
    made = House(engine, door, await door.open("127.0.0.1"))
    if serve:
        door.serve(engine.upstream)
    try:
        yield made
    finally:
        for client in made.clients:
            client.hang_up()
        await door.close()
        await engine.stop()
        shutil.rmtree(folder)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test, which fails when it takes longer than the deadline."""
    asyncio.run(asyncio.wait_for(test, DEADLINE_S))


def error_of(body: bytes) -> dict[str, Any]:
    error = json.loads(body)["error"]
    assert isinstance(error["message"], str) and set(error) == {"message", "type", "param", "code"}
    assert KEY not in str(error) and ENGINE_KEY not in str(error)
    found: dict[str, Any] = error
    return found


# Who is let in, and when.


def test_states() -> None:
    async def test() -> None:
        async with house(serve=False) as here:

            async def look() -> tuple[int, bytes, int, dict[str, str], bytes]:
                status, _, health = await here.ask("GET /health", {"Authorization": ""})
                return status, health, *await here.ask("POST /v1/completions", body=b"{}")

            for change, state, retry in (
                (None, "starting", True),
                (lambda: here.door.suspend("it died"), "restarting", True),
                (lambda: here.door.serve(here.engine.upstream), "ready", False),
                (lambda: here.door.suspend("it died"), "restarting", True),
                (lambda: here.door.serve(here.engine.upstream), "ready", False),
                (lambda: here.door.refuse("the walltime ends"), "draining", False),
                (lambda: here.door.serve(here.engine.upstream), "draining", False),
            ):
                if change is not None:
                    change()
                health, body, status, fields, answer = await look()
                assert json.loads(body) == {"status": state}
                assert (health, status) == ((200, 200) if state == "ready" else (503, 503))
                assert ("retry-after" in fields) == retry
                if state != "ready":
                    assert error_of(answer)["code"] == state
                if state == "draining":
                    assert "the walltime ends" in error_of(answer)["message"]
            assert len(here.engine.seen) == 2

    run(test())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {KEY[:-1]}"},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer \xff\xfe"},
        {"X-Api-Key": "wrong"},
        {"X-Api-Key": ENGINE_KEY},
    ],
)
def test_wrong_key(fields: dict[str, str]) -> None:
    async def test() -> None:
        async with house() as here:
            for head in ("POST /v1/chat/completions", "GET /gristmill/status", "POST /gristmill/stop", "GET /healthy"):
                status, got, body = await here.ask(head, {"Authorization": "", **fields})
                assert (status, got["www-authenticate"]) == (401, "Bearer")
                error = error_of(body)
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert not here.engine.seen and not here.door.stop_requested.is_set()

    run(test())


@pytest.mark.parametrize(
    "fields",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {KEY}"},
        {"Authorization": "", "x-api-key": KEY},
        {"Authorization": "Bearer other", "X-API-KEY": KEY},
    ],
)
def test_the_key_stays_at_the_door(fields: dict[str, str]) -> None:
    async def test() -> None:
        async with house() as here:
            status, _, body = await here.ask("POST /v1/messages", fields, b"{}")
            assert (status, body) == (200, b"ok")
            got = here.engine.seen[0]
            assert got.values("Authorization") == [f"Bearer {ENGINE_KEY}"] and not got.values("x-api-key")
            assert KEY not in "".join(got.lines)

    run(test())


def test_refused_before_the_body_is_read() -> None:
    async def test() -> None:
        async with house() as here:
            client = await here.client()
            await client.send(request("POST /v1/completions", {"Authorization": "", "Content-Length": "20000000"}))
            status, fields, _ = await client.answer()
            assert (status, fields["connection"]) == (401, "close")

    run(test())


@pytest.mark.parametrize("path", ["/health", "/health?x=1", "/%68ealth", "http://elsewhere/health"])
def test_health_is_the_doors(path: str) -> None:
    async def test() -> None:
        async with house() as here:
            status, _, body = await here.ask(f"GET {path}", {"Authorization": ""})
            assert (status, json.loads(body)) == (200, {"status": "ready"})
            assert (await here.ask(f"HEAD {path}"))[::2] == (200, b"")
            assert not here.engine.seen

    run(test())


# What passes.


def test_fields_both_ways() -> None:
    async def answer(got: Arrived) -> None:
        await got.read_body()
        lines = ["HTTP/1.1 218 Fine Too", "Connection: X-Hop, keep-alive", "X-Hop: 1", "Keep-Alive: timeout=5"]
        lines += ["Proxy-Authenticate: Basic", "Trailer: X", "Upgrade: h2c", "Set-Cookie: a=1", "Set-Cookie: b=2"]
        lines += ["Content-Encoding: gzip", "Server: engine", "X-Request-Id: \xc3\xa9", "Content-Length: 8"]
        await got.send("\r\n".join([*lines, "", "not gzip"]).encode("latin-1"))

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            lines = ["POST /v1/x HTTP/1.1", "Host: door", f"x-api-key: {KEY}", "Connection: X-Named, upgrade, TE"]
            lines += ["X-Named: 1", "Keep-Alive: 5", "Proxy-Connection: x", "Proxy-Authorization: y", "TE: trailers"]
            lines += ["Trailer: Z", "Upgrade: h2c", "X-Two: 1", "X-Two: 2", "Cookie: a=b; c", "X-Odd:  a\tb "]
            lines += ["Content-Encoding: gzip", "Content-Length: 3", "Authorization: Basic other"]
            await client.send("\r\n".join([*lines, "", "abc"]).encode())
            status, fields, body = await client.answer()
            got = here.engine.seen[0]
            names = {"host", "x-two", "cookie", "x-odd", "content-encoding", "content-length", "authorization"}
            assert got.names() == names
            assert got.values("X-Two") == ["1", "2"] and got.values("Host") == ["localhost"]
            assert got.values("X-Odd") == ["a\tb"] and got.values("Cookie") == ["a=b; c"] and got.body == b"abc"
            assert (status, body) == (218, b"not gzip")
            names = {"set-cookie", "content-encoding", "server", "x-request-id", "content-length", "date"}
            assert set(fields) == {*names, "content-type"}  # the last two are aiohttp's
            assert (fields["server"], fields["x-request-id"]) == ("engine", "\xc3\xa9")

    run(test())


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ("/a%2Fb%41/../c%20d?x=%C3%A9&y=[1]&z", None),
        ("//double//slash?", None),
        ("/%", None),
        ("/?", None),
        ("/plus+semi;x=1?q=a+b?c", None),
        ("http://elsewhere:1/v1/x%2f?y", "/v1/x%2f?y"),
        ("http://elsewhere?y", "/?y"),
    ],
)
def test_targets_are_untouched(sent: str, arrives: str | None) -> None:
    async def test() -> None:
        async with house() as here:
            assert (await here.ask(f"GET {sent}"))[0] == 200
            assert here.engine.seen[0].lines[0] == f"GET {arrives or sent} HTTP/1.1"

    run(test())


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE", "PUT", "PATCH", "GET"])
def test_methods(method: str) -> None:
    async def answer(got: Arrived) -> None:
        body = b"" if method == "HEAD" else b"1234567"
        await got.send(b"HTTP/1.1 200 OK\r\nAllow: GET\r\nContent-Length: 7\r\n\r\n" + body)

    async def test() -> None:
        async with house(answer) as here:
            status, fields, body = await here.ask(f"{method} /v1/models")
            assert (status, fields["allow"], fields["content-length"]) == (200, "GET", "7")
            assert body == (b"" if method == "HEAD" else b"1234567")
            assert here.engine.seen[0].lines[0] == f"{method} /v1/models HTTP/1.1"
            assert (
                not {"accept", "user-agent", "accept-encoding", "content-type", "transfer-encoding"}
                & here.engine.seen[0].names()
            )

    run(test())


def test_large_bodies() -> None:
    async def echo(got: Arrived) -> None:
        await got.read_body()
        await got.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(got.body) + got.body)

    async def test() -> None:
        body = hashlib.shake_128(b"x").digest(20_000_000)
        async with house(echo) as here:
            client = await here.client()
            _, (status, _, back) = await asyncio.gather(client.send(request("POST /v1/x", body=body)), client.answer())
            assert status == 200 and back == body

    run(test())


def test_chunked_request_is_passed_on_as_it_comes() -> None:
    async def answer(got: Arrived) -> None:
        for expected in (b"one", b"two", b""):
            assert await got.chunk() == expected
            got.body += expected
            read.put_nowait(expected)
        await got.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(got.body) + got.body)

    read: asyncio.Queue[bytes] = asyncio.Queue()

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            await client.send(request("POST /v1/x", {"Transfer-Encoding": "chunked"}) + b"3\r\none\r\n")
            assert await read.get() == b"one"  # before the rest is sent
            await client.send(b"3;x=y\r\ntwo\r\n0\r\nX-Trailer: 1\r\n\r\n")
            assert (await client.answer())[2] == b"onetwo"
            assert "content-length" not in here.engine.seen[0].names()

    run(test())


@pytest.mark.parametrize("length", [None, 8])
def test_streams_without_delay(length: int | None) -> None:
    async def answer(got: Arrived) -> None:
        await got.read_body()
        if length is None:
            await got.send(CHUNKED)
        else:
            await got.send(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n")
        for part in (b"tick", b"tock"):
            await gate.acquire()
            await got.send(part if length else b"4\r\n%b\r\n" % part)
        if length is None:
            await got.send(b"0\r\n\r\n")

    gate = asyncio.Semaphore(0)

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            await client.send(request("POST /v1/x", body=b"{}"))
            assert (await client.head())[0] == 200  # before the engine has sent a byte of the body
            for part in (b"tick", b"tock"):
                gate.release()
                expected = part if length else b"4\r\n%b\r\n" % part
                assert await client.reader.readexactly(len(expected)) == expected
            if length is None:
                assert await client.reader.readexactly(5) == b"0\r\n\r\n"
            await here.settled()

    run(test())


def test_many_requests_on_one_connection() -> None:
    async def test() -> None:
        async with house() as here:
            client = await here.client()
            for turn in range(3):
                await client.send(request(f"POST /v1/{turn}", body=b"{}"))
                assert (await client.answer())[::2] == (200, b"ok")
            await client.send(request("GET /v1/3") + request("GET /v1/4"))
            assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
            assert [got.lines[0].split()[1] for got in here.engine.seen] == [f"/v1/{turn}" for turn in range(5)]

    run(test())


def test_engine_that_answers_before_the_body_has_come() -> None:
    async def answer(got: Arrived) -> None:
        await got.send(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig")
        raise ConnectionError

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            await client.send(request("POST /v1/x", {"Content-Length": "1000000"}) + b"x" * 1000)
            assert (await client.answer())[::2] == (413, b"big")
            await here.settled()

    run(test())


def test_expect_continue() -> None:
    async def test() -> None:
        async with house() as here:
            fields = {"Content-Length": "3", "Expect": "100-continue"}
            client = await here.client()
            await client.send(request("POST /v1/x", fields))
            assert await client.head() == (100, {})
            await client.send(b"abc")
            assert (await client.answer())[::2] == (200, b"ok")
            assert here.engine.seen[0].body == b"abc" and not here.engine.seen[0].values("Expect")
            other = await here.client()
            await other.send(request("POST /v1/x", {**fields, "Authorization": ""}))
            assert (await other.answer())[0] == 401
            assert (await here.ask("POST /v1/x", {"Expect": "wonders"}))[0] == 417

    run(test())


def test_websocket_is_refused() -> None:
    async def test() -> None:
        async with house() as here:
            fields = {"Connection": "Upgrade", "Upgrade": "WebSocket", "Sec-WebSocket-Version": "13"}
            status, _, body = await here.ask("GET /v1/realtime", fields)
            assert status == 501 and error_of(body)
            client = await here.client()
            await client.send(request("CONNECT elsewhere:443"))
            assert (await client.answer())[0] == 501
            assert not here.engine.seen

    run(test())


def test_more_requests_at_once_than_the_engines_backlog() -> None:
    async def test() -> None:
        async with house(serve=False) as here:
            busy = here.engine.path.with_name("busy")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(busy))
                listener.listen(1)
                listener.setblocking(False)
                here.door.serve(Upstream("http://localhost", busy, ENGINE_KEY))
                asked = [asyncio.create_task(here.ask("POST /v1/x", body=b"{}")) for _ in range(12)]
                while here.door.in_flight < 12:
                    await asyncio.sleep(0.01)
                server = await asyncio.start_unix_server(here.engine._connected, sock=listener)
                assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 12
                server.close()

    run(test())


def test_no_limit_to_requests_at_once() -> None:
    async def answer(got: Arrived) -> None:
        await got.read_body()
        await gate.wait()
        await got.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    gate = asyncio.Event()

    async def test() -> None:
        async with house(answer) as here:
            for socket_ in (here.engine.path, None):
                gate.clear()
                if socket_ is None:
                    server = await asyncio.start_server(here.engine._connected, "127.0.0.1", limit=1 << 20)
                    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                    here.door.serve(Upstream(url, None, ENGINE_KEY))
                asked = [asyncio.create_task(here.ask("POST /v1/x", body=b"{}")) for _ in range(110)]
                for _ in range(110):
                    await here.engine.arrived.get()  # all are with the engine before any is answered
                assert here.door.in_flight == 110
                gate.set()
                assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
            server.close()

    run(test())


def test_openai_client(server: conftest.Server) -> None:
    server.start()

    async def test() -> None:
        async with house(serve=False) as here:
            here.door.serve(Upstream(server.url.removesuffix("/v1"), None, conftest.KEY))  # by its port
            url = f"http://127.0.0.1:{here.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                made = await client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": "hello"}]
                )
                assert made.choices[0].message.content == "echo: hello"
                with pytest.raises(openai.BadRequestError):  # an error of the engine's
                    await client.completions.create(model="scripted", prompt="x", stream=True)
            async with AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await client.models.list()
                assert caught.value.code == "invalid_api_key"

    run(test())


def test_openai_client_streams() -> None:
    async def answer(got: Arrived) -> None:
        await got.read_body()
        await got.send(CHUNKED)
        for word in ("all", "is", "well"):
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            data = json.dumps({**chunk, "choices": [{"index": 0, "delta": {"content": word}}]}).encode()
            await got.send(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))
            await gate.acquire()
        await got.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    gate = asyncio.Semaphore(0)

    async def test() -> None:
        async with house(answer) as here:
            url = f"http://127.0.0.1:{here.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                words = []
                async for chunk in await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hello"}], stream=True
                ):
                    words.append(chunk.choices[0].delta.content)
                    assert here.door.in_flight == 1
                    gate.release()  # the engine goes on only when its word has come through
                assert words == ["all", "is", "well"]

    run(test())


# What breaks.


@pytest.mark.parametrize("begun", [False, True])
def test_client_that_hangs_up(begun: bool) -> None:
    async def answer(got: Arrived) -> None:
        await got.read_body()
        if begun:
            await got.send(CHUNKED + b"4\r\ntick\r\n")
        await got.watch()

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            await client.send(request("POST /v1/x", body=b"{}"))
            got = await here.engine.arrived.get()
            if begun:
                await client.head()
            assert here.door.in_flight == 1
            client.hang_up()
            await got.gone.wait()  # the engine learns it
            await here.settled()

    run(test())


def test_client_that_hangs_up_in_its_body() -> None:
    async def test() -> None:
        async with house(Arrived.watch) as here:
            client = await here.client()
            await client.send(request("POST /v1/x", {"Transfer-Encoding": "chunked"}) + b"4\r\n{..}\r\n")
            got = await here.engine.arrived.get()
            client.hang_up()
            await got.gone.wait()
            await here.settled()

    run(test())


def test_half_a_body_is_not_passed_on_as_a_whole_one(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(got: Arrived) -> None:
        assert await got.chunk() == b"{..}"
        begun.set()
        rest.append(await got.reader.read())
        got.gone.set()

    begun, rest = asyncio.Event(), []

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            await client.send(request("POST /v1/x", {"Transfer-Encoding": "chunked"}) + b"4\r\n{..}\r\n")
            await begun.wait()
            await client.send(b"this is no chunk\r\n")
            status, _, body = await client.answer()
            assert status == 400 and error_of(body)["code"] == "bad_request"
            await here.engine.seen[0].gone.wait()
            assert rest == [b""]  # no last chunk
            assert await client.reader.read() == b""  # a connection in that state is of no use

    run(test())
    assert not caplog.text


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "head",
    [CHUNKED + b"4\r\ntick\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ntick"],
    ids=["chunked", "sized"],
)
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_engine_that_dies_in_its_answer(head: bytes, reset: bool, version: str) -> None:
    async def answer(got: Arrived) -> None:
        await got.send(head)
        await die.wait()
        if reset:
            got.writer.transport.abort()
        raise ConnectionError

    die = asyncio.Event()

    async def test() -> None:
        async with house(answer) as here:
            client = await here.client()
            await client.send(request("GET /v1/x").replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))
            await client.head()
            while not (await client.reader.read(1)).endswith(b"t"):
                pass
            die.set()
            if version == "1.0":  # where the end of the connection is that of the answer
                with pytest.raises(ConnectionResetError):
                    await client.reader.read()
            else:
                rest = await client.reader.read()
                assert len(rest) < 90 and not rest.endswith(b"0\r\n\r\n")
            await here.settled()
            assert here.door.in_flight == 0

    run(test())


def test_engine_that_cannot_be_reached() -> None:
    async def hang_up(got: Arrived) -> None:
        raise ConnectionError

    async def test() -> None:
        async with house(hang_up) as here:
            for socket_, url in (
                (here.engine.path, "http://localhost"),  # answers nothing
                (here.engine.path.with_name("missing"), "http://localhost"),
                (None, "http://127.0.0.1:1"),
            ):
                here.door.serve(Upstream(url, socket_, ENGINE_KEY))
                for head in ("POST /v1/x", "GET /v1/models"):
                    status, _, body = await here.ask(head, body=b"{}" if "POST" in head else b"")
                    assert (status, error_of(body)["type"]) == (502, "upstream_error")
            assert here.door.in_flight == 0

    run(test())


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4",
        b"Content-Length: 0\r\nContent-Length: %d" % len(SMUGGLED),
        b"Content-Length: +0",
        b"Content-Length: 0, 5",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
        b"X: y\r\n Transfer-Encoding: chunked",
        b"X: y\nTransfer-Encoding: chunked",
        b"X: a\x00b",
        b"X: a\rb",
    ],
)
def test_smuggling(fields: bytes) -> None:
    async def test() -> None:
        async with house() as here:
            client = await here.client()
            body = b"0\r\n\r\n" + SMUGGLED
            await client.send(request("POST /v1/x")[:-2] + fields + b"\r\n\r\n" + body)
            status, _, answer = await client.answer()
            assert status in (400, 501) and error_of(answer)
            assert not here.engine.seen
            assert (await here.ask("GET /v1/x"))[0] == 200

    run(test())


def test_body_is_no_second_request() -> None:
    async def test() -> None:
        async with house() as here:
            await here.ask("POST /v1/x", {"Connection": "content-length"}, SMUGGLED)
            await here.ask("GET /v1/y", {"Connection": "content-length"}, SMUGGLED)
            assert [got.lines[0].split()[1] for got in here.engine.seen] == ["/v1/x", "/v1/y"]
            assert [got.body for got in here.engine.seen] == [SMUGGLED, SMUGGLED]

    run(test())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 40 + b"\r\n\r\n",
        b"hello " + KEY.encode() + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v1/x HTTP/1.1\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n",  # no Host
        b"GET /v1/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\x00\r\n\r\n",
        b"BREW /v1/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        b"GET /v1/x HTTP/9.9\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        b"GET /v1/x HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET http://[bad/ HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + KEY.encode() + b"\r\n",
    ],
)
def test_bad_requests(sent: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    caplog.set_level(logging.DEBUG)

    async def test() -> None:
        async with house() as here:
            client = await here.client()
            await client.send(sent)
            status, _, body = await client.answer()
            if not sent.startswith(b"POST /health"):
                assert status == 400 and error_of(body)["type"] == "invalid_request_error"
            assert not here.engine.seen
            assert (await here.ask("GET /v1/x"))[0] == 200

    run(test())
    for said in (caplog.text, *capfd.readouterr()):
        assert KEY not in said and ENGINE_KEY not in said and "unexpected" not in said


def test_trouble_of_our_own_names_no_key(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError(KEY)

    async def test() -> None:
        async with house() as here:
            here.door._status = fail
            status, _, body = await here.ask("GET /gristmill/status")
            assert (status, error_of(body)["code"]) == (500, "internal_error")
            assert (await here.ask("GET /v1/x"))[0] == 200
            assert KEY not in repr(here.door) + repr(vars(here.door))
            assert ENGINE_KEY not in repr(here.engine.upstream)

    run(test())
    said = capfd.readouterr().err
    assert "unexpected RuntimeError" in said and "in fail" in said and KEY not in said


# The lease, and the end.


def test_what_counts_as_use(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(frontdoor, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def answer(got: Arrived) -> None:
        begun.set()
        await gate.acquire()
        await say_ok(got)

    gate, begun = asyncio.Semaphore(0), asyncio.Event()

    async def test() -> None:
        async with house(answer, serve=False) as here:
            door = here.door
            clock.now = 300.0
            assert door.idle_s == 300
            door.serve(here.engine.upstream)  # a start is no idleness
            assert door.idle_s == 0
            clock.now += 10
            door.suspend("it died")
            door.serve(here.engine.upstream)  # a restart is
            await here.ask("GET /health")
            await here.ask("GET /v1/models", {"Authorization": "Bearer wrong"})
            status, _, body = await here.ask("GET /gristmill/status")
            assert (status, json.loads(body)) == (200, {"model": "m", "state": "ready", "in_flight": 0, "idle_s": 10})
            assert door.idle_s == 10
            asked = asyncio.create_task(here.ask("GET /v1/models"))
            await begun.wait()
            clock.now += 100
            assert (door.in_flight, door.idle_s) == (1, 0)
            gate.release()
            await asked
            assert (door.in_flight, door.idle_s) == (0, 0)
            clock.now += 5
            assert door.idle_s == 5
            assert (await here.ask("GET /gristmill/renew"))[0] == 405
            assert door.idle_s == 5
            assert (await here.ask("POST /gristmill/renew"))[0] == 200
            assert door.idle_s == 0
            clock.now += 5
            door.suspend("it died")
            await here.ask("GET /v1/models")  # somebody wants it
            assert door.idle_s == 0

    run(test())


def test_stop() -> None:
    async def test() -> None:
        async with house() as here:
            assert (await here.ask("GET /gristmill/stop"))[0] == 405
            assert (await here.ask("POST /gristmill/other"))[0] == 404
            assert not here.door.stop_requested.is_set()
            assert (await here.ask("POST /gristmill/stop"))[0] == 202
            assert here.door.stop_requested.is_set() and not here.engine.seen

    run(test())


def test_draining_and_closing() -> None:
    async def answer(got: Arrived) -> None:
        await got.send(CHUNKED + b"4\r\ntick\r\n")
        watch = asyncio.create_task(got.watch())
        await gate.acquire()
        watch.cancel()
        await got.send(b"0\r\n\r\n")
        raise ConnectionError

    gate = asyncio.Semaphore(0)

    async def test() -> None:
        async with house(answer) as here:
            first, second = await here.client(), await here.client()
            for client in (first, second):
                await client.send(request("GET /v1/x"))
                assert (await client.head())[0] == 200
                assert await client.reader.readexactly(9) == b"4\r\ntick\r\n"
            here.door.refuse("the walltime ends")
            assert (await here.ask("GET /v1/x"))[0] == 503
            assert not await here.door.drained(0.05)
            gate.release()
            assert await first.reader.readexactly(5) == b"0\r\n\r\n"  # what was in flight goes on
            while here.door.in_flight > 1:
                await asyncio.sleep(0.01)
            idle = await here.client()
            await here.door.close()
            assert await second.reader.read() == b""  # cut: no last chunk
            assert await idle.reader.read() == b""
            await here.engine.seen[1].gone.wait()
            assert here.door.in_flight == 0 and await here.door.drained(0)
            with pytest.raises(ConnectionRefusedError):
                await here.client()

    run(test())


def test_answer_has_ended_when_the_kernel_has_it() -> None:
    async def answer(got: Arrived) -> None:
        await got.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
        sent.set()

    size, sent = 1 << 16, asyncio.Event()

    async def test() -> None:
        async with house(answer) as here:
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.connect(("127.0.0.1", here.port))
                while not (connections := here.door._server.connections):
                    await asyncio.sleep(0.01)
                plug = connections[0].transport.get_extra_info("socket")
                plug.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
                slow.sendall(request("GET /v1/x"))
                await sent.wait()
                assert not await here.door.drained(0.3)  # it reads nothing yet
                slow.setblocking(False)
                loop, left = asyncio.get_running_loop(), size
                while left > 0:
                    left -= len(await loop.sock_recv(slow, 1 << 16))
                await here.settled()

    run(test())


def test_restart_leaves_the_old_engine() -> None:
    async def test() -> None:
        async with house(Arrived.watch) as here:
            client = await here.client()
            await client.send(request("GET /v1/x"))
            old = await here.engine.arrived.get()
            new = Engine(here.engine.path.parent, name="new")
            await new.start()
            here.door.suspend("it hangs")
            here.door.serve(Upstream("http://localhost", new.path, "another-key"))
            assert (await client.answer())[0] == 502
            await old.gone.wait()
            assert (await here.ask("GET /v1/x"))[0] == 200
            assert new.seen[0].values("Authorization") == ["Bearer another-key"]
            await new.stop()

    run(test())


def test_port_that_is_taken() -> None:
    async def test() -> None:
        async with house() as here:
            with pytest.raises(GristmillError, match="cannot listen") as caught:
                await FrontDoor(KEY, dict).open("127.0.0.1", here.port)
            assert caught.value.where == f"127.0.0.1:{here.port}"
            with pytest.raises(ValueError):
                FrontDoor("", dict)

    run(test())
