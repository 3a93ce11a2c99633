"""One step of a module on one device, and on tensor ranks that are threads: values and gradients, to be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.seed import _set_rng_states
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.batches.weights import loss_of
from lightning_3d.parallel.tensor.doors import whole
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof.copies import Heard, Whole, copied, listened
from lightning_3d.parallel.tensor.proof.turns import run_in_turns
from lightning_3d.parallel.tensor.regions.run import run_regions
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardGroup, ShardOptions
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.partial import PartialTensor

# Of the largest gradient in a model: smaller ones count as this large, so that those that are zero do not count.
_SMALLEST = 1e-6

RandomStates = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall:
    """The call of a user's step.

    Attributes:
        method: Its name, such as ``training_step``.
        args: Its arguments, the batch first.
    """

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a step gave on one rank.

    Attributes:
        values: Floating tensors that it returned and logged, whole.
        gradients: Of each parameter that wants one, by its first name; a part if it is cut, None if it got none.
    """

    values: list[Tensor]
    gradients: dict[str, Tensor | None]

    @property
    def usable(self) -> bool:
        """Whether there is something to compare: finite numbers, and gradients that are not all zero."""
        gradients = [gradient for gradient in self.gradients.values() if gradient is not None]
        finite = all(bool(tensor.isfinite().all()) for tensor in (*self.values, *gradients))
        return finite and (not self.gradients or largest(gradients) > 0) and bool(self.values or gradients)


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """How far ranks are from one device, relatively.

    Attributes:
        value: Of what the step returned and logged: the largest error.
        gradients: Of each parameter's gradient, on the rank where it is largest.
    """

    value: float
    gradients: Mapping[str, float] = field(default_factory=dict)

    @property
    def parameter(self) -> str | None:
        """The parameter whose gradient has the largest error."""
        return max(self.gradients, key=self.gradients.__getitem__, default=None)

    @property
    def gradient(self) -> float:
        """The largest error of a gradient."""
        return max(self.gradients.values(), default=0.0)

    @property
    def largest(self) -> float:
        """The largest error."""
        return max(self.value, self.gradient)


def run_alone(module: LightningModule, call: StepCall, tensors: Whole, states: RandomStates) -> Outcome:
    """Runs a step of a copy of the module, as on one device.

    Args:
        module: The module, whose stacks may be shortened.
        call: The step.
        tensors: Values of the module's tensors.
        states: Where random numbers begin.
    """
    _set_rng_states(states)
    shown = {key: _own(tensors.tensors[key]) for key in tensors.names}
    leaves = {name: shown[key] for key, name in tensors.names.items()}
    return _outcome(copied(module, {**_own_others(tensors), **shown}, tensors.dtype), call, leaves)


def run_ranks(
    module: LightningModule, call: StepCall, tensors: Whole, states: RandomStates, plan: TensorPlan, *, timeout: float
) -> list[Outcome]:
    """Runs a step of copies of the module, cut over ranks that are threads.

    Args:
        module: The module, whose stacks may be shortened.
        call: The step.
        tensors: Values of the module's whole tensors.
        states: Where random numbers begin.
        plan: How they are cut.
        timeout: Seconds that a rank waits for the others.
    """

    def rank(group: ShardGroup) -> Outcome:
        _set_rng_states(states)
        leaves, shown = _local(tensors, plan, group)
        twin = copied(module, {**_own_others(tensors), **shown}, tensors.dtype)
        run_regions(twin, plan.regions, group)
        outcome = _outcome(twin, call, leaves)
        for name in plan.partial & outcome.gradients.keys():
            gradient = outcome.gradients[name]
            outcome.gradients[name] = group.sum(torch.zeros_like(leaves[name]) if gradient is None else gradient)
        return outcome

    # Dropout draws the mask of one device, and random numbers without a rule are drawn whole.
    options = ShardOptions(sequence=plan.sequence, exact_random=True)
    return run_in_turns(plan.size, rank, options=options, timeout=timeout)


def errors_of(alone: Outcome, ranks: Sequence[Outcome], layouts: Mapping[str, Layout]) -> Errors:
    """Returns how far the ranks are from one device.

    Args:
        alone: What one device gave.
        ranks: What each rank gave, in order.
        layouts: How parameters are cut.
    """
    value = max((_value_error(alone.values, outcome.values) for outcome in ranks), default=0.0)
    scale = _SMALLEST * largest(gradient for gradient in alone.gradients.values() if gradient is not None)
    gradients = {}
    for name, expected in alone.gradients.items():
        parts = [outcome.gradients[name] for outcome in ranks]
        if expected is not None or any(part is not None for part in parts):
            gradients[name] = _gradient_error(expected, parts, layouts.get(name), scale)
    return Errors(value=value, gradients=gradients)


def _value_error(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest error of what one rank gave."""
    if [value.shape for value in expected] != [value.shape for value in found]:
        return float("inf")
    pairs = zip(found, expected, strict=True)
    return max((_error(own, value, max(largest([value]), _SMALLEST)) for own, value in pairs), default=0.0)


def _gradient_error(
    expected: Tensor | None, parts: Sequence[Tensor | None], layout: Layout | None, scale: float
) -> float:
    """The error of one gradient; none stands for zeros."""
    if all(part is None for part in parts):
        found = [torch.zeros(())]
    else:
        like = next(part for part in parts if part is not None)
        filled = [torch.zeros_like(like) if part is None else part for part in parts]
        found = filled if layout is None else [layout.whole(filled)]
    target = torch.zeros_like(found[0]) if expected is None else expected
    size = max(largest([target]), scale)
    return max(_error(each, target, size) for each in found)


def largest(tensors: Iterable[Tensor]) -> float:
    """Returns the largest absolute element of some tensors."""
    return max((float(tensor.abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def _local(tensors: Whole, plan: TensorPlan, group: ShardGroup) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """This rank's leaves by name, and what the module shows in their place."""
    leaves: dict[str, Tensor] = {}
    shown: dict[int, Tensor] = {}
    layouts = plan.layouts
    for key, name in tensors.names.items():
        value, layout = tensors.tensors[key], layouts.get(name)
        if layout is None:
            leaf = _own(value)
            shown[key] = PartialTensor(leaf, group) if name in plan.partial else leaf
        else:
            part = layout.part(value.detach(), group.rank, group.size)
            leaf = part.clone(memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)
            shown[key] = Shard(leaf, layout.dim, layout.segments, group)
        leaves[name] = leaf
    return leaves, shown


def _own(value: Tensor) -> Tensor:
    """A parameter of one run, since a step may write to it, as one that follows another slowly."""
    return nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)


def _own_others(tensors: Whole) -> dict[int, Tensor]:
    """Buffers and the like, which a step may write to."""
    return {key: tensor.clone() for key, tensor in tensors.tensors.items() if key not in tensors.names}


def _outcome(twin: LightningModule, call: StepCall, leaves: Mapping[str, Tensor]) -> Outcome:
    args = pytree.tree_map_only(Tensor, Tensor.clone, call.args)
    with torch.enable_grad(), listened(twin) as heard:
        output, logged = whole((getattr(twin, call.method)(*args), heard.logged))
        values = [leaf for leaf in pytree.tree_leaves((output, logged)) if _is_floating(leaf)]
        loss = _loss(output if call.method == "training_step" else None, values, heard)
        if loss is not None:
            loss.backward()
    return Outcome(
        values=[value.detach() for value in values],
        gradients={name: leaf.grad for name, leaf in leaves.items() if loss is not None and leaf.requires_grad},
    )


def _loss(output: Any, values: Sequence[Tensor], heard: Heard) -> Tensor | None:
    """What gradients are taken of: the step's own loss, or else all that it gives, mixed at random."""
    own = loss_of(output)
    losses = [whole(loss) for loss in (*heard.losses, *([] if own is None else [own])) if loss.requires_grad]
    if not losses:
        losses = [(value * _weights(value)).sum() for value in values if value.requires_grad]
    return sum(losses[1:], losses[0]) if losses else None


def _weights(value: Tensor) -> Tensor:
    weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()), dtype=value.dtype)
    return weights / max(value.numel(), 1)


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _error(found: Tensor, expected: Tensor, size: float) -> float:
    difference = float((found - expected).abs().max()) if expected.numel() else 0.0
    if difference == 0:
        return 0.0
    return difference / size if size and difference == difference else float("inf")
