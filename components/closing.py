"""Closing: whatever happened, close the tracking runs and write the report."""

from kfp import dsl
from kfp.dsl import HTML, Output

from components import component


@component
def closing(run_dir: str, status: dsl.PipelineTaskFinalStatus, report: Output[HTML]) -> str:
    """Close MLflow runs that are still open and write the report with what there is.

    Args:
        run_dir: Directory of the run.
        status: How the pipeline ended.
        report: The report as one self-contained page.

    Returns:
        Path of the report.
    """
    from occamy.stages import judge

    page = judge.closing(run_dir, status.state)
    with open(report.path, "w") as f:  # also where KFP keeps it, so that its UI can show it
        f.write(page.read_text())
    return str(page)
