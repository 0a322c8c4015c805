"""Fail when too many rows are not ok."""

from gristmill.errors import reported
from gristmill.run import Run

with reported(snakemake.log[0]):
    run = Run.in_job(snakemake.config, snakemake.scriptdir)
    run.judge(snakemake.input.summary)
