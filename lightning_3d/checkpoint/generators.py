"""The states of one process' random number generators, as plain containers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lightning_3d.errors import CheckpointError

_NUMPY_GENERATOR = "MT19937"


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the states of Python's, NumPy's and torch's default generators, and of the accelerator's.

    Args:
        device: The device this rank computes on.
    """
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts back what :func:`random_state` returned.

    Args:
        state: The saved states.
        device: The device this rank computes on; its generator is left alone if the state came from another kind.

    Raises:
        CheckpointError: The states are not those of these generators.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        saved = state["numpy"]
        keys = saved["keys"].numpy().astype(np.uint32)
        np.random.set_state((_NUMPY_GENERATOR, keys, saved["position"], saved["has_gauss"], saved["cached"]))
        torch.set_rng_state(state["torch"].cpu())
        if device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the random states in this checkpoint cannot be put back: {error}",
            fix="start a new run from the weights alone",
        ) from error
