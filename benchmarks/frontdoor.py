"""What the front door of an endpoint costs: requests/s and latency through it and past it, in the same run.

    python benchmarks/frontdoor.py [--seconds 2] [--concurrency 64] [--rounds 3] [--answer 600]

An upstream that answers at once, the door and the load are three processes on this machine. Two kinds of answer:
one body of --answer bytes, and the same bytes as 20 events of a stream. Direct and proxied rounds take turns; a ratio
is that of the medians. An engine's own work per request (milliseconds to minutes) comes on top of both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from multiprocessing import Process, Queue
from pathlib import Path

import aiohttp
from aiohttp import web

PROJECT = Path(__file__).parents[1]
sys.path[:0] = [str(PROJECT / "workflow" / "lib")]

from gristmill.frontdoor import FrontDoor, Upstream  # noqa: E402

KEY, EVENTS = "key", 20
BODY = b'{"messages":[{"role":"user","content":"' + b"x" * 1000 + b'"}]}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2, help="length of a round")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=600, help="bytes of an answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        ports: Queue[int] = Queue()
        upstream = Process(target=run_upstream, args=(path, args.answer, ports), daemon=True)
        upstream.start()
        ports.get(timeout=20)
        door = Process(target=run_door, args=(path, ports), daemon=True)
        door.start()
        port = ports.get(timeout=20)
        print("| answers | direct, requests/s | door, requests/s | ratio | direct p50, ms | door p50, ms |")
        print("| --- | --- | --- | --- | --- | --- |")
        for kind in ("whole", "stream"):
            rates: dict[bool, list[float]] = {False: [], True: []}
            waits: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(args.rounds):
                for through in (False, True):
                    rate, wait = asyncio.run(load(kind, port if through else path, args.seconds, args.concurrency))
                    rates[through].append(rate)
                    waits[through].append(wait)
            direct, proxied = (statistics.median(rates[through]) for through in (False, True))
            p50 = [1e3 * statistics.median(waits[through]) for through in (False, True)]
            print(f"| {kind} | {direct:.0f} | {proxied:.0f} | {proxied / direct:.2f} | {p50[0]:.1f} | {p50[1]:.1f} |")
        door.terminate()
        upstream.terminate()


async def load(kind: str, to: int | Path, seconds: float, concurrency: int) -> tuple[float, float]:
    """Requests/s and median seconds of a request."""
    connector: aiohttp.BaseConnector
    if isinstance(to, int):
        connector, url = aiohttp.TCPConnector(limit=0), f"http://127.0.0.1:{to}/{kind}"
    else:
        connector, url = aiohttp.UnixConnector(str(to), limit=0), f"http://localhost/{kind}"
    took: list[float] = []
    start = time.monotonic()

    async def ask_on(session: aiohttp.ClientSession) -> None:
        while (begun := time.monotonic()) < start + seconds:
            async with session.post(url, data=BODY) as answer:
                assert answer.status == 200
                await answer.read()
            took.append(time.monotonic() - begun)

    async with aiohttp.ClientSession(connector=connector, headers={"Authorization": f"Bearer {KEY}"}) as session:
        await asyncio.gather(*(ask_on(session) for _ in range(concurrency)))
    return len(took) / (time.monotonic() - start), statistics.median(took)


def run_upstream(path: Path, size: int, ready: Queue[int]) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path == "/whole":
            return web.Response(body=b"x" * size)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(EVENTS):
            await response.write(b"x" * (size // EVENTS))
            await asyncio.sleep(0)
        return response

    async def serve() -> None:
        await asyncio.get_running_loop().create_unix_server(web.Server(answer, access_log=None), path, backlog=1024)
        ready.put(0)
        await asyncio.Event().wait()

    asyncio.run(serve())


def run_door(path: Path, ready: Queue[int]) -> None:
    async def serve() -> None:
        door = FrontDoor(KEY, dict)
        port = await door.open("127.0.0.1")
        door.serve(Upstream("http://localhost", path, "engine-key"))
        ready.put(port)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
