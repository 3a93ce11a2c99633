"""What Lightning and torchmetrics reduce: values that differ between data ranks, and decisions of the whole world."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_OPERATIONS: Mapping[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class DataCollectives:
    """Reductions over the data axis, so that values count once for each set of samples.

    Args:
        data: The data axis.
        world: All ranks.
        device: Where tensors must lie to be reduced.
    """

    def __init__(self, data: dist.ProcessGroup, world: dist.ProcessGroup, device: torch.device) -> None:
        self.data = data
        # The weight of this rank's values in means, where ranks may weigh differently; None = all alike.
        self.weight: float | None = None
        self._world = world
        self._device = device

    def reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, operation: Any) -> Tensor:
        """Returns ``tensor`` reduced over a group, the data axis if None is given.

        Means are taken in floating point, also of integers, and narrow floats are reduced in fp32.

        Args:
            tensor: Equal in shape on all ranks; never written to.
            group: The ranks; None or the world stand for the data axis.
            operation: "mean", "avg", "sum", "min", "max", "product", or a torch ReduceOp.
        """
        group = self._counted(group)
        if group.size() == 1:
            return tensor
        name = operation.lower() if isinstance(operation, str) else None
        mean = name in ("mean", "avg") or operation == dist.ReduceOp.AVG
        wide = tensor.detach().to(self._device, _wide(tensor.dtype, mean=mean), copy=True)
        if mean:
            wide = self._mean(wide, group)
        else:
            operation = _OPERATIONS.get(name or "", operation)
            if self.weight == 0:
                wide.fill_(_neutral(operation, wide.dtype))
            dist.all_reduce(wide, op=operation, group=group)
        keep = mean and not tensor.is_floating_point()
        return wide.to(tensor.device) if keep else wide.to(tensor.device, tensor.dtype)

    def gather(self, tensor: Tensor, group: dist.ProcessGroup | None, *, with_gradients: bool) -> Tensor:
        """Returns the tensors of a group stacked on a new first dim; the tensor itself where the group is one rank."""
        group = self._counted(group)
        if group.size() == 1:
            return tensor
        with torch.set_grad_enabled(with_gradients and torch.is_grad_enabled()):
            gathered: Tensor = _Gather.apply(tensor, group, self._device)  # type: ignore[no-untyped-call]
            return gathered

    def agree(self, decision: bool, *, all_ranks: bool) -> bool:
        """Returns whether all ranks of the world, or any of them, decided True."""
        if self._world.size() == 1:
            return decision
        value = torch.tensor(int(decision), device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN if all_ranks else dist.ReduceOp.MAX, group=self._world)
        return bool(value)

    def total(self, number: int) -> int:
        """Returns the sum of a number over the data axis."""
        value = torch.tensor(number, device=self._device)
        dist.all_reduce(value, group=self.data)
        return int(value)

    def largest(self, numbers: list[int]) -> list[int]:
        """Returns the largest of each number over the data axis."""
        return self._extremes(numbers, dist.ReduceOp.MAX)

    def smallest(self, numbers: list[int]) -> list[int]:
        """Returns the smallest of each number over the data axis."""
        return self._extremes(numbers, dist.ReduceOp.MIN)

    def _extremes(self, numbers: list[int], operation: Any) -> list[int]:
        if self.data.size() == 1 or not numbers:
            return numbers
        values = torch.tensor(numbers, device=self._device)
        dist.all_reduce(values, op=operation, group=self.data)
        return [int(value) for value in values]

    def _mean(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        if self.weight is None:
            dist.all_reduce(values, group=group)
            return values / group.size()
        # A rank of weight 0 may hold anything, so its values are replaced, not multiplied.
        kept = values * self.weight if self.weight else torch.zeros_like(values)
        both = torch.cat([kept.reshape(-1), kept.new_tensor([self.weight])])
        dist.all_reduce(both, group=group)
        return (both[:-1] / both[-1]).reshape(values.shape)

    def _counted(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        return self.data if group is None or group is self._world else group


class _Gather(torch.autograd.Function):
    """Stacks the tensors of a group; in backward each rank's tensor gets the gradients that all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
        ctx.group, ctx.device = group, device
        mine = tensor.detach().to(device).contiguous()
        gathered = mine.new_empty((group.size(), *mine.shape))
        dist.all_gather(list(gathered.unbind()), mine, group=group)
        return gathered.to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].to(ctx.device, copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()].to(gradients[0].device), None, None


def _wide(dtype: torch.dtype, *, mean: bool) -> torch.dtype:
    """The dtype to reduce in: integers keep theirs unless averaged, floats have at least 32 bits."""
    if dtype == torch.bool:
        return torch.int64 if not mean else torch.float32
    if dtype in (torch.float16, torch.bfloat16) or (mean and not dtype.is_floating_point):
        return torch.float32
    return dtype


def _neutral(operation: Any, dtype: torch.dtype) -> float:
    """What a rank that does not count adds to a reduction."""
    if operation == dist.ReduceOp.PRODUCT:
        return 1
    if operation not in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
        return 0
    low, high = float("-inf"), float("inf")
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return low if operation == dist.ReduceOp.MAX else high
