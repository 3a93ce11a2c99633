"""What a run tells of its plan."""

from __future__ import annotations

from typing import Any

import torch

from lightning_3d import Mesh3DStrategy


def test_advice_about_nodes_is_told_once() -> None:
    strategy: Any = Mesh3DStrategy(tensor_parallel_size=4)
    # Nothing runs: two nodes of two devices are enough to say that four tensor ranks do not fit in one.
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 2
    strategy._applied = "the module"
    told = strategy.explain()
    assert told.startswith("the module\n")
    assert told.count("cannot stay inside nodes of 2 devices") == 1
