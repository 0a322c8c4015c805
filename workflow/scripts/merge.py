"""Write the table and prove it complete."""

from gristmill.errors import reported
from gristmill.run import Run

if __name__ == "__main__":  # the processes that convert import this file as well
    with reported(snakemake.log[0]):
        run = Run.in_job(snakemake.config, snakemake.scriptdir)
        run.write_table(tuple(snakemake.output), snakemake.threads)
