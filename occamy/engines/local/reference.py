"""A float32 forward pass by transformers, to compare an engine's log-probs with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from occamy.engines.logprob_checks import Reference


def load_reference(folder: Path) -> Reference:
    """Load a checkpoint folder in float32. Raises OSError or ValueError of transformers when it cannot be loaded."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(tokens: Sequence[int]) -> NDArray[np.float32]:
        out: NDArray[np.float32] = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
        return out

    return logits
