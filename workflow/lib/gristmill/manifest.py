"""How many requests, shards and groups there are, known when the workflow is parsed.

The manifest under results/<campaign>/ remembers how each input was cut, keyed by path, size and mtime, so that
an unchanged input is not read again. Each shard keeps its place in `slots` for as long as it exists: new shards
take places at the end, so that files added and lines appended leave the other groups as they are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.campaign import Campaign
from gristmill.cutting import cut_source, prove_unique
from gristmill.errors import GristmillError
from gristmill.layout import Layout, write_atomically
from gristmill.sources import Source, find_inputs, identity, recognise

_VERSION = 1


@dataclass(frozen=True)
class Shard:
    """Consecutive rows of one source. first: how many rows of the source come before. start: see cutting.Cut."""

    source: Source
    index: int
    first: int
    rows: int
    digest: str
    start: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.source.key}.{self.index:05d}"

    @property
    def file(self) -> str:
        """The name of its files, in the folder of its group."""
        return f"{self.name}.jsonl"


@dataclass(frozen=True)
class Manifest:
    """The inputs of a campaign as they were cut. shards: in input order. groups: name → shards."""

    sources: list[Source]
    shards: list[Shard]
    groups: dict[str, list[Shard]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    def group_of(self) -> dict[str, str]:
        """Shard name → name of its group."""
        return {shard.name: name for name, shards in self.groups.items() for shard in shards}


def digest_of(shards: list[Shard]) -> str:
    """A digest of which rows the shards hold, in order."""
    text = "\n".join(f"{shard.name} {shard.rows} {shard.digest}" for shard in shards)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def update_manifest(campaign: Campaign, project: Path) -> Manifest:
    """Look at the inputs, read those that changed, prove the ids unique, and write the manifest.

    For the main process only. Raises GristmillError for inputs that cannot be read and ids that occur twice.
    """
    layout = Layout(campaign.campaign)
    path = layout.manifest
    old = _load(path)
    cut = {
        "shard_size": campaign.shard_size,
        "shards_per_group": campaign.shards_per_group,
        "documents": campaign.documents.model_dump(exclude={"keep"}) if campaign.documents else None,
    }
    if old.get("cut") != cut:
        old = {}
    entries: dict[str, Any] = {}
    for name in find_inputs(campaign, project):
        known = old.get("inputs", {}).get(name)
        now = identity(name)
        if known and known["identity"] == now and _has_ids(known, layout):
            entries[name] = known
            continue
        source = recognise(name, campaign.documents)
        cuts = cut_source(source, campaign.shard_size, campaign.documents, layout.ids(source.key))
        entries[name] = {"identity": now, "source": source.as_json(), "shards": [cut._asdict() for cut in cuts]}
    data = {"version": _VERSION, "cut": cut, "inputs": entries}
    shards = _shards(entries)
    data["slots"] = _slots(old.get("slots", []), [shard.name for shard in shards])
    if data != old:
        sources = [Source(**entry["source"]) for entry in entries.values()]
        prove_unique([(source, layout.ids(source.key)) for source in sources], campaign.documents)
        write_atomically(path, json.dumps(data, indent=1) + "\n")
    manifest = _manifest(data)
    if not manifest.shards:
        raise GristmillError(
            "the inputs have no rows", where=", ".join(entries), help="check `input` in the campaign file"
        )
    return manifest


def read_manifest(campaign: Campaign) -> Manifest:
    """The manifest that the main process wrote."""
    path = Layout(campaign.campaign).manifest
    data = _load(path)
    if not data:
        raise GristmillError("there is no manifest", where=str(path), help="start the campaign with snakemake")
    return _manifest(data)


def _load(path: Path) -> dict[str, Any]:
    """The stored manifest, or {} when there is none that can be used: it is a cache and is made again."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return data if isinstance(data, dict) and data.get("version") == _VERSION else {}


def _has_ids(entry: dict[str, Any], layout: Layout) -> bool:
    """Whether the hashes of an input's ids are all there; a run that was killed may have left a part."""
    path = layout.ids(Source(**entry["source"]).key)
    return path.exists() and path.stat().st_size == 16 * sum(cut["rows"] for cut in entry["shards"])


def _shards(entries: dict[str, Any]) -> list[Shard]:
    shards = []
    for entry in entries.values():
        source, first = Source(**entry["source"]), 0
        for index, cut in enumerate(entry["shards"]):
            start = tuple(cut["start"]) if cut["start"] else None
            shards.append(Shard(source, index, first, cut["rows"], cut["digest"], start))
            first += cut["rows"]
    return shards


def _slots(old: list[str | None], names: list[str]) -> list[str | None]:
    """Places of shards: those that still exist keep theirs, gone ones leave a gap, new ones come last."""
    present = set(names)
    kept: list[str | None] = [name if name in present else None for name in old]
    while kept and kept[-1] is None:
        kept.pop()
    placed = set(kept)
    return kept + [name for name in names if name not in placed]


def _manifest(data: dict[str, Any]) -> Manifest:
    shards = _shards(data["inputs"])
    by_name = {shard.name: shard for shard in shards}
    size = data["cut"]["shards_per_group"]
    groups: dict[str, list[Shard]] = {}
    for place, name in enumerate(data["slots"]):
        if name is not None:
            groups.setdefault(f"g{place // size:04d}", []).append(by_name[name])
    return Manifest([Source(**entry["source"]) for entry in data["inputs"].values()], shards, groups)
