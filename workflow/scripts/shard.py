"""Cut one input into shards of requests."""

if __name__ == "__main__":  # worker processes import this file too, and need none of this
    from gristmill.errors import reported
    from gristmill.run import Run

    with reported(snakemake.log[0]):
        run = Run.in_job(snakemake.config, snakemake.scriptdir)
        run.cut(snakemake.wildcards.source, snakemake.output[0], snakemake.threads)
