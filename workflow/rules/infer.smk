# One job a shard group: engine up, every request of the group that has no answer yet, engine down.


rule infer:
    input:
        f"{run.layout.shards}/{{group}}",
    output:
        directory(f"{run.layout.answers}/{{group}}"),
    log:
        f"{run.layout.logs}/infer/{{group}}.log",
    resources:
        **infer_resources,
        engine=1,
    params:
        state=lambda wildcards: run.group_state(wildcards.group),
    message:
        "Asking the requests of {wildcards.group}"
    script:
        "../scripts/infer.py"
