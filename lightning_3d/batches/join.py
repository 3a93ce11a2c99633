"""Joining what the micro-batches of one batch returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.batches.weights import LOSS_WEIGHT


def join_outputs(outputs: Sequence[Any], *, sizes: Sequence[int], shares: Sequence[float]) -> Any:
    """Returns one step output for all micro-batches.

    Values without dims are combined with the given shares, tensors whose first dim is their micro-batch are
    concatenated, mappings and tuples are joined entry by entry, everything else becomes a list.

    Args:
        outputs: What the step returned for each micro-batch; all of one structure.
        sizes: Samples of each micro-batch.
        shares: Part of each micro-batch in a mean; they add up to 1.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if all(output is None for output in outputs):
        return None
    if isinstance(first, Tensor):
        return _join_tensors(outputs, sizes, shares)
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(output * share for output, share in zip(outputs, shares, strict=True))
    if isinstance(first, Mapping) and all(output.keys() == first.keys() for output in outputs):
        joined = {key: _join_entry(key, [o[key] for o in outputs], sizes, shares) for key in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if isinstance(first, tuple) and all(len(output) == len(first) for output in outputs):
        items = [join_outputs(entry, sizes=sizes, shares=shares) for entry in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    return list(outputs)


def _join_entry(key: Any, values: list[Any], sizes: Sequence[int], shares: Sequence[float]) -> Any:
    # The weight of a batch is the sum of its parts; a mean of it would weigh nothing.
    return sum(values) if key == LOSS_WEIGHT else join_outputs(values, sizes=sizes, shares=shares)


def _join_tensors(tensors: Sequence[Tensor], sizes: Sequence[int], shares: Sequence[float]) -> Any:
    if all(tensor.dim() == 0 for tensor in tensors):
        mean = sum(tensor * share for tensor, share in zip(tensors, shares, strict=True))
        return mean.to(tensors[0].dtype) if tensors[0].is_floating_point() else mean  # type: ignore[union-attr]
    cut = all(tensor.dim() > 0 and tensor.size(0) == size for tensor, size in zip(tensors, sizes, strict=True))
    same = all(tensor.shape[1:] == tensors[0].shape[1:] for tensor in tensors)
    return torch.cat(list(tensors)) if cut and same else list(tensors)
