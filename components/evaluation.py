"""Evaluation: every candidate on the same held-out tasks, with cost."""

from kfp.dsl import Dataset, Input, Metrics, Model, Output

from components import component


@component
def evaluation(
    recipe: str,
    run_dir: str,
    code: str,
    digests: str,
    release: Input[Dataset],
    marathon_sft: Input[Model],
    marathon: Input[Model],
    sprint: Input[Model],
    soup: Input[Model],
    sao: Input[Model],
    results: Output[Dataset],
    metrics: Output[Metrics],
) -> str:
    """Evaluate base, experts, soup and the final checkpoint on held-out tasks.

    Args:
        recipe: Resolved recipe (JSON).
        run_dir: Directory of the run.
        code: Digest of the library, part of the cache key.
        digests: Digests of release and candidates, part of the cache key.
        release: Sealed task release.
        marathon_sft: Long-horizon checkpoint before reinforcement learning.
        marathon: Long-horizon expert.
        sprint: Short-horizon expert.
        soup: Merged checkpoint.
        sao: Final checkpoint.
        results: Sealed evaluation of all candidates.
        metrics: Headline figures of every candidate.

    Returns:
        Digest of the evaluation.
    """
    from occamy.stages import judge
    from occamy.stages.context import context

    candidates = {
        "marathon-sft": marathon_sft.uri,
        "marathon": marathon.uri,
        "sprint": sprint.uri,
        "soup": soup.uri,
        "sao": sao.uri,
    }
    result = judge.evaluation(context(recipe, run_dir), release.uri, candidates)
    results.uri, results.metadata = result.uri, result.metadata
    for name, value in result.facts.items():
        if isinstance(value, int | float):
            metrics.log_metric(name, value)
    with open(metrics.path, "w") as f:  # a cached task with metrics hits only if this file exists
        f.write(result.digest)
    return result.digest
