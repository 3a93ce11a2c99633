"""Gradients over the whole mesh: their norm, clipping and scaling, each element counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns the part of every gradient that this rank holds; parameters without a gradient are left out."""
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def total_norm(parameters: Iterable[Tensor], *, group: dist.ProcessGroup | None, norm_type: float = 2.0) -> Tensor:
    """Returns the norm of all gradients as one vector, equal on every rank.

    One scalar all-reduce, and none where every rank holds whole gradients. An element that r ranks hold counts 1/r on
    each of them, so that the sum over the world counts it once.

    Args:
        parameters: The parameters whose gradients count; a tied one stands in it once.
        group: The whole mesh; None in a single process.
        norm_type: p of the p-norm; ``inf`` is the largest absolute value.

    Returns:
        A tensor without dims, on the device of the gradients (of the group's backend where those are offloaded).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return _norm(gradients, [_local(gradient) for gradient in gradients], group, norm_type)


def _norm(gradients: list[Tensor], locals_: list[Tensor], group: dist.ProcessGroup | None, norm_type: float) -> Tensor:
    if group is None or not any(_is_cut(gradient) for gradient in gradients):
        return nn.utils.get_total_norm(locals_, norm_type)
    if norm_type == float("inf"):
        largest = nn.utils.get_total_norm(locals_, norm_type).to(_reduction_device(locals_, group))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return largest
    total = torch.zeros((), dtype=_wide(locals_), device=_reduction_device(locals_, group))
    for weight, part in _by_weight(gradients, locals_, group.size()):
        norm = nn.utils.get_total_norm(part, norm_type)
        total += weight * norm.to(total) ** norm_type
    dist.all_reduce(total, group=group)
    return total ** (1.0 / norm_type)


def clip_by_norm(
    parameters: Sequence[Tensor], max_norm: float, *, group: dist.ProcessGroup | None, norm_type: float = 2.0
) -> Tensor:
    """Scales all gradients so that their norm is at most ``max_norm``; returns the norm before.

    The factor is torch's: max_norm / (norm + 1e-6), at most 1.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [_local(gradient) for gradient in gradients]
    norm = _norm(gradients, locals_, group, norm_type)
    if locals_:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        _scale(locals_, factor)
    return norm


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


def _is_cut(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and not all(isinstance(place, Replicate) for place in gradient.placements)


def _by_weight(gradients: list[Tensor], locals_: list[Tensor], world: int) -> list[tuple[float, list[Tensor]]]:
    """The local gradients by the weight with which they count in a sum over the world."""
    parts: dict[float, list[Tensor]] = {}
    for gradient, local in zip(gradients, locals_, strict=True):
        parts.setdefault(_holders(gradient, world), []).append(local)
    return [(1.0 / holders, part) for holders, part in parts.items()]


def _holders(gradient: Tensor, world: int) -> float:
    """On how many ranks of the world each element of a gradient lies."""
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
