"""Soup: average the parameters of the two experts."""

from kfp.dsl import Input, Model, Output

from components import component


@component
def soup(
    recipe: str,
    run_dir: str,
    code: str,
    marathon_digest: str,
    sprint_digest: str,
    marathon: Input[Model],
    sprint: Input[Model],
    model: Output[Model],
) -> str:
    """Merge the Marathon and the Sprint expert.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        code: Digest of the library, part of the cache key.
        marathon_digest: Digest of the Marathon expert's weights, part of the cache key.
        sprint_digest: Digest of the Sprint expert's weights, part of the cache key.
        marathon: Long-horizon expert.
        sprint: Short-horizon expert.
        model: The merged checkpoint with its lineage card.

    Returns:
        Digest of the weights.
    """
    from occamy.stages import train
    from occamy.stages.context import context

    result = train.soup(context(recipe, run_dir), marathon.uri, sprint.uri)
    model.uri, model.metadata = result.uri, result.metadata
    return result.digest
