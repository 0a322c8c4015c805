"""An engine whose capacity is known: vLLM's scheduler in little, in real time, behind an OpenAI-compatible endpoint.

    python benchmarks/simulated_engine.py --address-file FILE [--seats 256] [--kv-tokens 200000]

Every step it takes on what waits, as long as there are seats and room in the KV cache (prefill in chunks of 2,048
tokens a step), and adds a token to everything that runs. A step takes BASE_S + PER_SEQUENCE_S for each sequence +
PER_PROMPT_TOKEN_S for each prompt token, so that the time of an answer grows with what is in flight. When the KV cache
is full the newest sequence is put back and its tokens are read anew. A system prompt read before costs nothing.

A prompt has a token for each word. The answer has as many as the last word of the prompt says, at most max_tokens.
The gauges have vLLM's names. Requests named `ping` are answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from aiohttp import web

BASE_S = 0.008
PER_SEQUENCE_S = 0.0001
PER_PROMPT_TOKEN_S = 0.00001
CHUNK = 2048
CACHED_PROMPTS = 64


@dataclass(eq=False)
class Sequence:
    prompt: int
    answer: int
    done: asyncio.Future[None]
    to_read: int = 0
    made: int = 0
    kv: int = 0
    system: str = ""
    arrived: float = field(default_factory=time.monotonic)


class Engine:
    """The scheduler."""

    def __init__(self, seats: int, kv_tokens: int) -> None:
        self.seats, self.kv_tokens = seats, kv_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kv = self.prompt_tokens = self.generated = self.preempted = self.queries = self.hits = 0
        self.systems: OrderedDict[str, int] = OrderedDict()
        self.work = asyncio.Event()
        self.told = {"num_requests_running": 0, "num_requests_waiting": 0}

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.work.set()

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            if not self.running and not self.waiting:
                self.work.clear()
                await self.work.wait()
                due = time.monotonic()
            due = max(due + self.step(), time.monotonic() - 0.05)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.finish()

    def step(self) -> float:
        """One step; gives its time, seconds."""
        budget = CHUNK
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            if sequence.to_read:
                chunk = min(sequence.to_read, budget)
                sequence.to_read -= chunk
                budget -= chunk
                if sequence.to_read:
                    continue
            self.take(1, sequence)
            sequence.made += 1
            self.generated += 1
        while self.waiting and len(self.running) < self.seats and budget > 0:
            sequence = self.waiting[0]
            cached = self.cached(sequence) if sequence.made == 0 else 0
            need = sequence.prompt + sequence.made
            if self.kv + need > self.kv_tokens:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            self.take(need, sequence)
            sequence.to_read = max(need - cached, 1)
            chunk = min(sequence.to_read, budget)
            sequence.to_read -= chunk
            budget -= chunk
            self.prompt_tokens += sequence.prompt
        self.told = {"num_requests_running": len(self.running), "num_requests_waiting": len(self.waiting)}
        return BASE_S + PER_SEQUENCE_S * len(self.running) + PER_PROMPT_TOKEN_S * (CHUNK - budget)

    def cached(self, sequence: Sequence) -> int:
        self.queries += sequence.prompt
        length = self.systems.get(sequence.system)
        if length is None:
            self.systems[sequence.system] = len(sequence.system.split())
            if len(self.systems) > CACHED_PROMPTS:
                self.systems.popitem(last=False)
            return 0
        self.systems.move_to_end(sequence.system)
        self.hits += length
        return length

    def take(self, tokens: int, sequence: Sequence) -> None:
        """Room in the KV cache, taken from the newest ones if it must be."""
        while self.kv + tokens > self.kv_tokens and self.running[-1] is not sequence:
            victim = self.running.pop()
            self.kv -= victim.kv
            victim.kv = victim.to_read = 0
            self.preempted += 1
            self.waiting.appendleft(victim)
        self.kv += tokens
        sequence.kv += tokens

    def finish(self) -> None:
        for sequence in [s for s in self.running if s.made >= s.answer and not s.to_read]:
            self.running.remove(sequence)
            self.kv -= sequence.kv
            if not sequence.done.done():
                sequence.done.set_result(None)

    def metrics(self) -> str:
        values = {
            **self.told,  # as of the last step, as vLLM tells it
            "kv_cache_usage_perc": self.kv / self.kv_tokens,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated,
            "num_preemptions_total": self.preempted,
            "prefix_cache_queries_total": self.queries,
            "prefix_cache_hits_total": self.hits,
        }
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


async def serve(seats: int, kv_tokens: int, gauges: bool, address_file: Path) -> None:
    """Until SIGTERM."""
    engine = Engine(seats, kv_tokens)
    scheduler = asyncio.create_task(engine.run())

    async def chat(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        messages = body["messages"]
        text = messages[-1]["content"]
        words = text.split()
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        answer = 0 if text == "ping" else min(int(words[-1]), body["max_tokens"])
        if answer:
            done = asyncio.get_running_loop().create_future()
            engine.add(Sequence(len(words) + len(system.split()), answer, done, system=system))
            await done
        usage = {"prompt_tokens": len(words), "completion_tokens": answer, "total_tokens": len(words) + answer}
        message = {"role": "assistant", "content": "word " * answer or "pong"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        data = {"id": "x", "object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage}
        return web.Response(body=orjson.dumps(data), content_type="application/json")

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=engine.metrics()) if gauges else web.Response(status=404)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    temporary = address_file.with_suffix(".tmp")
    temporary.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    temporary.replace(address_file)
    await scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--kv-tokens", type=int, default=200_000)
    parser.add_argument("--no-gauges", action="store_true", help="no /metrics")
    parser.add_argument("--address-file", type=Path, required=True)
    args = parser.parse_args()
    asyncio.run(serve(args.seats, args.kv_tokens, not args.no_gauges, args.address_file))


if __name__ == "__main__":
    main()
