"""HDPO: reinforcement learning of the Marathon expert with separate accuracy and efficiency advantages."""

from kfp.dsl import Dataset, Input, Model, Output

from components import component


@component
def hdpo(recipe: str, run_dir: str, start: Input[Model], release: Input[Dataset], model: Output[Model]) -> str:
    """Train on groups of episodes of long-horizon tasks.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        start: Checkpoint after behaviour initialisation.
        release: Sealed task release.
        model: The Marathon expert with its lineage card.

    Returns:
        Digest of the weights.
    """
    from occamy.stages import train
    from occamy.stages.context import context

    result = train.hdpo(context(recipe, run_dir), start.uri, release.uri)
    model.uri, model.metadata = result.uri, result.metadata
    return result.digest
