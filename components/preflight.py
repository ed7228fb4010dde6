"""Preflight: resolve the recipe once, and report everything that would make the run fail later."""

from typing import NamedTuple

from components import component


@component
def preflight(
    recipe: str,
    run_dir: str,
    seed: int,
    train_tasks: int,
    sft_epochs: int,
    hdpo_steps: int,
    hdpo_efficiency_weight: float,
    sao_steps: int,
    evaluation_tasks: int,
    evaluation_trials: int,
    promotion_margin: float,
    overrides: str,
) -> NamedTuple("Resolved", [("recipe", str), ("code", str)]):  # type: ignore[valid-type]
    """Resolve profile, overrides and knobs to one recipe; refuse what cannot work, all failures at once.

    Args:
        recipe: Profile name or YAML text.
        run_dir: Directory that holds everything the run makes.
        seed: Seed of everything random.
        train_tasks: Training tasks to author per pool; 0 keeps the recipe's.
        sft_epochs: Passes over the demonstrations; 0 keeps the recipe's.
        hdpo_steps: Policy updates of HDPO; 0 keeps the recipe's.
        hdpo_efficiency_weight: Weight of the efficiency surrogate; negative keeps the recipe's.
        sao_steps: Actor updates of the final RL; 0 keeps the recipe's.
        evaluation_tasks: Held-out tasks per pool; 0 keeps the recipe's.
        evaluation_trials: Attempts per held-out task; 0 keeps the recipe's.
        promotion_margin: Least gain over the base; negative keeps the recipe's.
        overrides: Further recipe overrides, one key=value a line.

    Returns:
        recipe: The resolved recipe as JSON, for every other task.
        code: Digest of the installed library; makes caches miss when the code changes.
    """
    from occamy.stages import start

    resolved = start.preflight(
        recipe,
        run_dir,
        seed,
        {
            "train_tasks": train_tasks,
            "sft_epochs": sft_epochs,
            "hdpo_steps": hdpo_steps,
            "hdpo_efficiency_weight": hdpo_efficiency_weight,
            "sao_steps": sao_steps,
            "evaluation_tasks": evaluation_tasks,
            "evaluation_trials": evaluation_trials,
            "promotion_margin": promotion_margin,
        },
        overrides,
    )
    return (resolved.recipe, resolved.code)
