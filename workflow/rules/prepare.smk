# Inputs become shards of requests, and their ids are proved unique before anything is paid for.
#
# What a job depends on is its state in the manifest, a digest of content, never a file's time stamp: a file that
# grows at its end, or is only touched, leaves the jobs of its other shards alone.


rule shard:
    output:
        directory(f"{run.layout.shards}/{{source}}"),
    log:
        f"{run.layout.logs}/shard/{{source}}.log",
    threads: 4
    params:
        state=lambda wildcards: run.source_state(wildcards.source),
    message:
        "Cutting {wildcards.source} into shards"
    script:
        "../scripts/shard.py"


rule check:
    input:
        shards=ancient(expand("{root}/{source}", root=run.layout.shards, source=run.source_keys())),
    output:
        run.layout.checked,
    log:
        f"{run.layout.logs}/check.log",
    params:
        state=run.state(),
    message:
        "Checking that ids are unique"
    script:
        "../scripts/check.py"
