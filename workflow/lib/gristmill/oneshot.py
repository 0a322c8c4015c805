"""One input file, one results.jsonl: a campaign without a campaign file, on an endpoint or an engine of its own."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from gristmill import slurm
from gristmill.endpoints import write_script
from gristmill.errors import GristmillError, indented, say
from gristmill.layout import only_one
from gristmill.merge import answer_of, too_many
from gristmill.run import Run

_NAME = "batch"
_ONE_GROUP = 10**9
_POLL_S = 1.0


def work_folder(out: Path) -> Path:
    """Where the journal of a results file is kept, from which a rerun resumes."""
    return out.with_name(f"{out.name}.gristmill")


def run_batch(source: Path, out: Path, project: Path, settings: Mapping[str, Any], max_error_share: float) -> None:
    """Ask every request of a file and write a line for each, in the order of the input.

    settings: keys of a campaign (model, registry, endpoint). A line is {"id", "custom_id", "status", "answer",
    "finish_reason", "error", "usage", "latency_s", "attempts", "model", "source_row", "response"}; `response` and
    `error` are as in OpenAI's batch output.
    Raises GristmillError when requests have no answer yet (run it again), or too many rows are not ok.
    """
    source, out = source.absolute(), out.absolute()
    check_files(source, out)
    campaign = {"campaign": _NAME, "input": [_literal(source)], "shards_per_group": _ONE_GROUP, **settings}
    work = work_folder(out)
    work.mkdir(exist_ok=True)
    with only_one(work, "another batch writes this output"), contextlib.chdir(work):
        run = Run.at_parse(campaign, project, main=True, where="the command line")
        for group in run.manifest.groups:
            run.cut(group, str(run.layout.shards / group))
            run.ask(group, str(run.layout.answers / group), {})
        counts = _write(run, out)
    rows = counts.total()
    told = ", ".join(f"{counts[status]:,} {status}" for status in ("ok", "invalid", "error"))
    say(f"{rows:,} rows: {told}; {out}")
    if too_many(rows - counts["ok"], rows, max_error_share):
        raise GristmillError(
            f"{rows - counts['ok']:,} of {rows:,} rows are not ok, more than --max-error-share = {max_error_share:g}",
            where=str(out),
            help="every row is there all the same; `error` says why",
        )


def check_files(source: Path, out: Path) -> None:
    """Raise GristmillError when the input is not there or the output cannot be written."""
    if not source.exists():
        raise GristmillError("the input does not exist", where=str(source), help="correct --in")
    if out.is_dir() or not out.parent.is_dir() or out.absolute() == source.absolute():
        raise GristmillError(
            "the output cannot be written", where=str(out), help="--out is a file of its own, in a folder that exists"
        )


def _literal(path: Path) -> str:
    """A path as a pattern that means itself."""
    return "".join(f"[{c}]" if c in "*?[$" else c for c in str(path))


def _write(run: Run, out: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", 1 << 20) as file:
            for line in _lines(run):
                counts[line["status"]] += 1
                file.write(orjson.dumps(line) + b"\n")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return counts


def _lines(run: Run) -> Iterator[dict[str, Any]]:
    for path in run.answer_files():
        with path.open("rb", 1 << 20) as lines:
            for line in lines:
                yield _line(orjson.loads(line), run)


def _line(row: dict[str, Any], run: Run) -> dict[str, Any]:
    answer, record = answer_of(row, run.check)
    error = None
    if answer.status != "ok":
        error = {"code": answer.error_code, "message": answer.error_message}
    return {
        "id": row["id"],
        "custom_id": row["id"],
        "status": answer.status,
        "answer": answer.answer,
        "finish_reason": answer.finish_reason,
        "error": error,
        "usage": {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens},
        "latency_s": record["timings"]["latency_s"] if record else None,
        "attempts": record["attempts"] if record else 0,
        "model": answer.model or row["model"],
        "source_row": row["row"],
        "response": {"status_code": record["http_status"], "body": _body(record["raw"])} if record else None,
    }


def _body(raw: str) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw


# -- as a Slurm job of its own ----------------------------------------------------------------------------------------


def run_job(command: list[str], out: Path, options: Mapping[str, str], *, dry_run: bool, wait: bool) -> None:
    """Run a command as a Slurm job that writes `out`; prints {"job_id", "out", "log", "script"}.

    Raises GristmillError when the job fails, with what it printed last. Ctrl-C cancels the job.
    """
    work = work_folder(out.absolute())
    work.mkdir(parents=True, exist_ok=True)
    script, log = work / "run.sbatch", work / "slurm-%j.log"
    write_script(script, command, options, f"gristmill-{out.name}", log)
    if warning := slurm.check(options):
        say(warning)
    if dry_run:
        print(json.dumps({"dry_run": True, "out": str(out.absolute()), "script": str(script)}))
        return
    job_id = slurm.submit(script)
    written = work / f"slurm-{job_id}.log"
    shown = {"job_id": job_id, "out": str(out.absolute()), "log": str(written), "script": str(script)}
    print(json.dumps(shown), flush=True)
    if wait:
        try:
            _wait(job_id, written)
        except KeyboardInterrupt:
            slurm.ask("scancel", job_id)
            raise GristmillError(
                f"Slurm job {job_id} is cancelled; what was answered is kept",
                help="the same command goes on there",
            ) from None


def _wait(job_id: str, log: Path) -> None:
    told = ""
    while not slurm.is_over(state := slurm.job_state(job_id)):
        if state == "PENDING":
            slurm.cancel_hopeless(job_id)
        if state is not None and state != told:
            told = state
            say(f"Slurm job {job_id} is {state.lower()}; its log: {log}")
        time.sleep(_POLL_S)
    if state != "COMPLETED":
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        raise GristmillError(
            f"Slurm job {job_id} ended as {state}\n{indented(text)}",
            where=str(log),
            help="correct what it says, or give more --slurm time; the same command asks only what has no answer yet",
        )
