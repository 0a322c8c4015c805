# The campaign, validated, and the names that jobs go by.
from gristmill import slurm_plugin
from gristmill.errors import GristmillError
from gristmill.run import Run, forget_runner, record_runner
from snakemake.exceptions import WorkflowError

try:
    run = Run.at_parse(
        config,
        Path(workflow.basedir),
        main=workflow.is_main_process,
        where=", ".join(map(str, workflow.overwrite_configfiles)) or "config/config.yaml",
    )
    infer_resources = run.infer_resources(workflow.resource_settings.default_resources)
except GristmillError as error:
    raise WorkflowError(str(error))


wildcard_constraints:
    group=r"g\d+",


slurm_plugin.prepare()


def before_jobs():
    """Nothing is submitted that Slurm would refuse."""
    try:
        slurm_plugin.check_jobs(workflow)
    except GristmillError as error:
        raise WorkflowError(str(error))
