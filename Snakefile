# Gristmill: one typed row for every input, through one engine job per shard group.
#
# results/<campaign>/
#   manifest/          how the inputs are cut, and their ids (a cache)
#   shards/            requests, cut from the inputs
#   journal/           every answer as it arrived; append-only, what a rerun resumes from
#   answers/           the journal's answers of each finished group, in order
#   answers.parquet    one row for every input row
#   errors.jsonl       the rows that are not ok, and why
#   summary.json       counts
#   logs/              one log a job, and each engine's own
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")

sys.path.insert(0, str(Path(workflow.basedir) / "workflow" / "lib"))


# A campaign file is complete by itself: the demo is read only when none is named.
if not workflow.overwrite_configfiles:

    configfile: Path(workflow.basedir) / "config" / "config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/infer.smk"
include: "workflow/rules/merge.smk"


onstart:
    before_jobs()
    record_runner(run.layout)


onsuccess:
    forget_runner(run.layout)


onerror:
    forget_runner(run.layout)


rule all:
    default_target: True
    input:
        run.layout.table,
        run.layout.errors,
        run.layout.summary,
        run.layout.complete,
