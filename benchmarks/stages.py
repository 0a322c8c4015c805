"""Throughput and peak memory of every stage, by number of requests.

    python benchmarks/stages.py [--requests 10000 100000 1000000] [--form jsonl|json] [--keep DIR]

Each stage runs in a process of its own, on requests of about 1 kB. All groups but the last find their answers in
journals that this script writes (the answers of a scripted engine); the last group asks a scripted endpoint on the
loopback interface. Peak memory is VmHWM of the stage's process and, after a +, of its largest child.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import yaml

PROJECT = Path(__file__).parents[1]
sys.path[:0] = [str(PROJECT / "workflow" / "lib")]

from gristmill.journal import Journal  # noqa: E402
from gristmill.shards import read_shard  # noqa: E402

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "omicron"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--form", choices=["jsonl", "json"], default="jsonl")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        stage(args.child)
        return
    print("| requests | stage | rows | MB | s | MB/s | rows/s | peak RSS, MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for count in args.requests:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            bench(count, args.form, folder / f"{count}")


def bench(count: int, form: str, folder: Path) -> None:
    folder.mkdir()
    source = folder / f"requests.{form}"
    write_requests(source, count, form)
    config = {"campaign": "bench", "input": [source.name], "model": "m"}
    (folder / "c.yaml").write_text(yaml.safe_dump(config | {"endpoint": {"url": "http://127.0.0.1:9/v1"}}))
    size = source.stat().st_size
    seconds, memory, groups = run(folder, "count")
    report(count, "count, ids proved unique", count, size, seconds, memory)
    report(count, "shard", count, size, *run_groups(folder, "shard", groups))
    run(folder, "journals")
    if len(groups) > 1:
        report(count, "infer, a group that is answered", 50_000, 0, *run(folder, f"infer {groups[0]}")[:2])
    manifest = json.loads((folder / "results/bench/manifest/manifest.json").read_text())
    shards_left = len(manifest["slots"]) % 25 or 25
    asked = sum(shard["rows"] for shard in manifest["inputs"][source.name]["shards"][-shards_left:])
    with scripted_endpoint(folder) as url:
        (folder / "c.yaml").write_text(yaml.safe_dump(config | {"endpoint": {"url": url, "concurrency": 64}}))
        report(count, "infer, a group that is asked", asked, 0, *run(folder, f"infer {groups[-1]}")[:2])
    run_groups(folder, "infer", groups[1:-1])
    answers = sum(path.stat().st_size for path in (folder / "results/bench/answers").rglob("*.jsonl"))
    report(count, "merge", count, answers, *run(folder, "merge")[:2])


def run_groups(folder: Path, stage: str, groups: list[str]) -> tuple[float, str]:
    """Run a stage for each group, as many at a time as there are cores, as Snakemake does; seconds and peak memory.

    Starting a process and importing the library is left out of the seconds: a process takes its share of the groups.
    """
    cores = os.cpu_count() or 1
    shares = [" ".join([stage, *groups[core::cores]]) for core in range(cores) if groups[core::cores]]
    with ThreadPoolExecutor(cores) as pool:
        done = list(pool.map(lambda share: run(folder, share), shares))
    seconds = max((took for took, _, _ in done), default=0.0)
    return seconds, max((memory for _, memory, _ in done), default="", key=lambda memory: int(memory.split()[0]))


def report(count: int, stage: str, rows: int, size: int, seconds: float, memory: str) -> None:
    rate = f"{rows / seconds:,.0f}"
    speed, volume = (f"{size / 1e6 / seconds:,.0f}", f"{size / 1e6:,.0f}") if size else ("", "")
    print(f"| {count:,} | {stage} | {rows:,} | {volume} | {seconds:.2f} | {speed} | {rate} | {memory} |", flush=True)


def write_requests(path: Path, count: int, form: str) -> None:
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=140)) for _ in range(1000)]
    with path.open("wb", 1 << 20) as file:
        if form == "json":
            file.write(b'{"requests": [\n')
        for i in range(count):
            messages = [
                {"role": "system", "content": "You sort documents into five labels and answer with one of them."},
                {"role": "user", "content": f"{i} {texts[i % 1000]}"},
            ]
            request = {"id": f"doc-{i:08d}", "messages": messages, "max_tokens": 8, "temperature": 0}
            comma = b",\n" if form == "json" and i < count - 1 else b"\n"
            file.write(orjson.dumps(request) + comma)
        if form == "json":
            file.write(b"]}\n")


def run(folder: Path, stage: str) -> tuple[float, str, list[str]]:
    """Run a stage in a process; seconds of the work itself, peak memory, and the names of the groups."""
    command = [sys.executable, __file__, "--child", stage]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    return result["seconds"], result["memory"], result["groups"]


def stage(name: str) -> None:
    from gristmill.run import Run

    config = yaml.safe_load(Path("c.yaml").read_text())
    began = time.perf_counter()
    work = Run.at_parse(config, PROJECT, main=True) if name == "count" else Run.in_job(config, str(PROJECT / "a" / "b"))
    if name != "count":
        began = time.perf_counter()
    match name.split():
        case ["count"]:
            pass
        case ["shard", *groups]:
            for group in groups:
                work.cut(group, str(work.layout.shards / group))
        case ["journals"]:
            write_journals(work)
        case ["infer", *groups]:
            for group in groups:
                work.ask(group, str(work.layout.answers / group))
        case ["merge"]:
            outputs = (str(work.layout.table), str(work.layout.errors), str(work.layout.summary))
            work.write_table(outputs, os.cpu_count() or 1)
        case _:
            sys.exit(f"no stage {name}")
    seconds = time.perf_counter() - began
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    memory = f"{int(peak[1]) / 1024:.0f}"
    if children := resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss:
        memory += f" + {children / 1024:.0f}"
    print(json.dumps({"seconds": seconds, "memory": memory, "groups": list(work.manifest.groups)}))


def write_journals(work: Any) -> None:
    """Answers for every group but the last."""
    names = list(work.manifest.groups)
    for name in names[:-1]:
        with Journal(work.layout.journal / f"{name}.bench.jsonl") as journal:
            for shard in work.manifest.groups[name]:
                for request in read_shard(work.layout.shards / name / shard.file):
                    journal.append(record(request.fingerprint or "", request.id))


def record(fingerprint: str, id: str) -> dict[str, object]:
    message = {"role": "assistant", "content": f"label {id}", "refusal": None, "tool_calls": [], "reasoning": None}
    body = {
        "id": f"chatcmpl-{fingerprint}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {"prompt_tokens": 282, "total_tokens": 290, "completion_tokens": 8, "prompt_tokens_details": None},
    }
    return {
        "fingerprint": fingerprint,
        "id": id,
        "outcome": "ok",
        "answer": f"label {id}",
        "usage": {"prompt_tokens": 282, "completion_tokens": 8},
        "timings": {"sent": 1_700_000_000.0, "latency_s": 1.5},
        "attempts": 1,
        "http_status": 200,
        "raw": orjson.dumps(body).decode(),
    }


class scripted_endpoint:
    """The scripted server of tests/ as a process; gives its base URL."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "address"

    def __enter__(self) -> str:
        script = str(PROJECT / "tests" / "scripted_server.py")
        self._process = subprocess.Popen([sys.executable, script, "--address-file", str(self._address)])
        while not self._address.exists():
            time.sleep(0.05)
        return self._address.read_text()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    main()
