"""A campaign put together: what the rules need to know of it when they are parsed, and what each job does."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from gristmill import slurm
from gristmill.admission import Limit
from gristmill.campaign import Campaign, load_campaign, parse_campaign
from gristmill.engines import ENGINES, URL_CONCURRENCY, Address, Attachment, Launch, parallel_flags
from gristmill.errors import GristmillError
from gristmill.layout import RUNNER_PID, Layout, expanded, find_file, write_atomically
from gristmill.manifest import Manifest, digest_of, read_manifest, update_manifest
from gristmill.merge import Part, merge, table_for, verdict
from gristmill.outcomes import AnswerCheck
from gristmill.registry import Model, load_model, model_path
from gristmill.requests import Recipe, recipe, request_maker
from gristmill.shards import write_shards
from gristmill.sidecar import read_sidecar, wait_ready
from gristmill.sources import read_rows
from gristmill.stopping import runner_gone

# Part of what decides whether a finished group is done again: raise it when requests or answer lines of the same
# campaign come out differently (tests/test_output_version.py notices).
OUTPUT_VERSION = 1

_TRIED_ROWS = 20


@dataclass(frozen=True)
class Run:
    """A campaign with everything its files say, and its inputs as they are cut."""

    campaign: Campaign
    project: Path
    layout: Layout
    manifest: Manifest
    recipe: Recipe
    check: AnswerCheck
    model: Model | None

    @classmethod
    def at_parse(cls, config: dict[str, Any], project: Path, main: bool, where: str = "the campaign file") -> Run:
        """The campaign when the workflow is parsed; the main process looks at the inputs and writes the manifest.

        where: the campaign file, for messages.
        """
        _prepare_jobs()
        campaign = parse_campaign(config, where=where)
        layout = Layout(campaign.campaign)
        other = _live_runner(layout) if main else None
        if other is not None:
            print(
                f"gristmill: process {other} runs this campaign; changes of its inputs are not looked at",
                file=sys.stderr,
            )
        update = main and other is None
        manifest = update_manifest(campaign, project) if update else read_manifest(campaign)
        run = cls._assemble(campaign, project, layout, manifest)
        if main:
            if campaign.endpoint.sidecar is not None:
                read_sidecar(expanded(campaign.endpoint.sidecar))
            run.try_first_rows()
            print(run.describe(), file=sys.stderr)
            _note_stale_lock(layout)
        return run

    @classmethod
    def in_job(cls, config: dict[str, Any], script_folder: str) -> Run:
        """The campaign inside a job, with the manifest that the main process wrote."""
        campaign = parse_campaign(config, where="the campaign file")
        project = Path(script_folder).resolve().parents[1]
        return cls._assemble(campaign, project, Layout(campaign.campaign), read_manifest(campaign))

    @classmethod
    def _assemble(cls, campaign: Campaign, project: Path, layout: Layout, manifest: Manifest) -> Run:
        model, names = None, None
        if not campaign.endpoint.attached:
            assert campaign.model is not None
            model = load_model(campaign.model, find_file(campaign.registry, project, "the model registry"))
            names = (campaign.model, *model.aliases)
        template = schema = None
        if campaign.prompt is not None:
            template = find_file(campaign.prompt, project, "the prompt template").read_text(encoding="utf-8")
            if not template.strip():
                raise GristmillError("the prompt template is empty", where=campaign.prompt, help="write the prompt")
        if campaign.answer is not None and campaign.answer.schema_ is not None:
            schema = _read_schema(find_file(campaign.answer.schema_, project, "answer.schema"))
        made = recipe(campaign, names, template, schema)
        check = AnswerCheck(made.labels, made.schema)
        table_for(check, campaign.documents.keep if campaign.documents else ())
        return cls(campaign, project, layout, manifest, made, check, model)

    def describe(self) -> str:
        """One line: how much there is to do."""
        rows, shards, groups = self.manifest.rows, len(self.manifest.shards), len(self.manifest.groups)
        settings = self.campaign.endpoint
        through = (
            settings.url or settings.sidecar or f"{self.campaign.model} on {self.model.engine if self.model else '?'}"
        )
        empty = [source.path for source in self.manifest.sources if source.kind == "empty"]
        note = f"; empty: {', '.join(empty)}" if empty else ""
        return (
            f"campaign {self.campaign.campaign}: {_many(rows, 'request')} in {_many(shards, 'shard')}, "
            f"{_many(groups, 'group')}, through {through}{note}"
        )

    def try_first_rows(self) -> None:
        """Make requests of the first rows; name kept columns that none of them has.

        Raises GristmillError when the prompt fits none of them.
        """
        documents = self.campaign.documents
        if documents is None or not self.manifest.shards:
            return
        source = self.manifest.shards[0].source
        maker = request_maker(self.recipe, source.path)
        requests = [maker(row) for row in islice(read_rows(source), _TRIED_ROWS)]
        sendable = [request for request in requests if request.error is None]
        failed = [r.error.message for r in requests if r.error is not None and r.error.code == "template_error"]
        if failed and not sendable:
            raise GristmillError(
                f"the prompt fits none of the first rows: {failed[0]}",
                where=f"{self.campaign.prompt}, with {source.path}",
                help="use names of columns of the input; text, id and labels are always there",
            )
        missing = [name for name in documents.keep if sendable and all(r.keep[name] is None for r in sendable)]
        for name in missing:
            print(f"gristmill: documents.keep: none of the first rows has a column {name!r}", file=sys.stderr)

    # -- what a rule's jobs depend on: a job is done again when one of these changes ---------------------------------

    def group_state(self, name: str) -> str:
        """Changes when the requests of a group do."""
        return _digest(digest_of(self.manifest.groups[name]), self.recipe.digest(), OUTPUT_VERSION)

    def state(self) -> str:
        """Changes when the table must be written again."""
        parts = [digest_of(self.manifest.groups[name]) for name in self.manifest.groups]
        return _digest(
            digest_of(self.manifest.shards),
            *parts,
            self.recipe.digest(),
            repr(self.campaign.gold),
            OUTPUT_VERSION,
        )

    # -- what a rule's job does -----------------------------------------------------------------------------------

    def cut(self, group: str, output: str) -> None:
        """The job of rule `shard`."""
        write_shards(self.manifest.groups[group], self.recipe, Path(output))

    def ask(self, group: str, output: str, resources: Mapping[str, Any]) -> None:
        """The job of rule `infer`. resources: as Snakemake has them."""
        from gristmill.group import Job, run_group  # brings the OpenAI client, which takes a second to import

        settings = self.campaign.endpoint
        run_group(
            Job(
                name=group,
                shards=self.manifest.groups[group],
                layout=self.layout,
                target=partial(self._target, resources),
                check=self.check,
                limit=Limit(self.concurrency, pinned=settings.concurrency is not None),
                start_timeout_s=settings.start_timeout,
                restarts=settings.restarts,
                runtime_min=_minutes(resources.get("runtime")),
                limits=self.campaign.limits,
                rows=self.manifest.rows,
                gpus=(slurm.gpus(resources) if self.gpus is None else self.gpus) or 0,
                dedup=self.campaign.dedup,
            ),
            Path(output),
        )

    def write_table(self, outputs: tuple[str, str, str], workers: int) -> None:
        """The job of rule `merge`."""
        table = table_for(self.check, self.campaign.documents.keep if self.campaign.documents else ())
        gold = self.campaign.gold.column if self.campaign.gold else None
        parts = [
            Part(path, shard.source.path, shard.rows, table, self.check, gold)
            for path, shard in zip(self.answer_files(), self.manifest.shards, strict=True)
        ]
        ids = [(source.path, self.layout.ids(source.key)) for source in self.manifest.sources]
        merge(parts, ids, workers, (Path(outputs[0]), Path(outputs[1]), Path(outputs[2])))

    def answer_files(self) -> list[Path]:
        """The answers of each shard, in the order of the inputs."""
        group_of = self.manifest.group_of()
        return [self.layout.answers / group_of[shard.name] / shard.file for shard in self.manifest.shards]

    def judge(self, summary: str) -> None:
        """The job of rule `complete`."""
        data = json.loads(Path(summary).read_text(encoding="utf-8"))
        verdict(data, self.campaign.limits.max_error_share, self.layout)

    @property
    def concurrency(self) -> int:
        """Requests in flight, at first or pinned."""
        default = ENGINES[self.model.engine].concurrency if self.model else URL_CONCURRENCY
        return self.campaign.endpoint.concurrency or default

    @property
    def gpus(self) -> int | None:
        """GPUs of an engine; None when the campaign leaves it to the profile."""
        settings = self.campaign.endpoint
        if self.model is None or (self.model.engine == "llamacpp" and settings.gpus is None):
            return 0  # somebody else's, or a build for CPUs
        return settings.gpus

    def infer_resources(self, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
        """What rule infer asks of Slurm beyond the profile: the campaign's resources and its number of GPUs.

        defaults: the profile's `default-resources`, as Snakemake holds them.
        Raises GristmillError when the engine's flags do not fit the number of GPUs.
        """
        given = {name: _by_attempt(value) for name, value in self.campaign.resources.items()}
        known = {name: str(getattr(value, "raw", value)) for name, value in (defaults or {}).items()}
        if self.gpus is not None and not {"gres", "gpu"} & given.keys():
            given |= {"gpu": self.gpus} if "gpu" in known else {"gres": slurm.gres(known.get("gres", ""), self.gpus)}
        if self.model is not None and self.model.engine == "vllm":
            asked = {name: value for name, value in {**known, **given}.items() if not callable(value)}
            parallel_flags(self._flags, slurm.gpus(asked) if self.gpus is None else self.gpus)
        return given

    @property
    def _flags(self) -> dict[str, str | int | float | bool]:
        return {**(self.model.args if self.model else {}), **self.campaign.endpoint.args}

    def _target(self, resources: Mapping[str, Any]) -> Attachment | Launch:
        settings = self.campaign.endpoint
        if settings.sidecar is not None:
            return self._attach(expanded(settings.sidecar))
        if self.model is None or self.recipe.names is None:
            assert settings.url is not None
            return Attachment(
                settings.url.rstrip("/"),
                _api_key(settings.api_key_env, settings.api_key_file),
                self.campaign.model,
            )
        return Launch(
            model=self.model,
            path=model_path(self.model, self.project),
            names=self.recipe.names,
            address=Address(),
            flags=self._flags,
            gpus=slurm.gpus(resources) if self.gpus is None else self.gpus,
            concurrency=self.concurrency,
        )

    def _attach(self, path: Path) -> Attachment:
        """The endpoint of a sidecar, once it is ready. Raises GristmillError when it is gone."""

        def tell(text: str) -> None:
            print(f"waiting for the endpoint: {text}", file=sys.stderr, flush=True)

        folder, sidecar = wait_ready(path, self.campaign.endpoint.start_timeout, tell, from_here=True, gone=runner_gone)
        assert sidecar.url is not None
        return Attachment(sidecar.url, folder.read_key(), self.campaign.model, lease=True)


def load_run(path: Path, project: Path) -> Run:
    """A campaign file with the manifest of its last run, for commands outside the workflow."""
    campaign = load_campaign(path)
    return Run._assemble(campaign, project, Layout(campaign.campaign), read_manifest(campaign))


def _prepare_jobs() -> None:
    """What the jobs that this process starts find in their environment."""
    os.environ[RUNNER_PID] = str(os.getpid())
    # They import the library from here, whichever environment started the workflow.
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))


def record_runner(layout: Layout) -> None:
    """Note which process runs the campaign, so that a lock left by a killed one can be told from a live one."""
    write_atomically(layout.runner, json.dumps({"pid": os.getpid(), "host": os.uname().nodename}) + "\n")


def forget_runner(layout: Layout) -> None:
    """The run ended in order."""
    layout.runner.unlink(missing_ok=True)


def _runner(layout: Layout) -> tuple[int, bool] | None:
    """The process of this machine that was noted to run the campaign, and whether it is there."""
    try:
        runner = json.loads(layout.runner.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    pid = int(runner["pid"])
    return (pid, psutil.pid_exists(pid)) if runner["host"] == os.uname().nodename else None


def _live_runner(layout: Layout) -> int | None:
    """Another process on this machine that runs the campaign, if there is one: its jobs read the manifest."""
    pid, alive = _runner(layout) or (0, False)
    return pid if alive and pid != os.getpid() else None


def _note_stale_lock(layout: Layout) -> None:
    locks = Path(".snakemake/locks")
    pid, alive = _runner(layout) or (0, True)
    if alive or not (locks.is_dir() and any(locks.iterdir())):
        return
    print(
        f"gristmill: the last run (process {pid}) was killed and left this folder locked\n"
        f"  where: {locks.absolute()}\n"
        "  help:  run the same command with --unlock added, then run it again; every answer that had arrived is kept",
        file=sys.stderr,
    )


def _api_key(variable: str | None, file: str | None) -> str:
    """The key of an attached endpoint; one that needs none gets a word in its place."""
    if variable is not None:
        key = os.environ.get(variable, "").strip()
        if not key:
            raise GristmillError(
                f"the environment variable {variable} is not set",
                where="endpoint.api_key_env",
                help=f"export {variable}=... before the run, or name a file by endpoint.api_key_file",
            )
        return key
    if file is not None:
        try:
            return expanded(file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise GristmillError(
                f"the key file cannot be read: {error.strerror}: {file}", where="endpoint.api_key_file"
            ) from error
    return "none"


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GristmillError(
            f"answer.schema cannot be read: {error}", where=str(path), help="it is a JSON file"
        ) from error
    if not isinstance(schema, dict):
        raise GristmillError("answer.schema must be a JSON object", where=str(path))
    return schema


def _by_attempt(value: Any) -> Any:
    """A resource for Snakemake: of a list, the value for the attempt at hand."""
    if not isinstance(value, tuple):
        return value
    return lambda wildcards, attempt: value[min(attempt, len(value)) - 1]


def _minutes(runtime: object) -> float | None:
    return float(runtime) if isinstance(runtime, int | float) else None


def _digest(*parts: object) -> str:
    return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
