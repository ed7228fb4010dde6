"""Synthesis: author executable task contracts."""

from kfp.dsl import Dataset, Output

from components import component


@component
def synthesis(recipe: str, run_dir: str, code: str, tasks: Output[Dataset]) -> str:
    """Author the task packages that the recipe asks for.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        code: Digest of the library, part of the cache key.
        tasks: Sealed folder of task packages.

    Returns:
        Digest of the task packages.
    """
    from occamy.stages import data
    from occamy.stages.context import context

    result = data.synthesis(context(recipe, run_dir))
    tasks.uri, tasks.metadata = result.uri, result.metadata
    return result.digest
