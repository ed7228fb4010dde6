"""SAO: final reinforcement learning on the co-work mix, single rollouts with a critic."""

from kfp.dsl import Dataset, Input, Model, Output

from components import component


@component
def sao(recipe: str, run_dir: str, start: Input[Model], release: Input[Dataset], model: Output[Model]) -> str:
    """Train the soup asynchronously on both pools, with compaction.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        start: The merged checkpoint.
        release: Sealed task release.
        model: The final checkpoint with its lineage card.

    Returns:
        Digest of the weights.
    """
    from occamy.stages import train
    from occamy.stages.context import context

    result = train.sao(context(recipe, run_dir), start.uri, release.uri)
    model.uri, model.metadata = result.uri, result.metadata
    return result.digest
