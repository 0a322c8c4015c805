"""Adaptive concurrency against the best fixed one, on an engine whose capacity is known (simulated_engine.py).

    python benchmarks/admission.py [--shapes short long mixed] [--no-gauges] [--seconds 25]

For each shape of requests: a sweep of fixed concurrencies, then the adaptive one on a longer run. A figure is
generated tokens per second over the middle of the fixed runs, and over all of the adaptive run but its first and last
5 %: so what is compared is what it has reached within 5 % of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import ask, cores, endpoint

SWEEP = [16, 32, 64, 96, 128, 192, 256, 320, 448]
SHAPES = {"short": (150, 16), "long": (150, 200), "mixed": (150, None)}
RATES = {"short": 260, "long": 28, "mixed": 45}  # requests/s, roughly, to size the runs
SYSTEMS = ["You sort documents. " * 30, "You judge mails. " * 30]
START = 64  # as with a vLLM of our own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--no-gauges", action="store_true")
    parser.add_argument(
        "--seconds", type=float, default=25, help="of each fixed run; the adaptive one takes eight times"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    print("| shape | fixed: generated tokens/s at each concurrency | best | adaptive | of the best | ended at |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in args.shapes:
        count = int(RATES[shape] * args.seconds)
        fixed = {n: run(shape, n, count, (0.25, 0.75), args.no_gauges)[0] for n in SWEEP}
        adaptive, limit = run(shape, 0, 8 * count, (0.05, 0.95), args.no_gauges)
        best = max(fixed, key=lambda n: fixed[n])
        shown = ", ".join(f"{n}: {rate:,.0f}" for n, rate in fixed.items())
        print(f"| {shape} | {shown} | {best} | {adaptive:,.0f} | {adaptive / fixed[best]:.3f} | {limit} |", flush=True)


def run(shape: str, pinned: int, count: int, middle: tuple[float, float], blind: bool) -> tuple[float, int]:
    """Tokens per second over the middle of a run, and the limit it ended with."""
    engine = [str(Path(__file__).with_name("simulated_engine.py")), *(["--no-gauges"] if blind else [])]
    with endpoint(engine, cores()[0]) as url, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", shape, str(pinned), f"{url},{count}"]
        client = cores()[1]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, client)
        )
        if done.returncode != 0:
            sys.exit(f"{done.stdout}\n{done.stderr}")
        records = [
            json.loads(line) for file in Path(folder).glob("results/c/journal/*.jsonl") for line in file.open("rb")
        ]
        told = [json.loads(line) for file in Path(folder).glob("results/c/telemetry/*.jsonl") for line in file.open()]
    return tokens_per_s(records, middle), told[-1]["limit"]


def tokens_per_s(records: list[dict[str, Any]], middle: tuple[float, float]) -> float:
    """Each answer's tokens are spread over the time that it took."""
    spans = [
        (r["timings"]["sent"], r["timings"]["sent"] + r["timings"]["latency_s"], r["usage"]["completion_tokens"])
        for r in records
    ]
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    start, end = (first + share * (last - first) for share in middle)
    total = 0.0
    for sent, answered, tokens in spans:
        inside = max(0.0, min(answered, end) - max(sent, start))
        total += tokens * inside / max(answered - sent, 1e-6)
    return total / (end - start)


def child(shape: str, pinned: str, where: str) -> None:
    url, count = where.rsplit(",", 1)
    chance = random.Random(7)
    prompt, answer = SHAPES[shape]
    bodies = []
    for number in range(int(count)):
        words = int(prompt * chance.uniform(0.5, 1.5))
        length = int((answer or chance.choice([8, 20, 60, 300])) * chance.uniform(0.5, 1.5))
        system = {"role": "system", "content": SYSTEMS[number % len(SYSTEMS)]}
        text = " ".join([f"n{number}", *["word"] * words, str(length)])
        messages = [system, {"role": "user", "content": text}]
        bodies.append({"model": "m", "messages": messages, "max_tokens": 512, "temperature": 0})
    ask(url, bodies, int(pinned) or None, START)


if __name__ == "__main__":
    main()
