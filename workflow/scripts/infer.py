"""Bring the answers of one shard group."""

from gristmill.errors import reported
from gristmill.run import Run

with reported(snakemake.log[0]):
    run = Run.in_job(snakemake.config, snakemake.scriptdir)
    run.ask(snakemake.wildcards.group, snakemake.output[0], dict(snakemake.resources.items()))
