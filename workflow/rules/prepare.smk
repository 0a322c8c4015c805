# Inputs become shards of requests, the shards of a group together.
#
# What a job depends on is its group's state in the manifest, a digest of content, never a file's time stamp: a file
# that grows at its end, or is only touched, leaves the jobs of the other groups alone. Inputs are no `input:` of the
# rule for that reason. No `ancient()` either: jobs behind a rerunning one are not looked at for changed params then.


rule shard:
    output:
        directory(f"{run.layout.shards}/{{group}}"),
    log:
        f"{run.layout.logs}/shard/{{group}}.log",
    retries: 0
    localrule: True
    params:
        state=lambda wildcards: run.group_state(wildcards.group),
    message:
        "Cutting {wildcards.group} into shards"
    script:
        "../scripts/shard.py"
