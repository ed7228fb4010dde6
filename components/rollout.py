"""Rollout: demonstrations of the admitted tasks, recorded token by token."""

from kfp.dsl import Dataset, Input, Output

from components import component


@component
def rollout(recipe: str, run_dir: str, release: Input[Dataset], demonstrations: Output[Dataset]) -> str:
    """Run the demonstrator through the same harness, sandbox and recording proxy that the policy uses.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        release: Sealed task release.
        demonstrations: Sealed demonstrations of both pools.

    Returns:
        Digest of the demonstrations.
    """
    from occamy.stages import data
    from occamy.stages.context import context

    result = data.demonstrations(context(recipe, run_dir), release.uri)
    demonstrations.uri, demonstrations.metadata = result.uri, result.metadata
    return result.digest
