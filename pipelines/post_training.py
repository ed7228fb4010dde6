"""The whole recipe as one DAG: the same object runs under kfp.local and compiles to IR YAML for a cluster."""

from kfp import dsl

from components.admission import admission
from components.closing import closing
from components.evaluation import evaluation
from components.hdpo import hdpo
from components.preflight import preflight
from components.promotion import promotion
from components.rollout import rollout
from components.sao import sao
from components.sft import sft
from components.soup import soup
from components.synthesis import synthesis


@dsl.pipeline(name="post-training", description="From a base checkpoint to a cost-efficient co-work agent.")
def post_training(
    recipe: str = "laptop",
    run_dir: str = "runs/latest",
    seed: int = 1,
    train_tasks: int = 0,
    sft_epochs: int = 0,
    hdpo_steps: int = 0,
    hdpo_efficiency_weight: float = -1.0,
    sao_steps: int = 0,
    evaluation_tasks: int = 0,
    evaluation_trials: int = 0,
    promotion_margin: float = -1.0,
    overrides: str = "",
) -> None:
    """Synthesise and admit tasks, roll out demonstrations, train two experts, merge, train on, evaluate, promote.

    Args:
        recipe: Profile name (laptop, ci) or a whole recipe as YAML text.
        run_dir: Directory, on storage that every task can reach, that holds all the run makes. Resubmitting with
            the same directory goes on where it stopped.
        seed: Seed of everything random in the run.
        train_tasks: Training tasks to author for each pool. 0 keeps the recipe's number.
        sft_epochs: Passes over the demonstrations of each expert. 0 keeps the recipe's number.
        hdpo_steps: Policy updates of the Marathon expert. 0 keeps the recipe's number.
        hdpo_efficiency_weight: Weight of HDPO's efficiency surrogate beside the accuracy surrogate (weight 1).
            Negative keeps the recipe's.
        sao_steps: Actor updates of the final reinforcement learning. 0 keeps the recipe's number.
        evaluation_tasks: Held-out tasks per pool. 0 keeps the recipe's number.
        evaluation_trials: Attempts at each held-out task, the k of pass^k. 0 keeps the recipe's number.
        promotion_margin: Least gain in success over the base, as a share, that promotes the final checkpoint: the
            lower end of the paired interval must lie above it. Negative keeps the recipe's.
        overrides: Any other recipe key, one key=value a line, for example sao.gate.high=3.0.
    """
    with dsl.ExitHandler(closing(run_dir=run_dir).set_display_name("closing")):
        checked = preflight(
            recipe=recipe,
            run_dir=run_dir,
            seed=seed,
            train_tasks=train_tasks,
            sft_epochs=sft_epochs,
            hdpo_steps=hdpo_steps,
            hdpo_efficiency_weight=hdpo_efficiency_weight,
            sao_steps=sao_steps,
            evaluation_tasks=evaluation_tasks,
            evaluation_trials=evaluation_trials,
            promotion_margin=promotion_margin,
            overrides=overrides,
        ).set_caching_options(False)
        run = {"recipe": checked.outputs["recipe"], "run_dir": run_dir}
        cached = {**run, "code": checked.outputs["code"]}

        authored = synthesis(**cached).set_caching_options(True)
        admitted = admission(
            **cached, tasks_digest=authored.outputs["Output"], tasks=authored.outputs["tasks"]
        ).set_caching_options(True)
        release = admitted.outputs["release"]

        shown = rollout(**run, release=release).set_caching_options(False)
        demonstrations = shown.outputs["demonstrations"]

        # Sampled stages are never cached: a new run is a new sample. Resuming is the stages' own business.
        marathon_sft = sft(**run, candidate="marathon-sft", demonstrations=demonstrations)
        marathon_sft.set_caching_options(False).set_display_name("marathon-sft")
        marathon = hdpo(**run, start=marathon_sft.outputs["model"], release=release).set_caching_options(False)
        sprint = sft(**run, candidate="sprint", demonstrations=demonstrations)
        sprint.set_caching_options(False).set_display_name("sprint-sft")

        merged = soup(
            **cached,
            marathon_digest=marathon.outputs["Output"],
            sprint_digest=sprint.outputs["Output"],
            marathon=marathon.outputs["model"],
            sprint=sprint.outputs["model"],
        ).set_caching_options(True)
        final = sao(**run, start=merged.outputs["model"], release=release).set_caching_options(False)

        made = (admitted, marathon_sft, marathon, sprint, merged, final)
        judged = evaluation(
            **cached,
            digests=" ".join(str(task.outputs["Output"]) for task in made),
            release=release,
            marathon_sft=marathon_sft.outputs["model"],
            marathon=marathon.outputs["model"],
            sprint=sprint.outputs["model"],
            soup=merged.outputs["model"],
            sao=final.outputs["model"],
        ).set_caching_options(True)
        promotion(**run, results=judged.outputs["results"], model=final.outputs["model"]).set_caching_options(False)
