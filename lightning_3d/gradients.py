"""Gradients over the whole mesh: their norm, clipping and scaling, each element counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the part of every gradient that this rank holds; parameters without a gradient are left out."""
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShare:
    """What a rank of a pipeline knows of the gradients of the whole mesh.

    Attributes:
        ranks: Pipeline ranks.
        holders: On how many of them a parameter of this rank lies, for those that are not here alone.
        device: Where the ranks of the mesh can reduce, also one that has no gradient.
    """

    ranks: int
    holders: Mapping[Tensor, int]
    device: torch.device


def clip_by_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None,
    share: PipelineShare | None = None,
) -> Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before.

    One scalar all-reduce, and none where every rank holds whole gradients. An element that r ranks hold counts 1/r on
    each of them, so that the sum over the world counts it once. The factor is torch's: max_norm / (norm + 1e-6), at
    most 1.

    Args:
        parameters: The parameters whose gradients count; a tied one stands in it once.
        max_norm: The largest norm that stays; ``inf`` leaves the gradients as they are.
        group: The whole mesh; None in a single process.
        share: Says that other pipeline ranks have other parameters.

    Returns:
        The norm of all gradients as one vector, equal on every rank: a tensor without dims, on the device of the
        gradients (of the group's backend where those are offloaded). In a pipeline it is fp64, since a rank does not
        know what others have.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    locals_ = local_gradients(with_gradient)
    norm = _norm(with_gradient, locals_, group, share)
    if locals_:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        _scale(locals_, factor)
    return norm


def _norm(
    parameters: list[Tensor], locals_: list[Tensor], group: dist.ProcessGroup | None, share: PipelineShare | None
) -> Tensor:
    if group is None or (share is None and not any(_is_cut(parameter) for parameter in parameters)):
        return nn.utils.get_total_norm(locals_)
    dtype = _wide(locals_) if share is None else torch.float64
    device = _reduction_device(locals_, group) if share is None else share.device
    total = torch.zeros((), dtype=dtype, device=device)
    for weight, part in _by_weight(parameters, locals_, group.size(), share):
        total += weight * nn.utils.get_total_norm(part).to(total) ** 2
    dist.all_reduce(total, group=group)
    return total**0.5


def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clamps every element of every gradient to [-value, value]."""
    locals_ = local_gradients(parameters)
    if locals_:
        torch._foreach_clamp_min_(locals_, -value)
        torch._foreach_clamp_max_(locals_, value)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies every gradient by a factor that is equal on all ranks."""
    locals_ = local_gradients(parameters)
    if locals_:
        _scale(locals_, factor)


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    for dtype in {gradient.dtype for gradient in gradients}:
        of_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        torch._foreach_mul_(of_dtype, factor.to(device=of_dtype[0].device, dtype=dtype))


def _local(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient.detach()
    with torch.no_grad():
        return gradient.to_local()


def _is_cut(parameter: Tensor) -> bool:
    gradient = parameter.grad
    return isinstance(gradient, DTensor) and not all(isinstance(place, Replicate) for place in gradient.placements)


def _by_weight(
    parameters: list[Tensor], locals_: list[Tensor], world: int, share: PipelineShare | None
) -> list[tuple[float, list[Tensor]]]:
    """The local gradients by the weight with which they count in a sum over the world."""
    parts: dict[float, list[Tensor]] = {}
    for parameter, local in zip(parameters, locals_, strict=True):
        holders = _holders(parameter.grad, world)
        if share is not None:
            holders = holders * share.holders.get(parameter, 1) / share.ranks
        parts.setdefault(holders, []).append(local)
    return [(1.0 / holders, part) for holders, part in parts.items()]


def _holders(gradient: Tensor | None, world: int) -> float:
    """On how many ranks of the world each element of a gradient lies, if all stages have the parameter."""
    if not isinstance(gradient, DTensor):
        return float(world)
    mesh = gradient.device_mesh
    shards = 1
    for dim, place in enumerate(gradient.placements):
        if not isinstance(place, Replicate):
            shards *= mesh.size(dim)
    return world / shards


def _wide(tensors: list[Tensor]) -> torch.dtype:
    """The dtype to add squares in: at least fp32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _reduction_device(tensors: list[Tensor], group: dist.ProcessGroup) -> torch.device:
    """Where the group can reduce: beside the gradients, unless they are offloaded and the group is nccl's alone."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return tensors[0].device
