"""A check of a program leaves nothing behind."""

import gc
from typing import Any

from torch import Tensor

from tests.unit.parallel.tensor.replay.toys import block_with, inputs, replayed


def saves_its_result(block: Any, x: Tensor) -> Tensor:
    return block.core(block.norm(x)).exp() + x


def tensors_like(x: Tensor) -> int:
    gc.collect()
    return sum(type(each) is Tensor and each.shape == x.shape for each in gc.get_objects())


def test_a_check_leaves_nothing_in_memory() -> None:
    block = block_with(saves_its_result)
    replayed(block, block.group)
    (x,) = inputs(1)
    before = tensors_like(x)
    for _ in range(4):
        block(x.clone().requires_grad_()).sum().backward()
    # Fewer where what earlier tests have left goes now.
    assert tensors_like(x) <= before
