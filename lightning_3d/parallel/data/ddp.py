"""ZeRO 0 by torch's DistributedDataParallel, beside the module instead of around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_3d.parallel.data.engine import DataEngine

# Running statistics are shared by the strategy, once per optimizer step; torch renamed DDP's own switch.
_DDP_ARGUMENTS = signature(DistributedDataParallel.__init__).parameters
_BUFFERS_STAY: Mapping[str, Any] = MappingProxyType(
    {"forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers": False}
)


class DDPEngine(DataEngine):
    """ZeRO 0 by torch's DistributedDataParallel.

    DDP stands beside the module, not around it: it owns a small module that calls the step, so that no name of a
    parameter changes.

    Args:
        module: The module whose gradients are averaged.
        mesh: The data axis.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module = module
        self._group = mesh.get_group()
        self._last = True
        self._trained: tuple[int, ...] = ()
        self._ddp: DistributedDataParallel | None = None
        self._kept = _BucketViews()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls the step through DDP's forward."""
        ddp = self._current()
        ddp.require_backward_grad_sync = self._last
        return ddp(step, *args)

    def visit(self, call: Callable[[], Any]) -> Any:
        """Makes the call; DDP has no part in it."""
        return call()

    def before_microbatch(self, *, last: bool, backwards: int = 1) -> None:
        """Has DDP reduce in the last backward only; until then gradients gather in its buckets."""
        self._last = last
        if last:
            self._kept.release()
        else:
            self._kept.hold()

    def gradients_complete(self) -> None:
        """Remembers DDP's buckets, which the gradients now lie in."""
        self._kept.remember(self._module.parameters())

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Not for DDP, whose reducer serves one backward for each forward; the plan chooses ``replicate`` then."""
        raise AssertionError("DDP serves one backward for each step")

    def after_inner_backward(self) -> None:
        """Nothing to do."""

    def rest(self) -> None:
        """Nothing to do."""

    def _current(self) -> DistributedDataParallel:
        """DDP over the parameters that train now: callbacks may freeze and unfreeze some between epochs."""
        trained = tuple(id(parameter) for parameter in self._module.parameters() if parameter.requires_grad)
        if self._ddp is None or trained != self._trained:
            self._trained = trained
            self._kept.release()
            self._kept = _BucketViews()
            self._ddp = DistributedDataParallel(
                _StepCaller(self._module),
                process_group=self._group,
                # Gradients are views of the buckets: one copy of them instead of two.
                gradient_as_bucket_view=True,
                # A step may leave parameters out, and other ones each time.
                find_unused_parameters=True,
                # Weights are equal by now; DDP would gather and compare them again.
                init_sync=False,
                **_BUFFERS_STAY,
            )
        return self._ddp


class _BucketViews:
    """Puts gradients that wait for the last micro-batch into DDP's buckets.

    DDP moves a gradient into its bucket only when it reduces it. Gradients that were set to None would wait outside,
    beside the empty buckets: a second whole copy.
    """

    def __init__(self) -> None:
        self._views: dict[Tensor, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def remember(self, parameters: Iterable[Tensor]) -> None:
        """Takes gradients that have met for views of the buckets; for one that is none, only memory is lost."""
        self._views |= {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}

    def hold(self) -> None:
        """From now on a new gradient is moved into its bucket as soon as it is there."""
        if not self._hooks:
            self._hooks = [parameter.register_post_accumulate_grad_hook(self._move) for parameter in self._views]

    def release(self) -> None:
        """DDP moves gradients itself again."""
        while self._hooks:
            self._hooks.pop().remove()

    def _move(self, parameter: Tensor) -> None:
        view = self._views[parameter]
        if parameter.grad is not None and parameter.grad is not view:
            parameter.grad = view.copy_(parameter.grad)


class _StepCaller(nn.Module):
    """The module that DDP sees: calls a step, and owns the real module's parameters under one more level."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Never used, so that DDP, told to expect unused parameters, does not warn each user who has none. Like the
        # first parameter, so that it joins its bucket instead of being reduced alone.
        first = next(module.parameters())
        self.unused = nn.Parameter(torch.zeros(1, device=first.device, dtype=first.dtype))

    def forward(self, step: Callable[..., Any], *args: Any) -> Any:
        return step(*args)
