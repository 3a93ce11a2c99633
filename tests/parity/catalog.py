"""All models of the proof by name, and their batches, equal in every process."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.models import MODELS, Batch, Learner
from tests.parity.pipeline_models import PIPELINE_MODELS
from tests.parity.tensor_models import TENSOR_MODELS

CATALOG = {**MODELS, **TENSOR_MODELS, **PIPELINE_MODELS}


def build(name: str, seed: int = 0) -> Learner:
    """Returns a model with the same weights in every process."""
    torch.manual_seed(seed)
    return CATALOG[name][0]()


def global_batches(name: str, count: int, samples: int, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """Returns ``count`` batches of all data ranks together, equal in every process."""
    generator = torch.Generator().manual_seed(11)
    make: Any = CATALOG[name][1]
    return [
        tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in make(samples, generator))
        for _ in range(count)
    ]
