"""What is asked of Slurm's commands: whether it takes a job, how a job stands, when it ends."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from gristmill.errors import GristmillError

_PATIENCE_S = 30.0  # a busy controller answers late

# Resources of a Snakemake rule, as the Slurm plugin names them, and the option of sbatch that each becomes.
OPTIONS = {
    "slurm_account": "account",
    "qos": "qos",
    "slurm_partition": "partition",
    "runtime": "time",
    "gres": "gres",
    "gpu": "gpus",
    "cpus_per_task": "cpus-per-task",
    "mem_mb": "mem",
    "mem_mb_per_cpu": "mem-per-cpu",
    "nodes": "nodes",
    "constraint": "constraint",
}
# Others that the plugin and Snakemake know.
RESOURCES = frozenset(OPTIONS) | {"mem", "gpu_model", "tasks_per_gpu", "cpus_per_gpu", "slurm_extra"}

# Why a job waits that will wait for ever: no other job's end changes it.
HOPELESS = {
    "PartitionTimeLimit": "runtime is above what the partition allows",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows",
    "PartitionConfig": "what it asks for does not fit the partition",
    "BadConstraints": "no node has what it asks for",
    "InvalidAccount": "the account is not valid any more",
    "InvalidQOS": "the qos is not valid any more",
    "AccountNotAllowed": "the partition does not admit the account",
    "QOSNotAllowed": "the partition does not admit the qos",
    "DependencyNeverSatisfied": "it depends on a job that failed",
}
_HOPELESS_LIMIT = re.compile(r"(QOS|Assoc)Max\w*(PerJob|PerJobLimit)$|(QOS|Assoc)Min\w+$")


def why_hopeless(reason: str) -> str | None:
    """What squeue's reason means for a job that can never start; None when waiting may help."""
    if reason in HOPELESS:
        return HOPELESS[reason]
    if _HOPELESS_LIMIT.match(reason):
        return f"it asks for more than the {'qos' if reason.startswith('QOS') else 'account'} allows for one job"
    return None


_EXPRESSION = re.compile(r"[\d\s*+/(),-]*\b(attempt|min|max)\b(attempt|min|max|[\d\s*+/(),-])*")
_GRES_GPU = re.compile(r"gpu(?P<type>:[A-Za-z][\w.]*)?(?P<count>:\d+)?")


def gres(given: str, gpus: int) -> str:
    """The generic resources of a job with another number of GPUs: `gpu:a100:1` and 4 give `gpu:a100:4`."""
    found = _GRES_GPU.fullmatch(given)
    return f"gpu{(found and found['type']) or ''}:{gpus}" if gpus else ""


def gpus(resources: Mapping[str, object]) -> int | None:
    """How many GPUs a job asks for; None when it does not say."""
    if resources.get("gpu") is not None:
        return int(str(resources["gpu"]))
    if resources.get("gres") is None:
        return None
    found = _GRES_GPU.fullmatch(str(resources["gres"]))
    return int((found["count"] or ":1")[1:]) if found else 0


@dataclass(frozen=True)
class Answer:
    """What a Slurm command said. status: exit status, 127 when there is no such command, 124 when it did not answer."""

    status: int
    out: str
    err: str


def ask(*words: str, timeout_s: float = _PATIENCE_S, environment: Mapping[str, str] | None = None) -> Answer:
    """Run a Slurm command. A command that is missing or slow is an answer too, never an exception."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except FileNotFoundError:
        return Answer(127, "", f"{words[0]}: command not found")
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"{words[0]} did not answer within {timeout_s:g} s")
    return Answer(done.returncode, done.stdout.strip(), done.stderr.strip())


def options_of(resources: Mapping[str, object]) -> dict[str, str]:
    """sbatch options of a rule's resources; a value of None, 0 or "" asks for nothing."""
    given = {option: resources.get(name) for name, option in OPTIONS.items()}
    return {option: str(value) for option, value in given.items() if value not in (None, "", 0)}


def words_of(options: Mapping[str, str]) -> list[str]:
    """sbatch options as words of a command line; a value of "" gives a bare flag."""
    return [f"--{name}={value}" if value else f"--{name}" for name, value in options.items()]


def check(options: Mapping[str, str], extra: str = "") -> str | None:
    """Ask Slurm whether it would take a job, without submitting one; gives a warning when that cannot be told.

    options: of sbatch. extra: more words of its command line.
    Raises GristmillError with the values that were tried and those that would do.
    """
    tried = words_of(options)
    said = ask("sbatch", "--test-only", *tried, *shlex.split(extra), "--wrap", "true")
    if said.status == 127:
        raise GristmillError(
            "there is no Slurm here: sbatch is not found",
            help="run on a machine of the cluster (a login node), or use --profile profiles/local",
        )
    if said.status:
        message = "; ".join(line.removeprefix("sbatch: error: ") for line in said.err.splitlines()) or "no reason given"
        if "down, drained or reserved" in message:
            return f"Slurm has no node for the jobs of this run at the moment: {message}"
        raise GristmillError(
            f"Slurm refuses the jobs of this run: {message}", where=f"tried {shlex.join(tried)}", help=_valid()
        )
    _check_time(options)
    return None


def submit(script: Path) -> str:
    """Submit a batch script; gives the job's id. Raises GristmillError with sbatch's words."""
    said = ask("sbatch", "--parsable", str(script))
    if said.status:
        raise GristmillError(f"sbatch refuses: {said.err}", where=str(script), help=_valid())
    return said.out.partition(";")[0]


def profile_options(profile: Path) -> dict[str, str]:
    """Options of sbatch from the `default-resources` of a Snakemake profile, as of the first attempt.

    Raises GristmillError when it cannot be read.
    """
    path = profile / "config.yaml" if profile.is_dir() else profile
    try:
        given = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("default-resources") or {}
        if isinstance(given, list):
            given = dict(str(item).split("=", 1) for item in given)
        return options_of({name: _first_attempt(value) for name, value in given.items()})
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise GristmillError(f"the profile cannot be read: {error}", where=str(path)) from error


def _first_attempt(value: object) -> object:
    if not isinstance(value, str) or not _EXPRESSION.fullmatch(value):
        return value
    return eval(value, {"__builtins__": {}}, {"attempt": 1, "min": min, "max": max})


def _valid() -> str:
    """The accounts, qos and partitions that this person may use, as Slurm lists them."""
    user = getpass.getuser()
    rows = ask("sacctmgr", "-nP", "show", "associations", f"user={user}", "format=account,qos").out.splitlines()
    mine = [f"{account} ({qos or 'no qos'})" for account, _, qos in (row.partition("|") for row in rows)]
    partitions = [
        f"{name} (up to {limit})"
        for name, _, limit in (row.partition("|") for row in ask("sinfo", "-h", "-o", "%R|%l").out.splitlines())
    ]
    return (
        "correct slurm_account, qos, slurm_partition, runtime, mem_mb or gres in the profile, in the campaign's "
        "`resources`, or by --set-resources infer:qos=NAME (`gristmill`: --slurm qos=NAME)\n"
        f"         accounts with their qos: {'; '.join(dict.fromkeys(mine)) or 'sacctmgr lists none'}\n"
        f"         partitions: {'; '.join(dict.fromkeys(partitions)) or 'sinfo lists none'}"
    )


def _check_time(options: Mapping[str, str]) -> None:
    """Slurm takes a job that is over its partition's or qos's time limit, and lets it wait for ever."""
    wanted = seconds(options.get("time", ""))
    if wanted is None:
        return
    limits = []
    if partition := options.get("partition"):
        shown = ask("scontrol", "show", "partition", partition, "-o").out
        if found := re.search(r"\bMaxTime=(\S+)", shown):
            limits.append((f"partition {partition}", found[1]))
    if qos := options.get("qos"):
        limits.append((f"qos {qos}", ask("sacctmgr", "-nP", "show", "qos", qos, "format=maxwall").out))
    for what, limit in limits:
        most = seconds(limit)
        if most is not None and wanted > most:
            raise GristmillError(
                f"the jobs of this run would wait for ever: they ask for {options['time']} minutes, "
                f"{what} allows {limit}",
                where=f"tried {shlex.join(words_of(options))}",
                help=f"lower runtime to {int(most // 60)} or less; {_valid()}",
            )


def seconds(text: str) -> float | None:
    """Seconds of a Slurm time (minutes, or [days-]hours:minutes:seconds, shortened or not); None: there is no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, secs = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = 0, parts[0], parts[1] if len(parts) > 1 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + secs


_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip


def job_state(job_id: str) -> str | None:
    """A job's state as squeue names it, GONE when Slurm knows it no more; None when Slurm does not answer."""
    said = ask("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T")
    if said.status == 0:
        return said.out.splitlines()[0].strip() if said.out else "GONE"
    return "GONE" if "Invalid job id" in said.err else None


def reason(job_id: str, form: str = "{}") -> str:
    """Why a job waits, in squeue's words, put into `form`; empty when squeue gives no reason."""
    word = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%r").out
    return form.format(word) if word not in ("", "None") else ""


def cancel_hopeless(job_id: str) -> None:
    """Raise GristmillError, with the job cancelled, when it waits for what never comes."""
    word = reason(job_id)
    if (why := why_hopeless(word)) is not None:
        ask("scancel", job_id)
        raise GristmillError(f"Slurm job {job_id} can never start ({word}): {why}; it is cancelled", help=_valid())


def is_over(state: str | None) -> bool:
    """Whether a job in this state has ended for good; not known counts as no."""
    return state == "GONE" or state in _OVER


def end_of_job(job_id: str) -> float | None:
    """When a running job's time is up, seconds since the epoch; None when Slurm does not say."""
    said = ask("squeue", "--noheader", f"--jobs={job_id}", "--format=%e", timeout_s=10)
    try:
        return time.mktime(time.strptime(said.out, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def output_of_job(job_id: str) -> str | None:
    """The file that a job's standard output goes to."""
    found = re.search(r"^\s*StdOut=(.+)$", ask("scontrol", "show", "job", job_id, timeout_s=10).out, re.M)
    return found[1].strip() if found else None


def this_job() -> str | None:
    """The id of the Slurm job that this process is part of."""
    return os.environ.get("SLURM_JOB_ID") or None
