"""The pipeline as IR YAML: what the Kubeflow UI takes."""

import warnings
from pathlib import Path

from kfp import compiler

from pipelines.post_training import post_training


def write_ir(path: Path) -> None:
    """Compile the post-training pipeline to `path`, making its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=FutureWarning)
        compiler.Compiler().compile(post_training, str(path))
