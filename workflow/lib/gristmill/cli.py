"""The `gristmill` command: what a workflow engine cannot do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill import __version__
from gristmill.campaign import json_schema, load_campaign
from gristmill.errors import GristmillError, reported
from gristmill.layout import Layout

_SHOWN = ["id", "status", "label", "answer", "error_code", "prompt_tokens", "completion_tokens", "latency_s"]


def main(argv: list[str] | None = None) -> int:
    """Run a command; exit status 0, 1 for trouble that the message explains, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="gristmill", description="Bulk LLM inference as a Snakemake workflow.")
    parser.add_argument("--version", action="version", version=f"gristmill {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="where a campaign's results are, and its first rows")
    show.add_argument("campaign", type=Path, help="campaign file (YAML)")
    show.add_argument("--rows", type=int, default=10, help="how many rows (default 10)")
    commands.add_parser("schema", help="print the JSON Schema of a campaign file")
    args = parser.parse_args(argv)
    with reported():
        if args.command == "show":
            _show(args.campaign, args.rows)
        else:
            print(json_schema(), end="")
    return 0


def _printable(value: object) -> object:
    """A text with escapes in the place of characters that a terminal would act on."""
    if not isinstance(value, str) or value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


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
