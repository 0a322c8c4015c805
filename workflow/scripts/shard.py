"""Cut the inputs of one group into shards of requests."""

from gristmill.errors import reported
from gristmill.run import Run

with reported(snakemake.log[0]):
    run = Run.in_job(snakemake.config, snakemake.scriptdir)
    run.cut(snakemake.wildcards.group, snakemake.output[0])
