"""The client's way to an endpoint: what the OpenAI client makes of everything that can go wrong on it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from gristmill.transport import EngineClient

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def heard(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    """First line, headers and body of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return head[0], headers, await reader.readexactly(int(headers.get("content-length", 0)))


async def asked(answer: Answer, timeout: float = 5.0, uds: Path | None = None) -> httpx2.Response:
    """What a post gets from a server that answers so."""
    ended = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        ended.append(writer)

    if uds is not None:
        server = await asyncio.start_unix_server(connected, uds)
        url = "http://localhost/v1"
    else:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    client = AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=EngineClient(uds, trust_env=False))
    try:
        return await client.post(
            "/chat/completions", cast_to=httpx2.Response, content=b'{"a": 1}', options={"timeout": timeout}
        )
    finally:
        await client.close()
        server.close()
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_request_arrives_as_it_is(over: str, tmp_path: Path) -> None:
    seen = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await heard(reader))
        writer.write(OK.replace(b"\r\n\r\n", b"\r\nRetry-After: 7\r\n\r\n"))
        await writer.drain()

    response = asyncio.run(asked(answer, uds=tmp_path / "s" if over == "unix" else None))
    ((line, headers, body),) = seen
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert body == b'{"a": 1}'
    assert headers["authorization"] == "bearer k"
    assert headers["content-type"] == "application/json"
    assert headers["host"].startswith("127.0.0.1:" if over == "tcp" else "localhost")
    assert (response.status_code, response.content, response.headers["retry-after"]) == (200, b"{}", "7")


def test_a_compressed_answer_is_read() -> None:
    import gzip

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard(reader)
        text = gzip.compress(b'{"b": 2}')
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(text)
        writer.write(head + text)
        await writer.drain()

    assert asyncio.run(asked(answer)).content == b'{"b": 2}'


def test_a_body_that_comes_in_drops_is_not_waited_for_for_ever() -> None:
    """The timeout is that of the whole answer."""

    async def drops(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        try:
            for _ in range(100):
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.05)
        except ConnectionError:
            pass

    began = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        asyncio.run(asked(drops, timeout=0.5))
    assert time.monotonic() - began < 3


def test_a_connection_that_breaks_is_no_timeout() -> None:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard(reader)
        writer.write(OK[:-1])
        await writer.drain()

    with pytest.raises(openai.APIConnectionError) as caught:
        asyncio.run(asked(breaks))
    assert not isinstance(caught.value, openai.APITimeoutError)
    assert isinstance(caught.value.__cause__, httpx2.ReadError)


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"

    async def ask() -> None:
        async with AsyncOpenAI(base_url=url, api_key="k", max_retries=0, http_client=EngineClient()) as client:
            await client.post("/chat/completions", cast_to=httpx2.Response, content=b"{}")

    with pytest.raises(openai.APIConnectionError) as caught:
        asyncio.run(ask())
    assert isinstance(caught.value.__cause__, httpx2.ConnectError)


def test_a_redirect_is_not_followed() -> None:
    async def moved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await heard(reader)
        writer.write(b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    with pytest.raises(openai.APIStatusError) as caught:
        asyncio.run(asked(moved))
    assert caught.value.status_code == 307
