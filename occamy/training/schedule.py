"""What happens at which step: learning rate and data order, as pure functions of the step."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def cosine_with_warmup(step: int, total: int, *, peak: float, floor: float, warmup: int) -> float:
    """Learning rate of `step` (0-based) out of `total`.

    Rises linearly from peak/warmup to `peak` over `warmup` steps, then follows half a cosine that reaches `floor` at
    the last step. Raises ValueError for a step outside the run.
    """
    if not 0 <= step < total:
        raise ValueError(f"step {step} is outside a run of {total} steps; check the resumed trainer state")
    if step < warmup:
        return peak * (step + 1) / warmup
    span = max(total - 1 - warmup, 1)
    progress = min((step - warmup) / span, 1.0)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def steps_per_epoch(n: int, batch: int) -> int:
    """Number of batches that n sequences make; the last may be smaller."""
    return -(-n // batch)


def batch_indices(step: int, n: int, batch: int, seed: int) -> tuple[int, NDArray[np.int64]]:
    """Return the epoch of `step` and the sequences of its batch: a pure function, so resuming needs no reader state."""
    epoch, within = divmod(step, steps_per_epoch(n, batch))
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return epoch, order[within * batch : (within + 1) * batch]
