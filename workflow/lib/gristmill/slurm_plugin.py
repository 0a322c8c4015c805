"""What Snakemake's Slurm plugin is given: jobs that Slurm was asked about first, and states that are mended.

The plugin (2.8) takes some states for "still running", for ever, so that a run hangs: a job that was preempted and is
not requeued (PREEMPTED), one that the controller has forgotten, and one that waits for a reason that nothing changes,
such as a time limit above the partition's. Its function `query_job_status` is replaced by one that names these FAILED;
everything else stays the plugin's. tests/test_slurm_faults.py notices when the plugin changes under it.
Resources that Slurm refuses, or would let wait for ever, stop the run before the first job is submitted.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

from gristmill.errors import GristmillError, say
from gristmill.slurm import ask, check, is_over, options_of, why_hopeless

_UNSEEN_S = 120.0  # a job that neither squeue nor sacct has shown for so long is gone
_ANSWER_S = 50.0
_SILENT_S = 5.0
_UNKNOWN = ("PREEMPTED", "REVOKED")  # ended, and not known to the plugin

_CONF = "SLURM_CONF"


def prepare() -> None:
    """Called when the workflow is parsed, by the process that submits jobs and inside each job."""
    # Snakemake imports every executor plugin that is installed.
    plugin: Any = sys.modules.get("snakemake_executor_plugin_slurm")
    if plugin is not None and hasattr(plugin, "query_job_status"):
        plugin.query_job_status = Statuses().query
    elif plugin is not None:
        say("this version of snakemake-executor-plugin-slurm is not known; a preempted job may hang the run")
    jobstep = sys.modules.get("snakemake_executor_plugin_slurm_jobstep")
    if jobstep is not None and _CONF in os.environ:
        _keep_conf(jobstep, os.environ[_CONF])


def _keep_conf(jobstep: Any, conf: str) -> None:
    """Inside a job the plugin takes SLURM_CONF from srun, which then finds no cluster where there is no /etc/slurm."""

    def popen(call: str, env: dict[str, str], **options: Any) -> Any:
        return subprocess.Popen(call, env={**env, _CONF: conf}, **options)

    jobstep.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def check_jobs(workflow: Any) -> None:
    """Ask Slurm whether it would take the jobs of this run, each kind once, before any is submitted.

    Raises GristmillError for those of the first attempt; tells of later ones, which may never be needed.
    """
    if not isinstance(workflow.executor_settings, _settings()):
        return
    asked: dict[tuple[tuple[tuple[str, str], ...], str], int] = {}
    attempts = (workflow.execution_settings.retries or 0) + 1
    for job in workflow.dag.needrun_jobs():
        if not job.is_local:
            for attempt in range(1, attempts + 1):
                resources = _resources(job, attempt)
                extra = str(resources.get("slurm_extra") or "")
                asked.setdefault((tuple(options_of(resources).items()), extra), attempt)
    for (options, extra), attempt in asked.items():
        try:
            warning = check(dict(options), extra)
        except GristmillError as error:
            if attempt == 1:
                raise
            warning = f"attempt {attempt} of a job, should it come to that, would fail: {error}"
        if warning:
            say(warning)


def _settings() -> type:
    from snakemake_executor_plugin_slurm import ExecutorSettings

    return cast(type, ExecutorSettings)


def _resources(job: Any, attempt: int) -> dict[str, object]:
    first = job.attempt
    job.attempt = attempt
    try:
        return dict(job.resources.items())
    finally:
        job.attempt = first


class Statuses:
    """The states of a run's jobs, as the plugin asks for them."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}  # job → when it was last shown, monotonic seconds
        self._told: set[str] = set()

    async def query(self, command: str, logger: Any) -> tuple[dict[str, str] | None, float | None]:
        """The plugin's `query_job_status`: job id → state, and how long it took, seconds.

        Waits while Slurm does not answer: the plugin forgets the jobs of a round that fails.
        command: the plugin's own query, of squeue or sacct, which holds the name of all jobs of the run.
        """
        began = time.monotonic()
        found = re.search(r"--name[ =](\S+)", command)
        if found is None:
            logger.error(f"no job name in the status query of the Slurm plugin: {command}")
            return None, None
        brief = command.startswith("sacct")  # Slurm forgets finished jobs so soon that squeue may never show them
        while (states := await asyncio.to_thread(self._states, found[1], brief)) is None:
            self._tell("silent", "Slurm does not answer (squeue fails); waiting for it, its jobs go on")
            await asyncio.sleep(_SILENT_S)
        self._told.discard("silent")
        return states, time.monotonic() - began

    def _states(self, name: str, brief: bool) -> dict[str, str] | None:
        said = ask("squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i|%T|%r", timeout_s=_ANSWER_S)
        if said.status:
            return None
        states = {}
        now = time.monotonic()
        for row in said.out.splitlines():
            job, state, reason = [*row.split("|"), "", ""][:3]
            self._seen[job] = now
            states[job] = self._plain(job, state, reason)
        if brief or not self._seen.keys() <= states.keys():
            self._add_unseen(name, states, now)
        return states

    def _plain(self, job: str, state: str, reason: str) -> str:
        if state in _UNKNOWN:
            self._tell(job, f"Slurm job {job} was {state.lower()}; it is tried again as often as `retries` says")
            return "FAILED"
        if state == "PENDING" and (why := why_hopeless(reason)) is not None:
            self._tell(job, f"Slurm job {job} can never start ({reason}): {why}; it is cancelled\n{_asked(job)}")
            ask("scancel", job)
            return "FAILED"
        return state

    def _add_unseen(self, name: str, states: dict[str, str], now: float) -> None:
        """Jobs that squeue does not show, or no more: sacct knows how they ended, or they are lost."""
        format = "--format=JobIDRaw,State"
        said = ask("sacct", "-nXP", f"--name={name}", "--starttime=now-7days", format, timeout_s=_ANSWER_S / 2)
        for row in said.out.splitlines() if said.status == 0 else ():
            job, _, state = row.partition("|")
            state = (state.split() or [""])[0]  # `CANCELLED by 0`
            if job not in states and is_over(state):
                states[job] = "FAILED" if state in _UNKNOWN else state
        for job in self._seen.keys() - states.keys():
            if now - self._seen[job] > _UNSEEN_S:
                self._tell(job, f"Slurm knows nothing of job {job} any more; it counts as failed")
                states[job] = "FAILED"

    def _tell(self, job: str, message: str) -> None:
        if job not in self._told:
            self._told.add(job)
            say(message)


def _asked(job: str) -> str:
    shown = ask("scontrol", "show", "job", job, "-o").out
    keys = ("Account", "QOS", "Partition", "TimeLimit", "ReqTRES", "TRES", "TresPerNode")
    asked = [f"{key}={found[1]}" for key in keys if (found := re.search(rf"\b{key}=(\S+)", shown))]
    return (
        f"  where: it asked for {shlex.join(asked)}\n"
        "  help:  correct these in profiles/slurm/config.yaml or the campaign's `resources`"
    )
