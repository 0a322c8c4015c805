"""Where a campaign keeps things: every path under results/<campaign>/, and how given paths are found."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import GristmillError

# Names the Snakemake process to its jobs, which stop when it is gone.
RUNNER_PID = "GRISTMILL_RUNNER_PID"


@dataclass(frozen=True)
class Layout:
    """Paths of one campaign's results, relative to the working directory."""

    campaign: str

    @property
    def root(self) -> Path:
        return Path("results") / self.campaign

    @property
    def manifest(self) -> Path:
        return self.root / "manifest" / "manifest.json"

    def ids(self, source: str) -> Path:
        """Hashes of the ids of a source."""
        return self.root / "manifest" / f"{source}.ids"

    @property
    def runner(self) -> Path:
        """Which Snakemake process runs the campaign."""
        return self.root / "runner.json"

    @property
    def shards(self) -> Path:
        return self.root / "shards"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def telemetry(self) -> Path:
        """What attempts do and cost, one file each."""
        return self.root / "telemetry"

    @property
    def answers(self) -> Path:
        return self.root / "answers"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def job_log(self, group: str) -> Path:
        """The log of a group's infer job."""
        return self.logs / "infer" / f"{group}.log"

    @property
    def table(self) -> Path:
        return self.root / "answers.parquet"

    @property
    def errors(self) -> Path:
        return self.root / "errors.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def complete(self) -> Path:
        return self.root / "complete"


def expanded(given: str) -> Path:
    """A path as a person wrote it, with `$VARIABLES` and `~`."""
    return Path(os.path.expandvars(given)).expanduser()


def find_file(given: str, project: Path, what: str) -> Path:
    """A path of the campaign: as it stands from the working directory, else from the project's folder.

    `$VARIABLES` and `~` are expanded. Raises GristmillError when it is in neither place.
    """
    path = expanded(given)
    for candidate in (path, project / path):
        if candidate.exists():
            return candidate
    raise GristmillError(
        f"{what} does not exist: {given}",
        where=f"looked in {Path.cwd()} and {project}",
        help="correct the path in the campaign file",
    )


@contextlib.contextmanager
def only_one(folder: Path, busy: str) -> Iterator[None]:
    """Keep other processes out of a folder that do the same; a killed one keeps nobody out.

    Raises GristmillError with the words `busy` when another is in it.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(opened)
        raise GristmillError(busy, where=str(folder), help="wait until it has ended") from error
    except OSError:
        pass  # a filesystem without locks
    try:
        yield
    finally:
        os.close(opened)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` so that a reader sees the old or the new content, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
