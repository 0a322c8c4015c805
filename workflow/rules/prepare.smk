# Inputs become shards of requests, and their ids are proved unique before anything is paid for.
#
# What a job depends on is its state in the manifest, a digest of content, never a file's time stamp: a file that
# grows at its end, or is only touched, leaves the jobs of its other shards alone.


rule shard:
    output:
        directory(f"{run.layout.shards}/{{source}}"),
    params:
        state=lambda wildcards: run.source_state(wildcards.source),
    log:
        f"{run.layout.logs}/shard/{{source}}.log",
    message:
        "Cutting {wildcards.source} into shards"
    script:
        "../scripts/shard.py"


rule check:
    input:
        shards=ancient(expand("{root}/{source}", root=run.layout.shards, source=run.source_keys())),
    output:
        run.layout.checked,
    params:
        state=run.state(),
    log:
        f"{run.layout.logs}/check.log",
    message:
        "Checking that ids are unique"
    script:
        "../scripts/check.py"
