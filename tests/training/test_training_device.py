"""What a trainer process asks of its environment."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter without torchrun's variables: the shim changes torch for a whole process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env={})


def test_a_process_outside_torchrun_is_refused_with_the_missing_names() -> None:
    result = run("from occamy.training.device import prepare; prepare()")
    assert "environment lacks RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in result.stderr


def test_the_shim_comes_before_megatron_and_only_where_cuda_is_absent() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is there: the shim refuses before it looks at megatron")
    code = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('m')\n"
    code += "from occamy.training.device import install_cpu_shim; install_cpu_shim()"
    assert "megatron.core was imported before the CPU shim" in run(code).stderr


def test_ranks_outwait_a_batch_that_takes_hours_to_sample(trainer: Any) -> None:
    import torch

    group = torch.distributed.distributed_c10d._get_default_group()
    assert group._get_backend(torch.device("cpu")).options._timeout >= timedelta(hours=12)
