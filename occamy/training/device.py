"""Where training runs: CUDA with NCCL, or a CPU on which megatron-core 0.16.1 runs through a small shim.

The shim changes torch for the whole process: call `prepare()` in trainer processes only, before megatron is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

PATIENCE = timedelta(days=1)
"""How long ranks wait for each other: the others wait while the leader waits for a batch, which may take hours to
sample (our choice; torch's default of 10 or 30 minutes would end them). A rank that dies is noticed by torchrun."""


@dataclass(frozen=True)
class Place:
    """What one trainer process runs on."""

    device: torch.device
    backend: str
    """Process-group backend: nccl or gloo."""
    rank: int
    world: int
    """Number of trainer processes."""

    @property
    def leader(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0


def prepare(threads: int = 1) -> Place:
    """Set up torch for this process and join the process group described by torchrun's environment.

    `threads` is the number of CPU threads per process; one keeps results reproducible bit for bit on a CPU.
    Raises RuntimeError when megatron was imported before (too late for the shim) or torchrun's variables are missing.
    """
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise RuntimeError(
            f"environment lacks {', '.join(missing)}; start trainers with torchrun or occamy.training.launch"
        )
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms() does the same after a slow import
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a costly debugging aid
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|full scope).*")
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it in return for determinism
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        place = Place(device, "nccl", rank, world)
    else:
        install_cpu_shim()
        place = Place(torch.device("cpu"), "gloo", rank, world)
    torch.distributed.init_process_group(place.backend, timeout=PATIENCE)
    return place


def leave() -> None:
    """Wait for the other trainer processes and close the process group."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def install_cpu_shim() -> None:
    """Make megatron-core importable and usable without CUDA.

    It replaces `torch.compile` by nothing (compiling small CPU functions costs seconds and gains nothing), answers the
    few `torch.cuda` questions megatron asks, and corrects two helpers that assume CUDA tensors. Does nothing a second
    time. Raises RuntimeError when megatron was imported first, or when CUDA is there and no shim is wanted.
    """
    if getattr(torch.cuda, "_occamy_shim", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError("CUDA is available: the CPU shim would hide it; call prepare() instead")
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before the CPU shim; call occamy.training.device.prepare() first"
        )
    _replace_compile()
    _answer_cuda_calls()
    _correct_megatron()
    torch.cuda._occamy_shim = True  # type: ignore[attr-defined]


def _replace_compile() -> None:
    def keep(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        return function if function is not None else (lambda f: f)

    torch.compile = keep  # type: ignore[assignment]


class _Stream:
    """A stand-in for a CUDA stream or event: everything on a CPU happens in order, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: _Stream) -> None:
        pass

    wait_event = record = wait = wait_stream

    def synchronize(self) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


@contextlib.contextmanager
def _on_stream(_: _Stream) -> Iterator[None]:
    yield


def _answer_cuda_calls() -> None:
    stream, cpu, cuda = _Stream(), torch.device("cpu"), torch.cuda
    answers: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": lambda *_, **__: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": _on_stream,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment,misc]


def _correct_megatron() -> None:
    import megatron.core.tensor_parallel.random as random_states
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random_states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random_states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # 0.16.1 defines it only together with transformer-engine and reads it without.
    moe_utils.te_general_gemm = None

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The original converts only CUDA tensors, and gloo's all-to-all needs the numpy form.
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_host
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
