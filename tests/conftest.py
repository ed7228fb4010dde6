"""Settings that hold for all tests: one thread per process, nothing from the network, no usage reports."""

import os
from pathlib import Path

import pytest

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}.items():
    os.environ[name] = value


@pytest.fixture(scope="session")
def random_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained nano checkpoint with tokenizer and lineage card."""
    from occamy.nano.pretrain import PretrainConfig, pretrain

    config = PretrainConfig(tokens=1, batch_tokens=512, pool_documents=8, validation_documents=1, warmup_steps=1)
    return pretrain(tmp_path_factory.mktemp("base"), config)
