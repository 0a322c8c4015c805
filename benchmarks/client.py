"""Requests per second of the client, and of others, against an endpoint that answers at once; one core each.

    python benchmarks/client.py [--rounds 3] [--seconds 5]

In turn, each in a process of its own on the same core, with 64 requests in flight where that can be said:

    sdk                 chat.completions.create of the OpenAI client with its default transport; keeps nothing
    saturate fixed      saturate 0.2, window Fixed(64), its parquet parts as its sink writes them
    saturate adaptive   saturate 0.2 as it comes
    gristmill fixed     a shard group's job, endpoint.concurrency 64: shard file, journal, answers
    gristmill adaptive  the same without endpoint.concurrency

A figure is that of the requests alone, without imports; what is printed is the median of the rounds. saturate is
installed below .cache/ (network) the first time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import KEY, ask, cores, endpoint, saturate_python, scripted

IN_FLIGHT = 64
TEXT = "Is this mail spam or ham? Answer with one word. " + "lorem ipsum dolor sit amet " * 30
COUNTS = {"sdk": 600, "saturate fixed": 600, "saturate adaptive": 800, "gristmill": 2000}  # a second, roughly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5, help="of each run, roughly")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, url, count = args.child
        print(CHILDREN[name.split()[0]](name, url, int(count)))
        return
    runs: dict[str, list[float]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(args.rounds):
            for name in NAMES:
                per_s = COUNTS.get(name) or COUNTS[name.split()[0]]
                with endpoint(scripted(Path(temporary)), cores()[0]) as url:
                    runs[name].append(run(name, url, int(per_s * args.seconds)))
    print("| client | requests/s | of the SDK | of saturate, the faster mode |")
    print("| --- | --- | --- | --- |")
    rates = {name: statistics.median(seen) for name, seen in runs.items()}
    saturate = max(rates["saturate fixed"], rates["saturate adaptive"])
    for name, rate in rates.items():
        print(f"| {name} | {rate:,.0f} | {rate / rates['sdk']:.2f} | {rate / saturate:.2f} |")


NAMES = ["sdk", "saturate fixed", "saturate adaptive", "gristmill fixed", "gristmill adaptive"]


def run(name: str, url: str, count: int) -> float:
    python = saturate_python() if name.startswith("saturate") else sys.executable
    command = [python, __file__, "--child", name, url, str(count)]
    client = cores()[1]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, client),
        )
    if done.returncode != 0:
        sys.exit(f"{name} failed:\n{done.stdout}\n{done.stderr}")
    return float(done.stdout.split()[-1])


def body(number: int) -> dict[str, Any]:
    message = {"role": "user", "content": f"{number}: {TEXT}"}
    return {"model": "m", "messages": [message], "max_tokens": 8, "temperature": 0}


def sdk(name: str, url: str, count: int) -> float:
    import asyncio

    from openai import AsyncOpenAI

    async def ask() -> float:
        client = AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                await client.chat.completions.create(**body(number))

        await client.chat.completions.create(**body(-1))
        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
        return count / (time.perf_counter() - began)

    return asyncio.run(ask())


def saturate(name: str, url: str, count: int) -> float:
    from saturate import Fixed, pump

    began = time.perf_counter()
    pump(
        ((str(number), {"number": number}) for number in range(count)),
        to_request=lambda row: body(row["number"]),
        parse=lambda row, answer: {"answer": answer["choices"][0]["message"]["content"]},
        endpoint=url,
        output="out",
        window=Fixed(IN_FLIGHT) if name.endswith("fixed") else None,
        flush_every=1000,
        headers={"Authorization": f"Bearer {KEY}"},
    )
    return count / (time.perf_counter() - began)


def gristmill(name: str, url: str, count: int) -> float:
    pinned = IN_FLIGHT if name.endswith("fixed") else None
    return count / ask(url, [body(number) for number in range(count)], pinned)


CHILDREN = {"sdk": sdk, "saturate": saturate, "gristmill": gristmill}

if __name__ == "__main__":
    main()
