"""Applying a DataPlan to a module, and running its steps under the chosen engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.data.kept import KeptBlocks
from lightning_3d.parallel.data.plan import DataPlan
from lightning_3d.parallel.data.scalars import ScalarGradients, scalar_parameters
from lightning_3d.parallel.data.zero import ZeroStage

_DOOR = "_mesh_3d_door"
# What torch says when a parameter that is cut meets a plain tensor.
_MIXED = "mixed torch.Tensor and DTensor"
# Running statistics are shared by the strategy, once per optimizer step; torch renamed DDP's own switch.
_DDP_ARGUMENTS = signature(DistributedDataParallel.__init__).parameters
_BUFFERS_STAY: Mapping[str, Any] = MappingProxyType(
    {"forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers": False}
)


class DataEngine(ABC):
    """Runs steps of a module and keeps its gradients in step over the data axis."""

    @abstractmethod
    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Returns ``step(*args)``, a method of the module that calls it or its parts, with gradients to come."""

    @abstractmethod
    def visit(self, call: Callable[[], Any]) -> Any:
        """Returns ``call()``, a use of the module that is no training step; nothing stays gathered behind it."""

    @abstractmethod
    def before_microbatch(self, *, last: bool) -> None:
        """Called before the forward of a micro-batch; ``last`` before the optimizer step, so gradients must meet."""

    def gradients_complete(self) -> None:
        """Called when the gradients of an optimizer step have met, before anything reads them."""
        return

    @abstractmethod
    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Called for a backward inside a step that is still running; returns the loss to go backward from."""

    @abstractmethod
    def after_inner_backward(self) -> None:
        """Called after a backward, or an optimizer step, inside a step that is still running."""

    @abstractmethod
    def rest(self) -> None:
        """Called when no step runs for a while, and before weights are read or written from outside."""


class PlainEngine(DataEngine):
    """One data rank: the module as it is."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls the step."""
        return step(*args)

    def visit(self, call: Callable[[], Any]) -> Any:
        """Makes the call."""
        return call()

    def before_microbatch(self, *, last: bool) -> None:
        """Nothing to do."""

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Nothing to do."""
        return loss

    def after_inner_backward(self) -> None:
        """Nothing to do."""

    def rest(self) -> None:
        """Nothing to do."""


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

    def before_microbatch(self, *, last: bool) -> None:
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


class UnitEngine(DataEngine):
    """ZeRO 1 to 3 by ``fully_shard``, or ZeRO 0 by ``replicate``, both of FSDP2.

    Args:
        root: The module whose units were sharded, itself the last of them.
        stage: When units gather and reduce.
        sharded: Whether there are shards (``fully_shard``) or whole copies (``replicate``).
        scalars: Averages the gradients of what no unit manages.
    """

    def __init__(self, root: FSDPModule, stage: ZeroStage, *, sharded: bool, scalars: ScalarGradients) -> None:
        self._root = root
        self._stage = stage
        self._sharded = sharded
        self._scalars = scalars
        self._last: bool | None = None
        self._inside = False
        self._left = False
        self._kept: KeptBlocks | None = None
        module = _as_module(root)
        self._units = [child for child in module.modules() if isinstance(child, FSDPModule)]
        # One door for every step: FSDP2 gathers the root and registers its hooks around this method.
        module.__dict__[_DOOR] = _through
        register_fsdp_forward_method(module, _DOOR)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls the step through the root's door."""
        self._hide_kept_blocks()
        self._inside, self._left = True, False
        try:
            return getattr(self._root, _DOOR)(step, *args)
        finally:
            self._inside = False

    def visit(self, call: Callable[[], Any]) -> Any:
        """Makes the call through the root's door, and lets go what it gathered: weights may change before the next.

        Inside a step, where the root is gathered, it is a call like any other.
        """
        if self._inside:
            if self._left:
                self._left = False
                self._root.unshard()
            return call()
        try:
            return self.run(call)
        finally:
            self.rest()

    def before_microbatch(self, *, last: bool) -> None:
        """Tells every unit what its next backward does."""
        if last == self._last:
            return
        self._last = last
        for unit in self._units:
            settings = self._stage.root(last=last) if unit is self._root else self._stage.blocks(last=last)
            unit.set_requires_gradient_sync(settings.reduce_scatter, recurse=False)
            if self._sharded:
                unit.set_requires_all_reduce(settings.all_reduce, recurse=False)
                unit.set_reshard_after_backward(settings.reshard, recurse=False)

    def gradients_complete(self) -> None:
        """Averages what no unit manages."""
        self._scalars.average()

    def _hide_kept_blocks(self) -> None:
        if self._kept is not None:
            self._kept.hide()
        elif self._sharded and not self._stage.reshard_blocks_after_forward:
            self.rest()
            self._kept = KeptBlocks([_as_module(unit) for unit in self._units if unit is not self._root])

    def before_inner_backward(self, loss: Tensor) -> Tensor:
        """Passes the loss through the door: its backward then ends with the reduction of every unit."""
        # The loss is no argument: FSDP2 takes a gradient that reaches an argument for the end of the whole backward.
        # It registers its hook on what leaves the door; a clone is a tensor of its own, not a view.
        passed: Tensor = getattr(self._root, _DOOR)(loss.clone)
        return passed

    def after_inner_backward(self) -> None:
        """Leaves the parameters at rest, where gradients show; the next call of a part gathers the root again."""
        self.rest()
        self._left = True

    def rest(self) -> None:
        """Lets the gathered parameters of every unit go."""
        for unit in self._units:
            unit.reshard()


def apply_data(
    module: nn.Module,
    plan: DataPlan,
    mesh: DeviceMesh | None,
    *,
    policy: MixedPrecisionPolicy | None = None,
) -> DataEngine:
    """Shards ``module`` in place by the plan and returns the engine that runs its steps.

    Args:
        module: The module; its parameters hold equal values on all data ranks, or are on the meta device.
        plan: The decision.
        mesh: The data axis, replicas x shards for hybrid sharding; None without a process group.
        policy: Dtypes of gathered parameters and of reductions, for engines that work by units.
    """
    if plan.engine == "none":
        return PlainEngine()
    assert mesh is not None, "every other engine reduces over a data axis"
    if plan.engine == "ddp":
        return DDPEngine(module, mesh)
    scalars = scalar_parameters(module)
    stage, cast = ZeroStage(stage=plan.zero_stage), policy or MixedPrecisionPolicy()
    shard = _sharder(plan, mesh, whole=set(scalars))
    for unit in plan.units:
        parts = [module.get_submodule(name) for name in unit.modules]
        own = MixedPrecisionPolicy(cast_forward_inputs=False) if unit.keeps_precision else cast
        shard(parts if len(parts) > 1 else parts[0], stage.reshard_blocks_after_forward, own)
    root = shard(module, False, cast)
    return UnitEngine(
        root,
        stage,
        sharded=plan.engine == "fully_shard",
        scalars=ScalarGradients(scalars, mesh),
    )


def _sharder(
    plan: DataPlan, mesh: DeviceMesh, *, whole: set[nn.Parameter]
) -> Callable[[Any, bool, MixedPrecisionPolicy], FSDPModule]:
    if plan.engine == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate

        def copy(module: Any, reshard_after_forward: bool, policy: MixedPrecisionPolicy) -> FSDPModule:
            copied: FSDPModule = replicate(module, mesh=mesh, mp_policy=policy, ignored_params=whole)
            return copied

        return copy
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if plan.cpu_offload else OffloadPolicy()

    def cut(module: Any, reshard_after_forward: bool, policy: MixedPrecisionPolicy) -> FSDPModule:
        cut_module: FSDPModule = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole,
        )
        return cut_module

    return cut


@contextmanager
def explained() -> Iterator[None]:
    """Tells a user whose step met a parameter while it was cut what happened.

    Raises:
        ModuleError: In place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED not in str(error):
            raise
        raise ModuleError(
            "the step uses a parameter outside the block that owns it, while that block is not gathered.",
            valid="at zero_stage 1 and 2: after the block's forward; at 3: inside its forward; at 0: anywhere",
            fix="for a penalty on all weights the optimizer's weight_decay; else move the use, or zero_stage=0",
        ) from error


def _through(step: Callable[..., Any], *args: Any) -> Any:
    return step(*args)


def _as_module(module: FSDPModule) -> nn.Module:
    assert isinstance(module, nn.Module)
    return module
