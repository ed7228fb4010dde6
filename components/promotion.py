"""Promotion: register the final checkpoint if it passes the recipe's thresholds."""

from kfp.dsl import Dataset, Input, Model

from components import component


@component
def promotion(recipe: str, run_dir: str, results: Input[Dataset], model: Input[Model]) -> str:
    """Compare the final checkpoint with the base and register it as candidate or champion.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        results: Sealed evaluation of all candidates.
        model: Final checkpoint.

    Returns:
        The decision in one line.
    """
    from occamy.stages import judge
    from occamy.stages.context import context

    return str(judge.promotion(context(recipe, run_dir), results.uri, model.uri).facts["reason"])
