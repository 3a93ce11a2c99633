"""Tensors of all ranks of a group, of any shapes and dtypes: states of metrics, some of which were told nothing."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)
_KINDS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(*_NARROW, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
# Dims that a header has room for.
_DIMS = 8


def gather_tensors(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Returns the tensors of all ranks of a group, in group order, in one dtype. A collective.

    Torchmetrics' own needs one dtype and at most as many dims everywhere, which a rank that was told nothing does not
    have; and gloo sends no narrow floats.

    Args:
        tensor: This rank's; among the results it keeps its graph.
        group: The ranks.
    """
    headers = _headers(tensor, group)
    filled = [header for header in headers if 0 not in header[1]] or headers
    kind = functools.reduce(torch.promote_types, (dtype for dtype, _ in filled))
    sent = torch.float32 if kind in _NARROW else kind
    sizes = [torch.Size(shape).numel() for _, shape in headers]
    flat = tensor.new_zeros(max(sizes), dtype=sent)
    flat[: tensor.numel()] = tensor.detach().reshape(-1)
    parts = [torch.empty_like(flat) for _ in sizes]
    dist.all_gather(parts, flat, group=group)
    gathered = [
        part[:size].reshape(shape).to(kind) for part, size, (_, shape) in zip(parts, sizes, headers, strict=True)
    ]
    gathered[group.rank()] = tensor.to(kind)
    return gathered


def _headers(tensor: Tensor, group: dist.ProcessGroup) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype and shape of each rank's tensor."""
    shape = tuple(tensor.shape)
    header = [_KINDS.index(tensor.dtype), len(shape), *shape, *[0] * (_DIMS - len(shape))]
    mine = torch.tensor(header, device=tensor.device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    rows = torch.stack(every).tolist()
    return [(_KINDS[kind], tuple(dims[:count])) for kind, count, *dims in rows]
