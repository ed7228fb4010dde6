"""Admission: execute every task through the gates and seal the release."""

from kfp.dsl import Dataset, Input, Output

from components import component


@component
def admission(
    recipe: str, run_dir: str, code: str, tasks_digest: str, tasks: Input[Dataset], release: Output[Dataset]
) -> str:
    """Admit or quarantine every task package, with execution evidence.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        code: Digest of the library, part of the cache key.
        tasks_digest: Digest of the task packages, part of the cache key.
        tasks: Sealed folder of task packages.
        release: Sealed task release.

    Returns:
        Digest of the release.
    """
    from occamy.stages import data
    from occamy.stages.context import context

    result = data.admission(context(recipe, run_dir), tasks.uri)
    release.uri, release.metadata = result.uri, result.metadata
    return result.digest
