"""Run the pipeline on this machine: kfp.local with one subprocess per task, on an existing run directory.

``python -m pipelines.local RUN_DIR`` is what `occamy run` starts; its output is KFP's raw log.
"""

import argparse
import json
import shutil
import sys
import warnings
from pathlib import Path

from kfp import local

from occamy.stages.context import end_with_owner
from pipelines.post_training import post_training


def run_local(run_dir: Path) -> None:
    """Run the post-training pipeline on `run_dir`, which holds run.json and recipe.json. Finished stages are reused.

    Raises RuntimeError naming the task that failed.
    """
    seed = int(json.loads((run_dir / "run.json").read_text())["seed"])
    root = run_dir / "work" / "kfp"
    shutil.rmtree(root, ignore_errors=True)  # KFP's own scratch: what stages make lies under stages/
    warnings.filterwarnings("ignore", category=FutureWarning)
    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(root),
        workspace_root=str(root / "workspace"),  # KFP deletes it after every pipeline
        raise_on_error=True,
    )
    post_training(recipe=(run_dir / "recipe.json").read_text(), run_dir=str(run_dir), seed=seed)


def main() -> int:
    """Entry point of the child process of `occamy run`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    end_with_owner()
    run_local(parser.parse_args().run_dir.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
