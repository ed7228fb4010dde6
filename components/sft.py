"""SFT: behaviour initialisation of one expert."""

from kfp.dsl import Dataset, Input, Model, Output

from components import component


@component
def sft(recipe: str, run_dir: str, candidate: str, demonstrations: Input[Dataset], model: Output[Model]) -> str:
    """Train the base checkpoint on the demonstrations of one pool.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        candidate: marathon-sft (long-horizon pool) or sprint (short-horizon pool).
        demonstrations: Sealed demonstrations of both pools.
        model: Checkpoint with its lineage card.

    Returns:
        Digest of the weights.
    """
    from occamy.stages import train
    from occamy.stages.context import context

    result = train.sft(context(recipe, run_dir), candidate, demonstrations.uri)
    model.uri, model.metadata = result.uri, result.metadata
    return result.digest
