"""The `gristmill` command: what a workflow engine cannot do."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from gristmill import __version__, endpoints, slurm
from gristmill.campaign import json_schema, load_campaign
from gristmill.errors import GristmillError, reported
from gristmill.layout import Layout, find_file
from gristmill.manifest import read_manifest
from gristmill.processes import gristmill_command
from gristmill.registry import load_model, model_path
from gristmill.sidecar import LOCAL, Settings, call, on_its_node, read_sidecar

_SHOWN = ["id", "status", "label", "answer", "error_code", "prompt_tokens", "completion_tokens", "latency_s"]


_PROJECT = Path(__file__).parents[3]


def main(argv: list[str] | None = None) -> int:
    """Run a command; exit status 0, 1 for trouble that the message explains, 2 for wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    with reported():
        return int(args.do(args, argv) or 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gristmill", description="Bulk LLM inference as a Snakemake workflow.")
    parser.add_argument("--version", action="version", version=f"gristmill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    show = commands.add_parser("show", help="where a campaign's results are, and its first rows")
    show.add_argument("campaign", type=Path, help="campaign file (YAML)")
    show.add_argument("--rows", type=int, default=10, help="how many rows (default 10)")
    show.set_defaults(do=lambda args, argv: _show(args.campaign, args.rows))

    watched = commands.add_parser("watch", help="progress of a campaign while it runs")
    watched.add_argument("campaign", type=Path, help="campaign file (YAML)")
    watched.add_argument("--once", action="store_true", help="print it once, as where there is no terminal")
    watched.set_defaults(do=lambda args, argv: _watch(args.campaign, args.once))

    schema = commands.add_parser("schema", help="print the JSON Schema of a campaign file")
    schema.set_defaults(do=lambda args, argv: print(json_schema(), end=""))

    _add_endpoint(commands.add_parser("endpoint", help="endpoints that outlive a run, on Slurm or this machine"))

    batch = commands.add_parser("batch", help="a file of requests through an endpoint")
    run = batch.add_subparsers(required=True, metavar="run").add_parser(
        "run", help="ask a running endpoint, or an engine started here, every request of a file"
    )
    target = run.add_mutually_exclusive_group(required=True)
    target.add_argument("--sidecar", type=Path, metavar="DIR", help="folder of `gristmill endpoint start`")
    target.add_argument("--url", help="base URL of a running endpoint, ending in /v1")
    target.add_argument("--model", help="a name in the model registry; its engine is started here")
    run.add_argument("--api-key-env", metavar="NAME", help="environment variable with the key of --url")
    run.add_argument("--served-model", metavar="NAME", help="model of requests that name none (--url, --sidecar)")
    _add_batch(run)
    run.set_defaults(do=_batch_run)

    once = commands.add_parser("run", help="one file of requests, one results file: a job of its own on Slurm")
    once.add_argument("--model", required=True, help="a name in the model registry")
    _add_batch(once)
    _add_slurm(once)
    once.set_defaults(do=_run_once)
    return parser


def positive_number(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError
    return number


def _add_endpoint(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    start = commands.add_parser("start", help="start one; prints JSON {job_id, host, port, url, model, ...}")
    start.add_argument("--model", required=True, help="a name in the model registry")
    start.add_argument("--outdir", required=True, type=Path, metavar="DIR", help="folder for sidecar, script and logs")
    start.add_argument(
        "--idle", type=positive_number, default=30, metavar="MINUTES", help="it ends when unused (default 30)"
    )
    start.add_argument("--share", action="store_true", help="listen beyond loopback, and show how to call it")
    start.add_argument("--group-readable", action="store_true", help="your group may read the key")
    start.add_argument("--port", type=int, default=0, choices=range(65536), metavar="PORT", help="default: a free one")
    _add_engine(start)
    _add_slurm(start)
    start.set_defaults(do=_endpoint_start)
    for name, do, what in (
        ("status", _endpoint_status, "ask an endpoint how it is"),
        ("stop", _endpoint_stop, "end one, and wait until nothing of it is left"),
    ):
        command = commands.add_parser(name, help=what)
        which = command.add_mutually_exclusive_group(required=True)
        which.add_argument("--job", metavar="ID", help="job id, as `start` printed it")
        which.add_argument("--sidecar", type=Path, metavar="DIR", help="its folder")
        command.set_defaults(do=do)
    commands.add_parser("list", help="those started from this account").set_defaults(do=_endpoint_list)
    call = commands.add_parser("call")  # what a step of the job runs for another machine
    call.add_argument("folder", type=Path)
    call.add_argument("method")
    call.add_argument("what")
    call.set_defaults(do=_endpoint_call)
    serve = commands.add_parser("serve")  # what the job runs
    serve.add_argument("folder", type=Path)
    serve.set_defaults(do=_endpoint_serve)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--in", dest="source", required=True, type=Path, metavar="FILE", help="requests: JSON or JSONL")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="results, one line a request (JSONL)")
    parser.add_argument("--concurrency", type=int, help="requests in flight")
    parser.add_argument("--max-error-share", type=float, default=0.01, help="fail above it (default 0.01)")
    _add_engine(parser)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, help="GPUs of the engine (default: the profile's)")
    parser.add_argument("--arg", action="append", default=[], metavar="FLAG=VALUE", help="flag of the engine")
    parser.add_argument("--registry", default="config/models.yaml", metavar="FILE", help="model registry")
    parser.add_argument("--start-timeout", type=positive_number, default=900, metavar="SECONDS", help="for the engine")
    parser.add_argument("--restarts", type=int, default=3, help="how often an engine that died is started again")


def _add_slurm(parser: argparse.ArgumentParser) -> None:
    where = "option of sbatch, such as account=proj or time=02:00:00; over those of the profile"
    parser.add_argument("--slurm", action="append", default=[], metavar="OPTION=VALUE", help=where)
    parser.add_argument(
        "--profile", default="profiles/slurm", metavar="DIR", help="Snakemake profile with the defaults"
    )
    parser.add_argument("--local", action="store_true", help="on this machine, without Slurm")
    parser.add_argument("--dry-run", action="store_true", help="check and write the script, submit nothing")
    parser.add_argument("--wait", action=argparse.BooleanOptionalAction, default=True, help="until it is ready or done")


# -- endpoints --------------------------------------------------------------------------------------------------------


def _endpoint_serve(args: argparse.Namespace, argv: list[str]) -> int:
    from gristmill.serving import serve  # brings the OpenAI client, which takes a second to import

    return serve(args.folder)


def _endpoint_start(args: argparse.Namespace, argv: list[str]) -> None:
    if args.local and args.slurm:
        raise GristmillError("--local and --slurm exclude each other", help="leave one of them out")
    options = None if args.local else _slurm_options(args)
    settings = Settings(
        model=args.model,
        registry=str(find_file(args.registry, _PROJECT, "the model registry").absolute()),
        project=str(_PROJECT),
        gpus=_gpus(args, options),
        args=_pairs(args.arg, "--arg", flags=True),
        idle_s=60 * args.idle,
        share=args.share,
        port=args.port,
        start_timeout_s=args.start_timeout,
        restarts=args.restarts,
        group=args.group_readable,
    )
    endpoints.start(args.outdir, settings, options, dry_run=args.dry_run, wait=args.wait)


def _endpoint_status(args: argparse.Namespace, argv: list[str]) -> int:
    folder = args.sidecar or endpoints.folder_of(args.job)
    state = endpoints.status(folder)
    print(json.dumps(state, indent=1))
    return 0 if state["state"] not in ("stale", "ended") else 1


def _endpoint_stop(args: argparse.Namespace, argv: list[str]) -> int:
    folder = args.sidecar or endpoints.folder_of(args.job)
    print(json.dumps(endpoints.stop(folder), indent=1))
    return 0


def _endpoint_call(args: argparse.Namespace, argv: list[str]) -> None:
    print(json.dumps(call(*read_sidecar(args.folder), args.method, args.what)))


def _endpoint_list(args: argparse.Namespace, argv: list[str]) -> None:
    print(json.dumps([endpoints.status(folder) for folder in endpoints.known().values()], indent=1))


def _slurm_options(args: argparse.Namespace) -> dict[str, str]:
    """Options of sbatch: those of the profile, then --gpus, then --slurm."""
    path = Path(args.profile)
    profile = path if path.exists() else _PROJECT / path
    options = slurm.profile_options(profile) if profile.exists() else {}
    if args.gpus is not None and "gpus" in options:
        options["gpus"] = str(args.gpus)
    elif args.gpus is not None:
        options["gres"] = slurm.gres(options.get("gres", ""), args.gpus)
    given = _pairs(args.slurm, "--slurm")
    options |= {slurm.OPTIONS.get(name, name.replace("_", "-")): str(value) for name, value in given.items()}
    return {name: value for name, value in options.items() if value or name not in ("gres", "gpus")}


def _gpus(args: argparse.Namespace, options: dict[str, str] | None) -> int | None:
    if args.gpus is not None or options is None:
        return int(args.gpus) if args.gpus is not None else None
    return slurm.gpus({"gpu": options.get("gpus"), "gres": options.get("gres", "")})


def _pairs(words: list[str], option: str, *, flags: bool = False) -> dict[str, Any]:
    """NAME=VALUE words. flags: values are numbers where they look like it, and a bare name is a switch."""
    pairs: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if not name or not (equals or flags):
            raise GristmillError(f"{option} takes NAME=VALUE, found {word!r}", help=f"{option} account=proj, say")
        pairs[name] = (yaml.safe_load(value) if equals else True) if flags else value
    return pairs


# -- batches ----------------------------------------------------------------------------------------------------------


def _batch_run(args: argparse.Namespace, argv: list[str]) -> int:
    from gristmill import oneshot

    endpoint: dict[str, Any] = {"start_timeout": args.start_timeout, "restarts": args.restarts}
    if args.concurrency is not None:
        endpoint["concurrency"] = args.concurrency
    settings: dict[str, Any] = {"endpoint": endpoint}
    if args.sidecar is not None:
        _, sidecar = read_sidecar(args.sidecar)
        if not sidecar.reachable and not sidecar.job_id.startswith(LOCAL):
            command, environment = on_its_node(sidecar, argv)
            return subprocess.run(command, env=environment, stdin=subprocess.DEVNULL).returncode
        endpoint["sidecar"] = str(args.sidecar.absolute())
        settings["model"] = args.served_model or sidecar.model
    elif args.url is not None:
        endpoint["url"] = args.url
        if args.api_key_env:
            endpoint["api_key_env"] = args.api_key_env
        if args.served_model:
            settings["model"] = args.served_model
    else:
        endpoint["args"] = _pairs(args.arg, "--arg", flags=True)
        if args.gpus is not None:
            endpoint["gpus"] = args.gpus
        settings["model"] = args.model
        settings["registry"] = str(find_file(args.registry, _PROJECT, "the model registry").absolute())
    oneshot.run_batch(args.source, args.out, _PROJECT, settings, args.max_error_share)
    return 0


def _run_once(args: argparse.Namespace, argv: list[str]) -> int:
    from gristmill import oneshot

    registry = find_file(args.registry, _PROJECT, "the model registry").absolute()
    model_path(load_model(args.model, registry), _PROJECT)  # what is wrong with it is told now
    oneshot.check_files(args.source, args.out)
    words = ["--model", args.model, "--in", str(args.source.absolute()), "--out", str(args.out.absolute())]
    words += ["--registry", str(registry)]
    words += ["--start-timeout", str(args.start_timeout), "--restarts", str(args.restarts)]
    words += ["--max-error-share", str(args.max_error_share)]
    words += [part for arg in args.arg for part in ("--arg", arg)]
    if args.concurrency is not None:
        words += ["--concurrency", str(args.concurrency)]
    options = None if args.local else _slurm_options(args)
    if (gpus := _gpus(args, options)) is not None:
        words += ["--gpus", str(gpus)]
    if options is None:
        return main(["batch", "run", *words])
    oneshot.run_job(gristmill_command("batch", "run", *words), args.out, options, dry_run=args.dry_run, wait=args.wait)
    return 0


def _printable(value: object) -> object:
    """A text with escapes in the place of characters that a terminal would act on."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def _watch(path: Path, once: bool) -> None:
    from gristmill.watch import look, watch

    campaign = load_campaign(path)
    groups = read_manifest(campaign).groups
    rows = {name: sum(shard.rows for shard in shards) for name, shards in groups.items()}
    with contextlib.suppress(KeyboardInterrupt):
        watch(lambda: look(campaign.campaign, rows, Layout(campaign.campaign)), once)


def _show(path: Path, rows: int) -> None:
    layout = Layout(load_campaign(path).campaign)
    if not layout.table.exists():
        raise GristmillError(
            "the campaign has no table yet",
            where=str(layout.table),
            help=f"snakemake --profile profiles/local --configfile {path}",
        )
    try:
        with pq.ParquetFile(layout.table) as file:
            batch = next(file.iter_batches(batch_size=max(rows, 1), columns=_SHOWN), None)
    except (OSError, pa.ArrowException) as error:
        raise GristmillError(
            f"the table cannot be read: {error}",
            where=str(layout.table),
            help="delete it and run the campaign again: it is written anew, and nothing is asked again",
        ) from error
    if batch is not None:
        print(batch.to_pandas().map(_printable).to_string(index=False, max_colwidth=40, na_rep="-"))
    summary = json.loads(layout.summary.read_text(encoding="utf-8"))
    counts = ", ".join(f"{summary[status]:,} {status}" for status in ("ok", "invalid", "error"))
    print(f"\n{summary['rows']:,} rows: {counts}")
    if summary["gold"]:
        gold = summary["gold"]
        print(f"agrees with gold in {gold['right']:,} of {gold['rows']:,} rows ({gold['accuracy']:.0%})")
    print(f"table:   {layout.table}\nerrors:  {layout.errors}\nsummary: {layout.summary}\njournal: {layout.journal}")


if __name__ == "__main__":
    raise SystemExit(main())
