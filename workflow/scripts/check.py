"""Prove that ids are unique."""

from gristmill.errors import reported
from gristmill.run import Run

with reported(snakemake.log[0]):
    run = Run.in_job(snakemake.config, snakemake.scriptdir)
    run.check_inputs(snakemake.output[0])
