"""The HTTP front of a long-lived endpoint: a reverse proxy from a TCP port to an engine that only this process reaches.

Requests and answers are passed on as streams and as they are: no limit on size, no timeout, nothing held back,
nothing decompressed. Only hop-by-hop fields (RFC 9110, section 7.6.1), Host and the key are changed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import resource
import socket
import struct
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import orjson
from aiohttp import ClientTimeout, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from gristmill.errors import GristmillError

_BACKLOG = 4096
_RETRY_S = 5  # what clients are told to wait while the engine starts
_REUSE_S = 2.0  # a connection idle for longer is not used again: engines close theirs after 5 s, maybe just then
_CONNECT_PAUSE_S = 0.01
_FIELD_BYTES = 1 << 16
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
_OURS = {"host", "authorization", "x-api-key", "expect"}
_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_ORIGIN = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")
_TYPES = {401: "authentication_error", 500: "server_error", 502: "upstream_error", 503: "service_unavailable"}
_STARTING, _READY, _RESTARTING, _DRAINING = "starting", "ready", "restarting", "draining"
# aiohttp logs clients' errors, and may quote what they sent; ours are printed by `_Connection.handle_error`.
_SILENT = logging.Logger("gristmill.frontdoor", logging.CRITICAL + 1)


@dataclass(frozen=True)
class Upstream:
    """Where the engine listens, on a Unix socket or (None) at the URL's port, and the engine's own key."""

    url: str
    socket: Path | None
    key: str = field(repr=False)


class FrontDoor:
    """Lets in who has the key. `status` gives what GET /gristmill/status shows besides in_flight and idle_s."""

    def __init__(self, key: str, status: Callable[[], dict[str, Any]]) -> None:
        if not key:
            raise ValueError("a front door needs a key")
        self._digest = _digest(key)
        self._status = status
        self._state, self._why = _STARTING, ""
        self._engine: _EngineClient | None = None
        self._server: _Server | None = None
        self._listener: asyncio.Server | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._last_use = time.monotonic()
        self.stop_requested = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Requests that are with the engine, their answers not yet wholly handed to the kernel."""
        return len(self._running)

    @property
    def idle_s(self) -> float:
        """Seconds since the last request with the key ended or the lease was renewed; 0 while one is in flight."""
        return 0.0 if self._running else time.monotonic() - self._last_use

    def renew(self) -> None:
        """Count idleness from now."""
        self._last_use = time.monotonic()

    async def open(self, host: str, port: int = 0) -> int:
        """Listen on the first address of `host`, IPv4 before IPv6; gives the port. Raises GristmillError."""
        _raise_file_limit()
        loop = asyncio.get_running_loop()
        self._server = _Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=_SILENT,
            auto_decompress=False,
            max_field_size=_FIELD_BYTES,
            max_line_size=_FIELD_BYTES,
        )
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            address = min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0]
            self._listener = await loop.create_server(self._server, str(address), port, backlog=_BACKLOG)
        except OSError as error:
            raise GristmillError(
                f"cannot listen: {error.strerror or error}",
                where=f"{host}:{port}",
                help="choose another host or port; port 0 takes a free one",
            ) from error
        chosen: int = self._listener.sockets[0].getsockname()[1]
        return chosen

    def serve(self, upstream: Upstream) -> None:
        """Pass requests on from now; what is still in flight to an earlier engine is cut. Needs a running loop."""
        self._leave_engine()
        self._engine = _EngineClient(upstream)
        if self._state == _STARTING:
            self.renew()
        self._become(_READY, "")

    def suspend(self, why: str) -> None:
        """Answer 503 while the engine is started again, until `serve`."""
        self._become(_RESTARTING, why)

    def refuse(self, why: str) -> None:
        """Answer 503 from now until the end; requests in flight go on."""
        self._become(_DRAINING, why)

    def _become(self, state: str, why: str) -> None:
        if self._state != _DRAINING:
            self._state, self._why = state, why

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no request is in flight, at most so many seconds; whether that came true."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            pass
        return not self._running

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        self.refuse("the endpoint has ended")
        if self._listener is not None:
            self._listener.close()
        for task in self._running:
            task.cancel()
        await self._empty.wait()
        if self._server is not None:
            self._server.pre_shutdown()
            await self._server.shutdown(0.1)
        self._leave_engine()
        await asyncio.gather(*self._closing)

    def _leave_engine(self) -> None:
        if self._engine is not None:
            task = asyncio.get_running_loop().create_task(self._engine.session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._engine = None

    # One request.

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = _ORIGIN.sub("", request.raw_path)  # a request may name a whole URL (RFC 9112, section 3.2.2)
        target = target if target.startswith("/") else f"/{target}"
        path = unquote(target.partition("?")[0])  # as the engine would read it
        if path == "/health":
            return _reply(request, 200 if self._state == _READY else 503, {"status": self._state})
        if not self._has_key(request.headers):
            message = "wrong or missing key: send `Authorization: Bearer KEY` or `x-api-key: KEY`"
            fields = {"WWW-Authenticate": "Bearer"}
            return _refusal(request, 401, message, "invalid_api_key", fields)
        if path.startswith("/gristmill/"):
            return self._own(request, path)
        self.renew()
        if (bad := _unfit(request)) is not None:
            return bad
        if self._state != _READY or self._engine is None:
            message = f"the endpoint is {self._state}" + (f": {self._why}" if self._why else "")
            fields = {} if self._state == _DRAINING else {"Retry-After": str(_RETRY_S)}
            return _refusal(request, 503, message, self._state, fields)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._empty.clear()
        try:
            return await self._engine.answer(request, target)
        finally:
            self._running.discard(task)
            self.renew()
            if not self._running:
                self._empty.set()

    def _has_key(self, headers: CIMultiDictProxy[str]) -> bool:
        given = list(headers.getall("x-api-key", ()))
        for line in headers.getall("Authorization", ()):
            scheme, _, word = line.partition(" ")
            if scheme.lower() == "bearer":
                given.append(word.strip())
        return any([hmac.compare_digest(_digest(word), self._digest) for word in given])

    def _own(self, request: web.BaseRequest, path: str) -> web.Response:
        method = {"/gristmill/status": "GET", "/gristmill/renew": "POST", "/gristmill/stop": "POST"}.get(path)
        if method is None:
            return _refusal(request, 404, f"there is no {path}", "not_found")
        if request.method != method:
            fields = {"Allow": method}
            return _refusal(request, 405, f"use {method}", "method_not_allowed", fields)
        if path == "/gristmill/stop":
            self.stop_requested.set()
            return _reply(request, 202, {"status": "stopping"})
        if path == "/gristmill/renew":
            self.renew()
        return _reply(
            request, 200, {**self._status(), "state": self._state, "in_flight": self.in_flight, "idle_s": self.idle_s}
        )


class _EngineClient:
    """Connections to one start of an engine."""

    def __init__(self, upstream: Upstream) -> None:
        self._origin, self._bearer = URL(upstream.url), f"Bearer {upstream.key}"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_REUSE_S)
            if upstream.socket is None
            else _UnixConnector(upstream.socket),
            timeout=ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC,
            max_line_size=_FIELD_BYTES,
            max_field_size=_FIELD_BYTES,
        )

    async def answer(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        """Pass a request on and its answer back, to its last byte."""
        if request.transport is not None:
            request.transport.set_write_buffer_limits(high=0)  # so that an answer has ended when the kernel has it
        headers = _end_to_end(request.headers, _OURS)
        headers["Authorization"] = self._bearer
        origin = self._origin
        url = URL.build(scheme=origin.scheme, host=origin.host or "", port=origin.port, path=target, encoded=True)
        body = _body(request) if request.body_exists else None
        try:
            answer = await self.session.request(request.method, url, headers=headers, data=body, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            if request.content.exception() is not None:
                return _refusal(request, 400, "the body is malformed", "bad_request")
            message = f"the engine gave no answer ({type(error).__name__})"
            return _refusal(request, 502, message, "upstream_error")
        try:
            fields = _end_to_end(answer.headers, set())
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=fields)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        except BaseException as error:  # the engine broke off, the client hung up, or `close`
            _cut(request)
            if not isinstance(error, (aiohttp.ClientError, OSError)):
                raise
        finally:
            answer.close()  # stops the engine unless the answer was read to its end
        return response


class _UnixConnector(aiohttp.UnixConnector):
    """Waits where the engine's backlog is full: asyncio takes EAGAIN of a Unix socket for a connection that comes."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), limit=0, keepalive_timeout=_REUSE_S)
        self._turn = asyncio.Lock()

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> Any:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            async with self._turn:  # only the first in the queue polls
                while True:
                    try:
                        made.connect(self.path)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(_CONNECT_PAUSE_S)
            factory: Any = self._factory
            return (await self._loop.create_unix_connection(factory, sock=made))[1]
        except BaseException:
            made.close()
            raise


class _Connection(web.RequestHandler):
    """A client's connection; errors have OpenAI's shape and quote nothing that was sent."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and not isinstance(self._messages[-1][0], aiohttp.http.RawRequestMessage):
            # aiohttp's parser forgets a body that turns out malformed; whoever reads it would wait for ever.
            current = [self._current_request.content] if self._current_request is not None else []
            for content in [*current, *(payload for _, payload in self._messages)]:
                if not content.is_eof():
                    content.set_exception(web.RequestPayloadError("malformed"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 and exc is not None:
            where = "".join(traceback.format_tb(exc.__traceback__))
            print(f"unexpected {type(exc).__name__} at the front door\n{where}", file=sys.stderr, flush=True)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")  # aiohttp closes the connection
        message = "unexpected trouble" if status >= 500 else "this is no valid HTTP request"
        reply = _refusal(request, status, message, "internal_error" if status >= 500 else "bad_request")
        reply.force_close()
        return reply


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


def _digest(word: str) -> bytes:
    return blake2b(word.encode("utf-8", "surrogateescape")).digest()


def _unfit(request: web.BaseRequest) -> web.Response | None:
    """The answer to a request that cannot be passed on, None if it can."""
    headers = request.headers
    if headers.get("Upgrade", "").lower() == "websocket" or request.method == "CONNECT":
        return _refusal(request, 501, "WebSockets are not passed on", "not_implemented")
    if headers.get("Transfer-Encoding", "chunked").strip().lower() != "chunked":
        return _refusal(request, 501, "only chunked is understood", "not_implemented")
    if headers.get("Expect", "100-continue").lower() != "100-continue":
        return _refusal(request, 417, "only 100-continue is expected", "bad_request")
    return None


def _end_to_end(headers: CIMultiDictProxy[str], without: set[str]) -> CIMultiDict[str]:
    """The fields that are passed on: all but those of one hop and those of the names `without` (lower case)."""
    named = {word.strip().lower() for line in headers.getall("Connection", ()) for word in line.split(",")}
    dropped = _HOP_BY_HOP | named | without
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        low = name.lower()
        if low not in dropped and not low.startswith("proxy-"):
            kept.add(name, value)
    return kept


async def _body(request: web.BaseRequest) -> AsyncIterator[bytes]:
    """The request's body, asked for only now that the engine listens."""
    if "Expect" in request.headers and request.version >= aiohttp.HttpVersion11 and not request.writer.output_size:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
    async for chunk in request.content.iter_any():
        yield chunk


def _cut(request: web.BaseRequest) -> None:
    """Break a client's connection so that half an answer cannot be taken for a whole one."""
    transport = request.transport
    if transport is not None and request.version < aiohttp.HttpVersion11:
        # There the end of the connection is the end of the answer; a reset is not.
        plug = transport.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.protocol.force_close()


def _reply(request: web.BaseRequest, status: int, value: Any, fields: dict[str, str] | None = None) -> web.Response:
    body = orjson.dumps(value, default=str)
    reply = web.Response(status=status, body=body, content_type="application/json", headers=fields)
    if not request.content.is_eof():
        reply.force_close()  # its body is not read
    return reply


def _refusal(
    request: web.BaseRequest, status: int, message: str, code: str, fields: dict[str, str] | None = None
) -> web.Response:
    """An error as OpenAI's clients understand it."""
    kind = _TYPES.get(status, "invalid_request_error")
    return _reply(request, status, {"error": {"message": message, "type": kind, "param": None, "code": code}}, fields)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # every request takes two descriptors
