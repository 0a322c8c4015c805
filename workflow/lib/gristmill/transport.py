"""How the OpenAI client's requests reach an endpoint: aiohttp over TCP or a Unix socket, without what we never use.

The OpenAI client builds and sends its requests through an `httpx2.AsyncClient`. Half of its time a request goes into
that one's redirects, cookies, authentication and events; `EngineClient` answers the same two calls, `build_request` and
`send`, by one call of aiohttp. Errors are httpx2's, so that the OpenAI client maps them as ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import multidict
import yarl

Headers = tuple[tuple[str, str], ...]

_CONNECT_S = 30.0
_KNOWN_HEADERS = 256
# Engines close a connection that was idle for five seconds (uvicorn's default): one that is older may be half closed.
_IDLE_S = 4.0
_KEPT = {b"content-type", b"retry-after", b"retry-after-ms", b"x-request-id"}


class EngineClient(httpx2.AsyncClient):
    """An HTTP client for one endpoint.

    socket: path of a Unix socket. trust_env: whether the proxies of the environment are used.
    A request's timeout is its whole time, in seconds, from the first byte sent to the last one read.
    """

    def __init__(self, socket: Path | None = None, *, trust_env: bool = True) -> None:
        super().__init__(transport=httpx2.AsyncBaseTransport(), timeout=None, trust_env=False)
        self._socket, self._proxies = socket, trust_env
        self._session: aiohttp.ClientSession | None = None
        self._urls: dict[str, tuple[httpx2.URL, yarl.URL]] = {}
        self._known_headers: dict[Headers, tuple[httpx2.Headers, multidict.CIMultiDict[str]]] = {}

    def build_request(self, method: str, url: Any, **given: Any) -> httpx2.Request:
        """A request; what is the same in many of them, address and headers, is read once."""
        address = self._address(str(url))
        if given.get("params") or given.get("files") or given.get("data") or given.get("json") is not None:
            return super().build_request(method, url, **given)
        content, headers = given.get("content") or b"", tuple(given.get("headers") or ())
        # A request that is given a stream adds no headers of its own; aiohttp does.
        return httpx2.Request(
            method,
            address[0],
            headers=self._both_headers(headers)[0],
            stream=httpx2.ByteStream(content),
            extensions={"seconds": _seconds(given.get("timeout")), "content": content, "headers": headers},
        )

    async def send(self, request: httpx2.Request, **given: Any) -> httpx2.Response:
        """Send it and read the whole answer. Raises httpx2.TransportError."""
        session = self._session or self._open()
        known = request.extensions
        if "seconds" in known:
            headers, content, seconds = self._both_headers(known["headers"])[1], known["content"], known["seconds"]
        else:  # made by httpx2 itself
            headers = multidict.CIMultiDict(request.headers.multi_items())
            content, seconds = request.content, _seconds(known.get("timeout"))
        try:
            async with session.request(
                request.method,
                self._address(str(request.url))[1],
                headers=headers,
                data=content or None,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(seconds, sock_connect=_CONNECT_S),
            ) as response:
                content = await response.read()
        except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
            raise httpx2.ConnectError(str(error), request=request) from error
        except TimeoutError as error:
            raise httpx2.ReadTimeout(str(error), request=request) from error
        except (aiohttp.ClientError, OSError) as error:
            raise httpx2.ReadError(f"{type(error).__name__}: {error}", request=request) from error
        return httpx2.Response(response.status, headers=_kept(response.raw_headers), content=content, request=request)

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await super().aclose()

    def _address(self, url: str) -> tuple[httpx2.URL, yarl.URL]:
        address = self._urls.get(url)
        if address is None:
            address = self._urls[url] = httpx2.URL(url), yarl.URL(url, encoded=True)
        return address

    def _both_headers(self, given: Headers) -> tuple[httpx2.Headers, multidict.CIMultiDict[str]]:
        headers = self._known_headers.get(given)
        if headers is None:
            if len(self._known_headers) >= _KNOWN_HEADERS:
                self._known_headers.clear()
            headers = self._known_headers[given] = httpx2.Headers(list(given)), multidict.CIMultiDict(given)
        return headers

    def _open(self) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(str(self._socket), limit=0, keepalive_timeout=_IDLE_S)
        else:
            secure = httpx2.create_ssl_context() if self._proxies else True
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=secure)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=self._proxies and self._socket is None,
        )
        return self._session


def _seconds(timeout: Any) -> float | None:
    if isinstance(timeout, httpx2.Timeout):
        return timeout.read
    if isinstance(timeout, Mapping):
        return timeout.get("read")
    return None if timeout is None else float(timeout)


def _kept(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers that mean something to us; those of the transfer were used up by aiohttp."""
    return [(name, value) for name, value in headers if name.lower() in _KEPT]
