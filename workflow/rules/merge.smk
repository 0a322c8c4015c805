# Answers become one table, proved complete; then the run is judged, with everything already written.


rule merge:
    input:
        answers=expand("{root}/{group}", root=run.layout.answers, group=run.manifest.groups),
    output:
        table=run.layout.table,
        errors=run.layout.errors,
        summary=run.layout.summary,
    log:
        f"{run.layout.logs}/merge.log",
    retries: 0
    localrule: True
    threads: 4
    params:
        state=run.state(),
    message:
        "Writing {output.table}"
    script:
        "../scripts/merge.py"


rule complete:
    input:
        summary=run.layout.summary,
    output:
        touch(run.layout.complete),
    log:
        f"{run.layout.logs}/complete.log",
    retries: 0
    localrule: True
    params:
        max_error_share=run.campaign.limits.max_error_share,
    message:
        "Judging the share of rows that are not ok"
    script:
        "../scripts/complete.py"
